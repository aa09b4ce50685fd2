"""Chapter 4 of Cornelis' thesis: local epochs; phase shift and FedAvg at equal traffic.

    python -m benchmarks.reproduce.phase_shift --data-dir DATA
    python -m benchmarks.reproduce.phase_shift --data-dir DATA --small

Figure 4.2: accuracy after 64 epochs in all, for several E (20 clients, EMD 1.0). Figures 4.7 and
4.8: curves of phase shift. Figures 4.9 and 4.10: accuracy of phase shift with E = 8 or 16 and of
FedAvg with E · 2n/(n + 1), which sends as much (40 clients, EMD 1.4). Prints tables in markdown;
writes a JSON file and a picture for each data set and figure. The thesis prints curves and bars
without numbers: the tables have the changes that its text states.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fedjax_sim as fs
from benchmarks.reproduce.common import (
    NETWORKS,
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
    thesis_model,
    thesis_transforms,
    thesis_update,
    write_curves,
)
from benchmarks.reproduce.times import announce
from fedjax_sim.base import LocalUpdate
from fedjax_sim.data import Dataset
from fedjax_sim.engine.cores import use_cores

TOTAL = {8: 120, 16: 128}  # epochs in all, by E (section 4.5.1)
DOUBLED_TOTAL = 64  # of Figure 4.2
FIGURES = {"4.2": None, "4.9": 8, "4.10": 16}  # and E
ABOUT = {  # changes in points against FedAvg with E, by data set, E, method and n (4.5.4, 4.5.5)
    ("mnist", 8, "phase shift", 4): "0",
    ("mnist", 8, "FedAvg", 4): "-0.5",
    ("mnist", 8, "phase shift", 20): "loses",
    ("mnist", 8, "FedAvg", 20): "loses",
    ("mnist", 16, "phase shift", 4): "0",
    ("mnist", 16, "FedAvg", 4): "as phase shift",
    ("fashion_mnist", 8, "phase shift", 4): "0",
    ("fashion_mnist", 8, "FedAvg", 4): "-1",
    ("fashion_mnist", 8, "phase shift", 20): "loses much",
    ("fashion_mnist", 8, "FedAvg", 20): "loses",
    ("fashion_mnist", 16, "phase shift", 4): "0",
    ("fashion_mnist", 16, "FedAvg", 4): "-2",
    ("cifar10", 8, "phase shift", 10): "-0.5",
    ("cifar10", 8, "FedAvg", 10): "-3",
    ("cifar10", 8, "phase shift", 20): "loses much",
    ("cifar10", 16, "phase shift", 4): "0",
    ("cifar10", 16, "FedAvg", 4): "-3",
    ("cifar10", 16, "phase shift", 5): "loses",
}


class Size(NamedTuple):
    """What `--small` reduces.

    Attributes:
        samples: training samples by data set; None for all.
        seeds: repetitions.
        phases: numbers of phases n.
        epochs: E of Figure 4.2.
        lr: learning rate; ten times the thesis' where there are a tenth of the steps or fewer.
    """

    samples: Mapping[str, int | None]
    seeds: int
    phases: tuple[int, ...]
    epochs: tuple[int, ...]
    lr: float


FULL = Size(dict.fromkeys(NETWORKS), 4, (2, 4, 5, 10, 20), (1, 2, 4, 8, 16), 0.001)
SMALL = Size({"mnist": 2000, "fashion_mnist": 2000, "cifar10": 1000}, 4, (4, 20), (1, 4, 16), 0.01)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    made = parser(__doc__, "phase_shift")
    add = made.add_argument
    add("--datasets", nargs="+", choices=NETWORKS, default=list(NETWORKS), metavar="NAME")
    add("--figures", nargs="+", choices=FIGURES, default=list(FIGURES), metavar="NUMBER",
        help=f"of {', '.join(FIGURES)} (default: all); 4.7 and 4.8 are drawn with 4.9")  # fmt: skip
    samples = ", ".join(f"{n:,} of {name}" for name, n in SMALL.samples.items())
    reduced = (
        f"fewer training samples ({samples}), n in {SMALL.phases}, E of Figure 4.2 in "
        f"{SMALL.epochs}, learning rate {SMALL.lr}; all else stays"
    )
    return parse_sized(made, argv, FULL, SMALL, reduced)


def doubled(local: LocalUpdate, size: Size, clients: int = 20) -> dict[str, Arm]:
    """Figure 4.2."""
    return {
        f"E = {e}": Arm(
            fs.fedavg(local.change(epochs=e), clients_per_round=clients),
            DOUBLED_TOTAL // e,
            max(1, 4 // e),
        )
        for e in size.epochs
    }


def compared(local: LocalUpdate, epochs: int, size: Size, clients: int = 40) -> dict[str, Arm]:
    """Figures 4.9 and 4.10, and 4.7 and 4.8: a further method is a further line here."""
    total, local = TOTAL[epochs], local.change(epochs=epochs)
    arms = {"FedAvg": Arm(fs.fedavg(local, clients_per_round=clients), total // epochs)}
    for n in size.phases:
        shifted = fs.phase_shift(local, clients_per_round=clients, phases=n)
        arms[f"phase shift, n = {n}"] = Arm(shifted, total // epochs)
    for n in size.phases:
        more = epochs * 2 * n / (n + 1)
        rarer = fs.fedavg(local.change(epochs=more), clients_per_round=clients)
        arms[f"FedAvg, n = {n}"] = Arm(rarer, round(total / more))
    return arms


def doubled_table(curves: Mapping[str, Curve]) -> list[dict[str, Any]]:
    """A row for each E of Figure 4.2."""
    return [
        {"": name, "rounds": c.rounds[-1], "accuracy %": spread(c.accuracy[-1])}
        for name, c in curves.items()
    ]


def compared_table(curves: Mapping[str, Curve], dataset: str, epochs: int) -> list[dict[str, Any]]:
    """A row for each bar of Figures 4.9 and 4.10."""
    base, rows = curves["FedAvg"], []
    for name, c in curves.items():
        method, _, n = name.partition(", n = ")
        more = 2 * int(n) / (int(n) + 1) if n and method == "FedAvg" else 1
        change = c.accuracy[-1] - base.accuracy[-1]
        rows.append(
            {
                "": name,
                "E": f"{epochs * more:.3g}",
                "rounds": c.rounds[-1],
                "traffic / FedAvg": c.mb / base.mb,
                "accuracy %": spread(c.accuracy[-1]),
                "change": spread(change) if n else "",
                "thesis": ABOUT.get((dataset, epochs, method, int(n)), "") if n else "",
                "server model before the end": "" if c.server is None else spread(c.server),
                "jaggedness": jaggedness(c),
            }
        )
    return rows


def jaggedness(curve: Curve) -> float:
    """How far accuracy falls below its best so far, in points, the mean over rounds and seeds."""
    values = curve.accuracy[:-1]
    return float(np.mean(np.maximum.accumulate(values, axis=0) - values))


def draw_doubled(curves: Mapping[str, Curve], title: str, path: Path) -> None:
    """Figure 4.2: accuracy by epochs in all."""
    figure = picture(6.5, 4.2)
    axis = figure.subplots()
    for name, c in curves.items():
        epochs = np.array(c.rounds) * DOUBLED_TOTAL / c.rounds[-1]
        draw_curve(axis, epochs, c.accuracy, label=name, marker="o", markersize=3, linewidth=1.3)
    axis.set_xlabel("epochs in all, E times rounds")
    axis.set_ylabel("test accuracy (%)")
    axis.set_title(f"Figure 4.2: {title}", fontsize=10)
    axis.legend(frameon=False, fontsize=9, loc="lower right")
    plain([axis])
    figure.savefig(path)


def draw_convergence(curves: Mapping[str, Curve], title: str, path: Path) -> None:
    """Figures 4.7 and 4.8: phase shift compared with FedAvg, with the jump of the last round."""
    shown = {name: c for name, c in curves.items() if name.startswith("phase shift")}
    figure = picture(3.3 * len(shown) + 1.5, 3.8)
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    base = curves["FedAvg"]
    for axis, (name, c) in zip(axes, shown.items(), strict=True):
        draw_curve(axis, base.rounds, base.accuracy, label="FedAvg", color="tab:orange")
        assert c.server is not None
        held = np.concatenate([c.accuracy[:-1], c.server[None]])
        draw_curve(axis, c.rounds, held, label="server model", color="tab:blue")
        ends = c.rounds[-1], np.mean(c.accuracy[-1])
        axis.plot(c.rounds[-1:] * 2, [held[-1].mean(), ends[1]], color="tab:blue", linestyle=":")
        axis.plot(*ends, "D", color="tab:blue", markersize=6, label="all models collected")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("rounds")
    axes[0].set_ylabel("test accuracy (%)")
    axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.suptitle(f"Figures 4.7 and 4.8: {title}", fontsize=10)
    plain(axes)
    figure.savefig(path)


def draw_compared(curves: Mapping[str, Curve], title: str, path: Path) -> None:
    """Figures 4.9 and 4.10: accuracy against the traffic saved; every seed is a point."""
    figure = picture(6.5, 4.2)
    axis = figure.subplots()
    for method, colour, shift in (
        ("phase shift", "tab:blue", -0.25),
        ("FedAvg", "tab:orange", 0.25),
    ):
        phases = {1: curves["FedAvg"]}
        phases |= {
            int(name.rpartition(" = ")[2]): c
            for name, c in curves.items()
            if name.startswith(f"{method}, n")
        }
        saved = [100 * (1 - (n + 1) / (2 * n)) for n in phases]
        last = np.array([c.accuracy[-1] for c in phases.values()])
        axis.plot(saved, last.mean(axis=1), marker="o", markersize=5, color=colour, label=method)
        axis.plot(np.array(saved) + shift, last, ".", color=colour, alpha=0.45, markersize=5)
    axis.set_xticks(saved, [f"{s:g} %\nn = {n}" for s, n in zip(saved, phases, strict=True)])
    axis.set_xlabel("traffic saved")
    axis.set_ylabel("test accuracy after the last round (%)")
    axis.set_title(title, fontsize=10)
    axis.legend(frameon=False, fontsize=9, loc="lower left")
    plain([axis])
    figure.savefig(path)


def reproduce(figure: str, dataset: Dataset, name: str, args: argparse.Namespace) -> None:
    """One figure on one data set: runs, tables, record and pictures."""
    started, epochs = time.time(), FIGURES[figure]
    stem = args.out / f"{name}{'_small' if args.small else ''}_{figure.replace('.', '_')}"
    path = stem.with_suffix(".json")
    announce(f"{name}, Figure {figure}", f"phase_shift/{path.name}", seeds=args.seeds)
    model = thesis_model(name, dataset)
    local = thesis_update(model, 1, args.size.lr, thesis_transforms(name))
    if epochs is None:
        problem = dealt(dataset, "emd(1.0, in_turn, 1)", 20, args.seeds)
        arms = doubled(local, args.size)
    else:
        problem = dealt(dataset, "emd(1.4, in_turn, 1)", 40, args.seeds)
        arms = compared(local, epochs, args.size)
    curves = run(arms, model, problem, dataset.classes)
    rows = doubled_table(curves) if epochs is None else compared_table(curves, name, epochs)
    title = f"{name}, {len(dataset.train_y):,} training samples, {args.seeds} seeds"
    print(f"\n## Figure {figure}: {title}\n\n{markdown(rows)}\n")
    write_curves(path, started, dataset, args, rows, curves, figure=figure, lr=args.size.lr)
    if epochs is None:
        draw_doubled(curves, title, stem.with_suffix(".png"))
    else:
        draw_compared(curves, f"Figure {figure}: {title}", stem.with_suffix(".png"))
    if figure == "4.9":
        draw_convergence(curves, title, stem.with_name(stem.name[:-1] + "7_8.png"))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs every figure on every data set."""
    args = parse(argv)
    use_cores()
    for name in args.datasets:
        whole = fs.load_dataset(name, args.data_dir)
        dataset = fewer(whole, args.size.samples[name])
        for figure in args.figures:
            reproduce(figure, dataset, name, args)
    print(f"numbers and pictures: {args.out}")


if __name__ == "__main__":
    main()
