"""Chapters 5 and 6 of Cornelis' thesis: FedAug, and two-phase FedAug beside other methods.

    python benchmarks/reproduce/fedaug.py --data-dir DATA
    python benchmarks/reproduce/fedaug.py --data-dir DATA --small

Figures 5.2 to 5.4: the highest accuracy of FedAvg and of FedAug to EMD 0, 0.4 and 0.8, on clients
of EMD 0.4 to 1.4 (20 clients, E = 4); Table 5.3: the share of unaltered samples. Figure 6.1 and
Table 6.1: two-phase FedAug to 0.8, FedAvg, FedProx and FedNova after 108 epochs at EMD 1.4. Prints
tables in markdown; writes a JSON file and a picture for each data set and figure. The thesis prints
bars without numbers: the tables have the differences that its text states.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax
from common import (
    Arm,
    Curve,
    fewer,
    markdown,
    parse_sized,
    parser,
    picture,
    plain,
    run,
    spread,
    use_all_cores,
    write_record,
)
from numpy.typing import NDArray

import fedjax_sim as fs
from fedjax_sim.algorithms.fednova import fednova
from fedjax_sim.algorithms.fedprox import fedprox
from fedjax_sim.augment import thesis
from fedjax_sim.bench import load_model
from fedjax_sim.data import Dataset, fedaug
from fedjax_sim.partition import Partition, parse_sampler
from fedjax_sim.problem import official

MODELS = {"mnist": "mnist_cnn", "fashion_mnist": "fashion_cnn", "cifar10": "cifar_cnn"}
FIGURE = {"fashion_mnist": "5.2", "mnist": "5.3", "cifar10": "5.4"}
ROUNDS = {"mnist": 8, "fashion_mnist": 10, "cifar10": 40}  # captions of the figures
CLIENTS, MOMENTUM = 20, 0.9
EMDS = (0.4, 0.8, 1.2, 1.4)
TARGETS = (0.0, 0.4, 0.8)
UNALTERED = {  # Table 5.3
    (0.4, 0.0): "0.6 ± 0.1", (0.8, 0.0): "0.5 ± 0.1", (0.8, 0.4): "0.7 ± 0.1",
    (1.2, 0.0): "0.2 ± 0.1", (1.2, 0.4): "0.5 ± 0.1", (1.2, 0.8): "0.7 ± 0.1",
    (1.4, 0.0): "0.2 ± 0.1", (1.4, 0.4): "0.4 ± 0.1", (1.4, 0.8): "0.6 ± 0.0",
}  # fmt: skip
CHANGE = {  # points over FedAvg, by data set, EMD and target (5.4.2 to 5.4.4)
    ("mnist", 0.4, 0.0): "loses",
    ("mnist", 0.8, 0.4): "gains",
    ("mnist", 1.2, 0.4): "gains",
    ("mnist", 1.4, 0.8): "+2.4",
    ("fashion_mnist", 0.4, 0.0): "loses",
    ("fashion_mnist", 0.8, 0.0): "loses",
    ("fashion_mnist", 0.8, 0.4): "loses",
    ("fashion_mnist", 1.4, 0.8): "+1.2",
    ("cifar10", 0.4, 0.0): "loses",
    ("cifar10", 0.8, 0.0): "loses",
    ("cifar10", 0.8, 0.4): "loses",
    ("cifar10", 1.2, 0.8): "gains",
    ("cifar10", 1.4, 0.8): "+10",
}
COMBINED = {  # points over FedAvg in Figure 6.1 (6.4)
    ("mnist", "2P-FedAug-0.8"): "gains",
    ("mnist", "FedNova"): "gains",
    ("fashion_mnist", "2P-FedAug-0.8"): "gains",
    ("fashion_mnist", "FedNova"): "-7",
    ("cifar10", "2P-FedAug-0.8"): "+13",
    ("cifar10", "FedNova"): "+7",
    ("cifar10", "FedProx"): "-1",
}


class Size(NamedTuple):
    """What `--small` reduces.

    Attributes:
        samples: Training samples by data set; None for all.
        seeds: Repetitions.
        emds: Of the clients, in Figures 5.2 to 5.4.
        lr: Learning rate; ten times the thesis' where there are a tenth of the steps or fewer.
    """

    samples: Mapping[str, int | None]
    seeds: int
    emds: tuple[float, ...]
    lr: float


FULL = Size(dict.fromkeys(MODELS), 4, EMDS, 0.001)
SMALL = Size({"mnist": 4000, "fashion_mnist": 2000, "cifar10": 2000}, 2, (0.8, 1.4), 0.01)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    made = parser(__doc__, "fedaug")
    add = made.add_argument
    add("--datasets", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    add("--figures", nargs="+", choices=("5", "6.1"), default=["5", "6.1"], metavar="NUMBER",
        help="5 for that of 5.2 to 5.4, or 6.1 (default: both)")  # fmt: skip
    samples = ", ".join(f"{n:,} of {name}" for name, n in SMALL.samples.items())
    return parse_sized(
        made,
        argv,
        FULL,
        SMALL,
        f"fewer training samples ({samples}), EMD in {SMALL.emds} alone, learning rate {SMALL.lr}",
    )


def clients(dataset: Dataset, distance: float, target: float | None, seed: int) -> Partition:
    """Clients at an EMD, augmented to the target; None for not at all."""
    _, sample = parse_sampler(f"emd({distance})")
    dealt = sample(dataset.train_y, CLIENTS, seed)
    return dealt if target is None else fedaug(dataset.train_y, dealt, target).partition


def local_update(
    model: fs.Model, dataset: Dataset, epochs: float, lr: float
) -> fs.base.LocalUpdate:
    """Table 4.2; copies are altered in every step, where there are any."""
    return fs.local_sgd(
        fs.empirical_risk(model),
        optax.sgd(lr, momentum=MOMENTUM),
        batch_size=16,
        epochs=epochs,
        transforms=(thesis(dataset.train_x.shape[1:]),),
    )


def augmentation(
    dataset: Dataset, name: str, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, Curve], dict[tuple[float, float | None], Any]]:
    """Figures 5.2 to 5.4 and Table 5.3; all settings and seeds are one batch of runs."""
    model = load_model(MODELS[name], dataset)
    settings: list[tuple[float, float | None]] = [
        (distance, target)
        for distance in args.size.emds
        for target in (None, *TARGETS)
        if target is None or target < distance
    ]
    seeds = range(args.seeds)
    parts = [clients(dataset, *setting, seed) for setting in settings for seed in seeds]
    problem = official(dataset, parts, [*seeds] * len(settings))
    arm = Arm(
        fs.fedavg(local_update(model, dataset, 4, args.size.lr), clients_per_round=CLIENTS),
        ROUNDS[name],
    )
    curve = run({"FedAvg and FedAug": arm}, model, problem, dataset.classes)["FedAvg and FedAug"]
    best = dict(zip(settings, curve.accuracy.max(axis=0).reshape(-1, args.seeds), strict=True))
    unaltered = np.array([np.mean(p.index < len(dataset.train_y)) for p in parts])
    share = dict(zip(settings, unaltered.reshape(-1, args.seeds), strict=True))
    rows = [
        {
            "EMD": distance,
            "": "FedAvg" if target is None else f"FedAug-{target:g}",
            "unaltered": spread(share[distance, target]),
            "thesis, Table 5.3": "" if target is None else UNALTERED[distance, target],
            "highest accuracy %": spread(best[distance, target]),
            "change": "" if target is None else spread(
                best[distance, target] - best[distance, None]
            ),
            "thesis": "" if target is None else CHANGE.get((name, distance, target), ""),
        }
        for distance, target in settings
    ]  # fmt: skip
    return rows, {"FedAvg and FedAug": curve}, best


def combined(
    dataset: Dataset, name: str, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, Curve]]:
    """Figure 6.1 with the settings of Table 6.1, and the two halves of 2P-FedAug alone."""
    model, seeds = load_model(MODELS[name], dataset), range(args.seeds)
    plain_parts, raised = (
        official(dataset, [clients(dataset, 1.4, target, s) for s in seeds], seeds)
        for target in (None, 0.8)
    )
    local, rounds = local_update(model, dataset, 12, args.size.lr), 9
    common: dict[str, Any] = {"clients_per_round": CLIENTS}
    # E becomes 9 and the rounds 12: as much traffic, as many epochs.
    two = Arm(fs.phase_shift(local, phases=2, mode="epochs", **common), rounds * 4 // 3)
    one = Arm(fs.fedavg(local, **common), rounds)
    arms = {
        "FedAvg": one,
        "FedProx": Arm(fedprox(local, adaptive=True, **common), rounds),
        "FedNova": Arm(fednova(local, lr=args.size.lr, momentum=MOMENTUM, **common), rounds),
        "2P": two,
    }
    curves = run(arms, model, plain_parts, dataset.classes)
    curves |= run({"FedAug-0.8": one, "2P-FedAug-0.8": two}, model, raised, dataset.classes)
    base = curves["FedAvg"].accuracy[-1]
    rows = [
        {
            "": key,
            "E": 9 if key.startswith("2P") else 12,
            "rounds": c.rounds[-1],
            "MB": c.mb,
            "accuracy %": spread(c.accuracy[-1]),
            "change": "" if key == "FedAvg" else spread(c.accuracy[-1] - base),
            "thesis": COMBINED.get((name, key), ""),
        }
        for key, c in curves.items()
    ]
    return rows, curves


def draw_augmentation(
    best: Mapping[tuple[float, float | None], NDArray[np.float64]], title: str, path: Path
) -> None:
    """Bars by EMD; a line of one standard deviation, every seed a point."""
    figure = picture(6.5, 4.2)
    axis = figure.subplots()
    emds = sorted({distance for distance, _ in best})
    for i, target in enumerate((None, *TARGETS)):
        found = [(x, best[d, target]) for x, d in enumerate(emds) if (d, target) in best]
        place = np.array([x for x, _ in found]) + 0.2 * (i - 1.5)
        values = np.array([v for _, v in found])
        label = "FedAvg" if target is None else f"FedAug to {target:g}"
        axis.bar(
            place, values.mean(axis=1), 0.18, yerr=values.std(axis=1), color=f"C{i}",
            alpha=0.75, label=label, error_kw={"elinewidth": 1},
        )  # fmt: skip
        axis.plot(np.repeat(place, values.shape[1]), values.ravel(), ".", color="black", ms=3)
    everything = np.concatenate(list(best.values()))
    low, high = everything.min(), everything.max()
    axis.set_ylim(low - 0.3 * (high - low), high + 0.1 * (high - low))
    axis.set_xticks(range(len(emds)), [f"EMD {d:g}" for d in emds])
    axis.set_ylabel("highest test accuracy (%)")
    axis.set_title(title, fontsize=10)
    axis.legend(frameon=False, fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, -0.2))
    plain([axis])
    figure.savefig(path)


def draw_combined(curves: Mapping[str, Curve], title: str, path: Path) -> None:
    """Figure 6.1: a bar for each method."""
    figure = picture(6.5, 4.2)
    axis = figure.subplots()
    last = np.array([c.accuracy[-1] for c in curves.values()])
    place = np.arange(len(curves))
    colours = ["C7" if key in ("2P", "FedAug-0.8") else "C0" for key in curves]
    axis.bar(place, last.mean(axis=1), 0.7, yerr=last.std(axis=1), color=colours, alpha=0.75)
    axis.plot(np.repeat(place, last.shape[1]), last.ravel(), ".", color="black", ms=4)
    low, high = last.min(), last.max()
    axis.set_ylim(low - 0.3 * (high - low), high + 0.1 * (high - low))
    axis.set_xticks(place, list(curves), fontsize=8)
    axis.set_ylabel("test accuracy after the last round (%)")
    axis.set_title(f"{title}\n(grey: not in the thesis)", fontsize=10)
    plain([axis])
    figure.savefig(path)


def reproduce(figure: str, dataset: Dataset, name: str, args: argparse.Namespace) -> None:
    """One figure on one data set: runs, table, record and picture."""
    started = time.time()
    number = FIGURE[name] if figure == "5" else figure
    title = f"Figure {number}: {name}, {len(dataset.train_y):,} training samples"
    title = f"{title}, {args.seeds} seeds"
    small = "_small" if args.small else ""
    stem = args.out / f"{name}{small}_{number.replace('.', '_')}"
    args.out.mkdir(parents=True, exist_ok=True)
    if figure == "5":
        rows, curves, best = augmentation(dataset, name, args)
        draw_augmentation(best, title, stem.with_suffix(".png"))
    else:
        rows, curves = combined(dataset, name, args)
        draw_combined(curves, title, stem.with_suffix(".png"))
    print(f"\n## {title}\n\n{markdown(rows)}\n", flush=True)
    write_record(
        stem.with_suffix(".json"),
        started,
        figure=number,
        dataset=name,
        training_samples=len(dataset.train_y),
        seeds=args.seeds,
        lr=args.size.lr,
        table=rows,
        curves={key: c._asdict() for key, c in curves.items()},
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Runs every figure on every data set."""
    args = parse(argv)
    use_all_cores()
    for name in args.datasets:
        dataset = fewer(fs.load_dataset(name, args.data_dir), args.size.samples[name])
        for figure in args.figures:
            print(f"{name}, Figure {figure}", file=sys.stderr, flush=True)
            reproduce(figure, dataset, name, args)
    print(f"numbers and pictures: {args.out}")


if __name__ == "__main__":
    main()
