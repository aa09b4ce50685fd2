"""Tables 1 to 5 of Ozdayi, Kantarcioglu and Iyer: two agents, each with half of the classes.

    python -m benchmarks.reproduce.ozdayi --data-dir DATA
    python -m benchmarks.reproduce.ozdayi --data-dir DATA --small

Section 4: 100 rounds of one epoch, B = 256, SGD with learning rate 0.1 and weight decay 5e-4,
ResNet20 with Fixup on CIFAR-10, 3 repetitions; the first agent has the first five classes. Prints a
table in markdown next to the paper's; writes a JSON file and a picture.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax

import fedjax_sim as fs
from benchmarks.reproduce.common import (
    Arm,
    Curve,
    dealt,
    draw_curve,
    fewer,
    markdown,
    parse_sized,
    parser,
    picture,
    plain,
    run,
    spread,
    write_curves,
)
from benchmarks.reproduce.times import announce
from fedjax_sim.algorithms import ozdayi
from fedjax_sim.cli.build import load_model
from fedjax_sim.cli.problem import Problem, official
from fedjax_sim.data import Dataset, client_data, take_root
from fedjax_sim.engine.cores import use_cores
from fedjax_sim.engine.optimizers import gradient_noise, project_l2_ball
from fedjax_sim.partition import partition_from_lists

LR, DECAY, BATCH, EPOCHS = 0.1, 5e-4, 256, 1
ROOT = 0.05  # of the training data, for the server
RADIUS, NOISE, THETA = 3.0, 1e-4, 2
BASE = "non-IID"


class Row(NamedTuple):
    """A line of a table of the paper, which prints mean and standard deviation in percent."""

    table: str
    mean: float
    std: float


PAPER = {
    "centralised": Row("1", 90.4, 0.77),
    "IID": Row("1", 90.0, 0.08),
    BASE: Row("1 to 5", 73.0, 2.6),
    "server trains on 5 %": Row("2", 83.7, 0.1),
    "projection, M = 3": Row("3", 77.5, 2.3),
    "projection and noise": Row("3", 79.6, 1.3),
    "server momentum 0.5": Row("4", 80.9, 2.4),
    "server momentum 0.9": Row("4", 75.9, 1.1),
    "sign agreement": Row("5", 78.5, 1.72),
    "5 %, momentum 0.9, signs": Row("text", 85.7, 0.3),
}


class Size(NamedTuple):
    """What `--small` reduces.

    Attributes:
        datasets: those that are run unless others are named.
        model: the network.
        samples: training samples; None for all.
        rounds: rounds of one epoch.
        seeds: repetitions.
    """

    datasets: tuple[str, ...]
    model: str
    samples: int | None
    rounds: int
    seeds: int


FULL = Size(("cifar10",), "resnet20", None, 100, 3)
SMALL = Size(("mnist", "fashion_mnist"), "mnist_cnn", 4_000, 20, 4)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    made = parser(__doc__, "ozdayi")
    known = (*FULL.datasets, *SMALL.datasets)
    made.add_argument("--datasets", nargs="+", choices=known, metavar="NAME",
                      help=f"default: {', '.join(FULL.datasets)}, small "
                      f"{', '.join(SMALL.datasets)}")  # fmt: skip
    reduced = (
        f"{', '.join(SMALL.datasets)} for cifar10, {SMALL.model} for {FULL.model}, "
        f"{SMALL.samples:,} training samples, {SMALL.rounds} rounds and {SMALL.seeds} seeds"
    )
    return parse_sized(made, argv, FULL, SMALL, reduced)


def local_update(
    model: fs.Model, *, radius: float | None = None, noise: float | None = None
) -> fs.base.LocalUpdate:
    """An agent's epoch: noise on the gradient first, the projection last."""
    steps = [optax.add_decayed_weights(DECAY), optax.sgd(LR)]
    if noise is not None:
        steps.insert(0, gradient_noise(noise))
    if radius is not None:
        steps.append(project_l2_ball(radius))
    objective = fs.empirical_risk(model)
    return fs.local_sgd(objective, optax.chain(*steps), batch_size=BATCH, epochs=EPOCHS)


def federations(dataset: Dataset, seeds: int) -> dict[str, Problem]:
    """By name; the IID agents, and the server's samples, differ by seed."""
    x, y = dataset.train_x, dataset.train_y
    halves = partition_from_lists([np.flatnonzero(y < 5), np.flatnonzero(y >= 5)], "two halves")
    split = official(dataset, [halves], range(seeds))
    taken = [take_root(y, halves, round(ROOT * len(y)), seed=s) for s in range(seeds)]
    kept, roots = zip(*taken, strict=True)
    return {
        "centralised": dealt(dataset, "iid", 1, seeds),
        "IID": dealt(dataset, f"ll({dataset.classes}, 1)", 2, seeds),
        BASE: split,
        "root": split._replace(data=client_data(x, y, kept, root=roots)),
    }


