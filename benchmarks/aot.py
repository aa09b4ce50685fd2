"""What XLA's compilers say of the benchmark's workloads on accelerators that are not there.

    python -m benchmarks.aot --work W2 W3 --targets v5e:1x1

Compiles the rounds of `speed.py`'s workloads, the convolutions as they are, by im2col, and by
Winograd's filtering where it can. Nothing runs. Milliseconds are those of the longest loop body, a
step of all clients that train at once, by the model of the chip that XLA:TPU schedules with: trust
ratios above 1.5; of a GPU XLA says no time. Prints a table in markdown and writes a JSON file.
Needs the extra `aot` for TPUs and `cuda12` for the GPU.
"""

import argparse
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax

import fedjax_sim as fs
from benchmarks.baselines.ours import experiment_of, lowered_by
from benchmarks.reproduce.common import markdown
from benchmarks.script import write_record
from benchmarks.workloads import WORKLOADS
from fedjax_sim.engine.memory import MB, compile_program
from fedjax_sim.engine.targets import devices_of, options_for, program_report
from fedjax_sim.models.convolutions import Lowering

HERE = Path(__file__).resolve().parent
TARGETS = ("v5e:1x1", "v5e:2x2", "h100")
GHZ = 1.5  # of a v5e
LIBRARY = re.compile(r'custom_call_target="__cu(?:dnn|blas)')
CONVOLUTIONAL = ("cnn", "bn_cnn")
WAYS: dict[str, Lowering | None] = {"as it is": None, "im2col": "im2col", "winograd": "winograd"}


def longest(text: str) -> float | None:
    """Milliseconds of the computation of a program that takes the longest; None if it says none."""
    cycles: Counter[str] = Counter()
    name = ""
    for line in text.splitlines():
        if line[:1] not in ("", " ", "}"):
            name = line
        cycles[name] += sum(int(n) for n in re.findall(r'"estimated_cycles":"(\d+)"', line))
    most = max(cycles.values(), default=0)
    return most / (GHZ * 1e6) if most else None


def compiled(work: str, target: str, way: str) -> dict[str, Any]:
    """A row: the program of the rounds."""
    execution = fs.make_execution(devices_of(target))
    with lowered_by(WAYS[way]):
        began = time.perf_counter()
        programs = dict(experiment_of(WORKLOADS[work], execution).programs.lowered())
        program = compile_program(programs["advance"], options_for(execution.devices))
    found = program_report("advance", time.perf_counter() - began, program)
    text = program.as_text() or ""
    ms = longest(text)
    return {
        "work": work,
        "target": target,
        "": way,
        "compile s": f"{found.seconds:.0f}",
        "arguments MB": f"{found.arguments / MB:,.0f}",
        "temporaries MB": f"{found.temporaries / MB:,.0f}",
        "est. ms a step": "-" if ms is None else f"{ms:.3g}",
        "library calls": len(LIBRARY.findall(text)) if target == "h100" else "-",
        "collectives": ", ".join(f"{n} {kind}" for kind, n in found.collectives.items()),
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.aot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--work", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="W")
    add("--targets", nargs="+", default=list(TARGETS), metavar="TARGET")
    add("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY")
    add("--out", type=Path, default=HERE / "results" / "aot.json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Compiles all, prints the table and writes it."""
    args = parse(argv)
    settings: Any = jax.config  # untyped
    settings.update("jax_platforms", "cpu")  # what is compiled for is not here
    started, rows = time.time(), []
    for work in args.work:
        for target in args.targets:
            for way in args.ways:
                if way != "as it is" and WORKLOADS[work].net not in CONVOLUTIONAL:
                    continue
                rows.append(compiled(work, target, way))
                print(*rows[-1].values(), sep="  ", flush=True)
    print(f"\n{markdown(rows)}")
    write_record(args.out, started, table=rows)


if __name__ == "__main__":
    main()
