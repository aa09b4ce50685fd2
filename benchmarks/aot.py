"""What XLA's compilers say of the benchmark's workloads on accelerators that are not there.

    python -m benchmarks.aot --work W2 W3 --targets v5e:1x1

Compiles the rounds of `speed.py`'s workloads, the convolutions as they are, by im2col, and by
Winograd's filtering where it can. Nothing runs. Milliseconds are of the longest loop body, a
step of all clients that train at once, by the model of the chip that XLA:TPU schedules with: trust
ratios above 1.5. XLA estimates no time for a GPU; kernels and MB of such a step are counted by
`kernels.py`. Prints a table in markdown and writes a JSON file.
Needs the extra `aot` for TPUs and `cuda12` for the GPU.
"""

import argparse
import re
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import jax
import numpy as np
import optax

import fedjax_sim as fs
from benchmarks.baselines.ours import experiment_of, lowered_by
from benchmarks.kernels import Program
from benchmarks.reproduce.common import markdown
from benchmarks.script import write_record
from benchmarks.workloads import VOCABULARY, WORKLOADS
from fedjax_sim.cli.training import Precision
from fedjax_sim.data import eval_set
from fedjax_sim.engine.execution import Execution
from fedjax_sim.engine.memory import MB, compile_program
from fedjax_sim.engine.targets import devices_of, options_for, program_report
from fedjax_sim.models.convolutions import Lowering
from fedjax_sim.run.programs import Programs
from fedjax_sim.run.runner import Runner

HERE = Path(__file__).resolve().parent
TARGETS = ("v5e:1x1", "v5e:2x2", "h100")
GHZ = 1.5  # of a v5e


class Text(NamedTuple):
    """A transformer that learns text, whole or by LoRA.

    Attributes:
        clients: number of clients that train at once.
        rank: of LoRA; 0 trains all weights.
        net: settings of the transformer.
        batch: sequences in a minibatch.
        window: tokens in a sequence.
        vocabulary: number of tokens.
    """

    clients: int
    rank: int = 0
    net: Mapping[str, Any] = MappingProxyType({})
    batch: int = 10
    window: int = 80
    vocabulary: int = VOCABULARY


BILLION: dict[str, Any] = {"width": 4096, "layers": 5, "heads": 32}
GPT2: dict[str, Any] = {"width": 768, "layers": 12, "heads": 12, "bias": True, "remat": True}
TEXTS = {
    "transformer": Text(10),
    "LoRA": Text(32, rank=8),
    "LoRA-remat": Text(32, rank=8, net={"remat": True}),
}
LARGE = {
    "transformer 1B": Text(8, net=BILLION),
    "LoRA 1B": Text(8, rank=8, net=BILLION),
    "GPT-2 LoRA": Text(8, rank=8, net=GPT2, batch=4, window=512, vocabulary=50_257),
}
"""Workloads that take a compiler long, which run only if named."""
CONVOLUTIONAL = ("W2", "W3")
WAYS: dict[str, Lowering | None] = {"as it is": None, "im2col": "im2col", "winograd": "winograd"}


def longest(text: str) -> float | None:
    """Milliseconds of a program's longest computation; None if XLA estimates none."""
    cycles: Counter[str] = Counter()
    name = ""
    for line in text.splitlines():
        if line[:1] not in ("", " ", "}"):
            name = line
        cycles[name] += sum(int(n) for n in re.findall(r'"estimated_cycles":"(\d+)"', line))
    most = max(cycles.values(), default=0)
    return most / (GHZ * 1e6) if most else None


def text_experiment(work: Text, execution: Execution) -> Runner:
    """Returns a run whose clients have 40 sequences each."""
    model = fs.models.transformer((work.window,), work.vocabulary, **work.net)
    model = fs.models.lora(model, work.rank) if work.rank else model
    x = np.zeros((40 * work.clients, work.window), np.uint8)
    partition = fs.partition.iid(x[:, 0], work.clients, seed=0)
    data = fs.client_data(x, x.astype(np.int32), partition)
    task = fs.tasks.next_token(work.vocabulary)
    local = fs.local_sgd(
        fs.empirical_risk(model, task.loss),
        optax.sgd(0.1),
        batch_size=work.batch,
        trained=fs.leaves.named("A", "B") if work.rank else None,
    )
    sent = fs.exchange.split(frozen=fs.leaves.named("trunk")) if work.rank else None
    algorithm = fs.compose(local, work.clients, exchange=sent).on(execution)
    return Runner(Programs(algorithm, model, task, data, (eval_set(x[:1], x[:1]),), 1, 8))


def compiled(
    work: str, target: str, way: str, precision: Precision = "f32", model_devices: int = 1
) -> dict[str, Any]:
    """A row: the program of the rounds."""
    execution = fs.make_execution(devices_of(target), model_devices=model_devices)
    with lowered_by(WAYS[way]):
        began = time.perf_counter()
        runner = (
            text_experiment(text_work, execution)
            if (text_work := (TEXTS | LARGE).get(work))
            else experiment_of(WORKLOADS[work], execution, precision)
        )
        lowered = dict(runner.programs.lowered())["advance"]
        program = compile_program(lowered, options_for(execution.devices))
    found = program_report("advance", time.perf_counter() - began, program)
    text = program.as_text() or ""
    ms = longest(text)
    step = Program(text).step() if target == "h100" else None
    return {
        "work": work,
        "target": target,
        "": way,
        "precision": precision,
        "devices a model": model_devices,
        "compile s": f"{found.seconds:.0f}",
        "arguments MB": f"{found.arguments / MB:,.0f}",
        "temporaries MB": f"{found.temporaries / MB:,.0f}",
        "est. ms a step": "-" if ms is None else f"{ms:.3g}",
        "kernels a step": step.kernels if step else "-",
        "of cuDNN and cuBLAS": step.library if step else "-",
        "MB a step": f"{step.mb:,.0f}" if step else "-",
        "collectives": ", ".join(f"{n} {kind}" for kind, n in found.collectives.items()),
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.aot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add, works = parser.add_argument, [*WORKLOADS, *TEXTS]
    add("--work", nargs="+", choices=[*works, *LARGE], default=works, metavar="W")
    add("--targets", nargs="+", default=list(TARGETS), metavar="TARGET")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    known = get_args(Precision)
    add("--model-devices", type=int, default=1, metavar="M")
    add("--precisions", nargs="+", choices=known, default=["f32"], metavar="PRECISION")
    add("--out", type=Path, default=HERE / "results" / "aot.json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Compiles all, prints the table and writes it."""
    args = parse(argv)
    settings: Any = jax.config  # untyped
    settings.update("jax_platforms", "cpu")  # the target of the compilation is absent
    started, rows = time.time(), []
    for work in args.work:
        for target in args.targets:
            for way in args.ways:
                if way != "as it is" and work not in CONVOLUTIONAL:
                    continue
                precisions: list[Precision] = ["f32"] if work in TEXTS | LARGE else args.precisions
                for precision in precisions:
                    rows.append(compiled(work, target, way, precision, args.model_devices))
                    print(*rows[-1].values(), sep="  ", flush=True)
    print(f"\n{markdown(rows)}")
    write_record(args.out, started, table=rows)


if __name__ == "__main__":
    main()