def methods(model: fs.Model, rounds: int) -> dict[str, dict[str, Arm]]:
    """By federation and name."""
    local = local_update(model)
    projected = local_update(model, radius=RADIUS)
    noisy = local_update(model, radius=RADIUS, noise=NOISE)

    def technique(momentum: float = 0.0, threshold: float = 0, epochs: float = 0) -> fs.Algorithm:
        return ozdayi(local, clients_per_round=2, server_momentum=momentum, threshold=threshold,
                      server_epochs=epochs)  # fmt: skip

    algorithms = {
        "centralised": {"centralised": fs.fedavg(local, clients_per_round=1)},
        "IID": {"IID": fs.fedavg(local, clients_per_round=2)},
        BASE: {
            BASE: fs.fedavg(local, clients_per_round=2),
            "projection, M = 3": fs.fedavg(projected, clients_per_round=2),
            "projection and noise": fs.fedavg(noisy, clients_per_round=2),
            "server momentum 0.5": technique(momentum=0.5),
            "server momentum 0.9": technique(momentum=0.9),
            "sign agreement": technique(threshold=THETA),
        },
        "root": {
            "server trains on 5 %": technique(epochs=1),
            "5 %, momentum 0.9, signs": technique(momentum=0.9, threshold=THETA, epochs=1),
        },
    }
    return {
        federation: {name: Arm(algorithm, rounds) for name, algorithm in named.items()}
        for federation, named in algorithms.items()
    }


def table(curves: Mapping[str, Curve]) -> list[dict[str, Any]]:
    """A row for each of the paper's."""
    base, rows = curves[BASE].accuracy[-1], []
    for name, paper in PAPER.items():
        last = curves[name].accuracy[-1]
        rows.append(
            {
                "table": paper.table,
                "": name,
                "paper %": f"{paper.mean:.1f} ± {paper.std:g}",
                "ours %": spread(last),
                "paper, change": f"{paper.mean - PAPER[BASE].mean:+.1f}",
                "ours, change": f"{np.mean(last - base):+.2f}",
                "ours, best round": spread(curves[name].accuracy.max(axis=0)),
            }
        )
    return rows


def draw(curves: Mapping[str, Curve], title: str, path: Path) -> None:
    """Curves by table, and the last accuracies next to the paper's on a separate axis."""
    figure = picture(16, 6.5)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=[3, 2])[0]
    panels = left.subplots(2, 3).ravel()
    panels[-1].set_axis_off()
    for axis, number in zip(panels, "12345", strict=False):
        shown = [name for name, row in PAPER.items() if row.table in (number, "1 to 5")]
        for name in sorted(shown, key=lambda name: name != BASE):
            c = curves[name]
            draw_curve(axis, c.rounds, c.accuracy, label=name, linewidth=1.3)
        axis.set_title(f"Table {number}", fontsize=10)
        axis.set_xlabel("rounds", fontsize=9)
        axis.legend(frameon=False, fontsize=8, loc="lower right")
    for axis in panels[::3]:
        axis.set_ylabel("test accuracy (%)", fontsize=9)
    paper, ours = right.subplots(1, 2, sharey=True)
    for y, (name, row) in enumerate(PAPER.items()):
        last = curves[name].accuracy[-1]
        paper.errorbar(row.mean, y, xerr=row.std, fmt="D", color="tab:red", markersize=5)
        ours.plot(last, np.full(len(last), y), "o", color="tab:blue", alpha=0.55, markersize=5)
    paper.set_yticks(range(len(PAPER)), PAPER)
    paper.invert_yaxis()
    paper.set_title("the paper, CIFAR-10", fontsize=10)
    ours.set_title("ours by seed", fontsize=10)
    for axis in (paper, ours):
        axis.set_xlabel("accuracy, last round (%)", fontsize=9)
    figure.suptitle(title, fontsize=11)
    plain([*panels, paper, ours])
    figure.savefig(path)


def reproduce(dataset: Dataset, name: str, args: argparse.Namespace) -> None:
    """All tables on one data set."""
    started, size = time.time(), args.size
    stem = args.out / f"{name}{'_small' if args.small else ''}"
    path = stem.with_suffix(".json")
    announce(name, f"ozdayi/{path.name}", seeds=args.seeds)
    model = load_model(size.model, dataset)
    arms = methods(model, size.rounds)
    curves: dict[str, Curve] = {}
    for federation, problem in federations(dataset, args.seeds).items():
        curves |= run(arms[federation], model, problem, dataset.classes)
    rows = table(curves)
    title = (
        f"{name}, {size.model}, {len(dataset.train_y):,} training samples, {size.rounds} rounds, "
        f"{args.seeds} seeds"
    )
    print(f"\n## {title}\n\n{markdown(rows)}\n")
    write_curves(path, started, dataset, args, rows, curves, model=size.model)
    draw(curves, title, stem.with_suffix(".png"))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs every data set."""
    args = parse(argv)
    use_cores()
    for name in args.datasets or args.size.datasets:
        whole = fs.load_dataset(name, args.data_dir)
        reproduce(fewer(whole, args.size.samples), name, args)
    print(f"numbers and pictures: {args.out}")


if __name__ == "__main__":
    main()
