"""A round's time and memory by the number of clients, the cohort and the runs.

    python -m benchmarks.scale --clients 10000 1000000 --cohorts 100 --runs 1
    python -m benchmarks.scale --methods fedavg timed_fedavg fedbuff fedasync --clients 100000

Logistic regression 16-10 on four samples a client, one epoch of B = 4: this measures what a
round does besides training; `--model cnn` is the CNN of W2 on as many samples, whose memory counts.
`--model mlp --samples 36 --batch-size 16 --epochs 2` is a visit of the README's command. Methods
that do not wait have more rounds, so that all have as many visits. Prints a table in markdown and
writes a JSON file.
"""

import argparse
import itertools
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import fedjax_sim as fs
from benchmarks.reproduce.common import markdown
from benchmarks.script import write_record
from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.base import ClientData, Clock
from fedjax_sim.base.signatures import keywords
from fedjax_sim.engine.cores import use_cores
from fedjax_sim.engine.memory import MB
from fedjax_sim.run.experiment import Experiment

HERE = Path(__file__).resolve().parent
FEW, CLASSES = 4, 10
SHAPES = {"logistic": (16,), "mlp": (8, 8, 1), "cnn": (32, 32, 3)}
NETS = {"logistic": fs.models.logistic, "mlp": fs.models.mlp, "cnn": fs.models.two_conv}

CLOCK = fs.clock.simulated(fs.clock.lognormal(0.1, 1.0), fs.clock.bandwidth(1e5, 4e5))


class Arm(NamedTuple):
    """What is measured.

    Attributes:
        method: a named one.
        options: of it.
        clock: of its devices.
        visits: that a round waits for; None for the cohort.
    """

    method: str
    options: Mapping[str, Any] = MappingProxyType({})
    clock: Clock | None = None
    visits: int | None = None


METHODS = {
    "fedavg": Arm("fedavg"),
    "phase_shift": Arm("phase_shift", {"phases": 4}),
    "radfed": Arm("radfed", {"redistribution_rounds": 5}),
    "scaffold": Arm("scaffold"),
    "timed_fedavg": Arm("fedavg", clock=CLOCK),
    "fedbuff": Arm("fedbuff", {"buffer_size": 10}, CLOCK, 10),
    "fedasync": Arm("fedasync", {}, CLOCK, 1),
}


def federation(clients: int, shape: tuple[int, ...], samples: int) -> tuple[ClientData, Any]:
    """Clients of random samples, equally many, and a few samples for a test set."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (clients * samples, *shape), dtype=np.uint8)
    y = rng.integers(0, CLASSES, clients * samples, dtype=np.int32)
    index = np.arange(clients * samples, dtype=np.int32)
    start = np.arange(0, clients * samples + 1, samples, dtype=np.int32)
    return fs.client_data(x, y, fs.partition.Partition(index, start)), (x[:10], y[:10])


def measured(
    name: str,
    clients: int,
    cohort: int,
    runs: int,
    devices: int,
    *,
    net: str,
    samples: int,
    batch_size: int,
    epochs: int,
    rounds: int,
    repeats: int,
) -> dict[str, Any]:
    """A row: the best of some measurements of many rounds, and XLA's account of memory."""
    shape = SHAPES[net]
    scale = np.full(shape[-1], 128, np.float32)
    model = fs.models.with_scaling(NETS[net](shape, CLASSES), scale, scale)
    risk = fs.empirical_risk(model)
    local = fs.local_sgd(risk, optax.sgd(0.01), batch_size=batch_size, epochs=epochs)
    execution = fs.make_execution(devices)
    arm = METHODS[name]
    rounds = rounds * cohort // (arm.visits or cohort)
    make, given = ALGORITHMS[arm.method], dict(arm.options)
    if arm.clock and "clock" in keywords(make):
        given["clock"] = arm.clock
    method = make(local, clients_per_round=cohort, **given).on(execution)
    if arm.clock and "clock" not in given:
        method = method.replace(clock=arm.clock)
    data, test = federation(clients, shape, samples)
    made = Experiment(
        method, model, data, test,
        classes=CLASSES, seeds=range(runs), eval_every=rounds, execution=execution,
    ).runner()  # fmt: skip
    report = {program.name: program for program in made.programs.compiled_ahead()}["advance"]
    run = made.start(range(runs))
    run, *_ = jax.block_until_ready(made.advance(run, 1))
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        run, *_ = jax.block_until_ready(made.advance(run, rounds))
        best = min(best, time.perf_counter() - began)
    return {
        "": name,
        "clients": f"{clients:,}",
        "cohort": cohort,
        "runs": runs,
        "devices": devices,
        "ms a round": f"{1000 * best / rounds:.2f}",
        "µs a visit": f"{1e6 * best / rounds / runs / (arm.visits or cohort):.0f}",
        "data and states MB": f"{report.arguments / MB:,.1f}",
        "temporaries MB": f"{report.temporaries / MB:,.1f}",
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    untimed = [name for name, arm in METHODS.items() if not arm.clock]
    add("--methods", nargs="+", choices=METHODS, default=untimed, metavar="NAME")
    add("--clients", nargs="+", type=int, default=[10_000, 1_000_000], metavar="N")
    add("--cohorts", nargs="+", type=int, default=[100], metavar="M")
    add("--runs", nargs="+", type=int, default=[1], metavar="R")
    add("--devices", nargs="+", type=int, default=[1], metavar="D")
    add("--model", choices=NETS, default="logistic")
    add("--samples", type=int, default=FEW, help="of a client")
    add("--batch-size", type=int, default=FEW)
    add("--epochs", type=int, default=1)
    add("--rounds", type=int, default=50, help="of one measurement, of a cohort each")
    add("--repeats", type=int, default=3, help="measurements; the best counts")
    add("--out", type=Path, default=HERE / "results" / "scale.json")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Measures all, prints the table and writes it."""
    args = parse(argv)
    use_cores()
    started, rows = time.time(), []
    asked = (args.methods, args.clients, args.cohorts, args.runs, args.devices)
    for setting in itertools.product(*asked):
        row = measured(
            *setting,
            net=args.model,
            samples=args.samples,
            batch_size=args.batch_size,
            epochs=args.epochs,
            rounds=args.rounds,
            repeats=args.repeats,
        )
        rows.append(row)
        print(*rows[-1].values(), sep="  ", flush=True)
    print(f"\n{markdown(rows)}")
    write_record(args.out, started, table=rows)


if __name__ == "__main__":
    main()
