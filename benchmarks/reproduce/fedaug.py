"""Chapters 5 and 6 of Cornelis' thesis: FedAug, and two-phase FedAug compared with other methods.

    python -m benchmarks.reproduce.fedaug --data-dir DATA
    python -m benchmarks.reproduce.fedaug --data-dir DATA --small

Figures 5.2 to 5.4: the highest accuracy of FedAvg and of FedAug to EMD 0, 0.4 and 0.8, on clients
of EMD 0.4 to 1.4 (20 clients, E = 4); Table 5.3: the share of unaltered samples. On MNIST FedAug
is also run without mirror images, which digits do not have. Figure 6.1 and Table 6.1: two-phase
FedAug to 0.8, FedAvg, FedProx and FedNova after 108 epochs at EMD 1.4. Prints tables in markdown;
writes a JSON file and a picture for each data set and figure. The thesis prints bars without
numbers: the tables have the differences that its text states.

In the thesis, E counts unaltered samples, so that all methods do as many steps (section
5.1.2), and that E grows until unaltered and augmented samples are all included (section 5.4). The
figures take the first; `--figures grown` runs the second, where FedAvg does as many steps as the
FedAug next to it, and prints only a table. `--figures toolkit` has FedNova and FedProx of Figure
6.1 as the public version of the thesis' toolkit computes them.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax
from matplotlib.axes import Axes
from numpy.typing import NDArray

import fedjax_sim as fs
from benchmarks.reproduce.common import (
    MOMENTUM,
    NETWORKS,
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
    thesis_model,
    thesis_transforms,
    thesis_update,
    write_curves,
)
from benchmarks.reproduce.times import announce
from fedjax_sim.algorithms import fednova, fedprox
from fedjax_sim.base import LocalUpdate
from fedjax_sim.cli.problem import official
from fedjax_sim.client.augment import fedaug_augmentations
from fedjax_sim.data import Dataset, fedaug
from fedjax_sim.engine.cores import use_cores
from fedjax_sim.partition import Partition, parse_sampler

FIGURES = ("5", "grown", "6.1", "toolkit")
FIGURE = {"fashion_mnist": "5.2", "mnist": "5.3", "cifar10": "5.4"}
ROUNDS = {"mnist": 8, "fashion_mnist": 10, "cifar10": 40}  # captions of the figures
CLIENTS = 20
EMDS = (0.4, 0.8, 1.2, 1.4)
TARGETS = (0.0, 0.4, 0.8)
MIRRORS = dict.fromkeys(NETWORKS, (True,)) | {"mnist": (True, False)}
UNALTERED: dict[tuple[float, float | None], str] = {  # Table 5.3
    (0.4, 0.0): "0.6 ± 0.1", (0.8, 0.0): "0.5 ± 0.1", (0.8, 0.4): "0.7 ± 0.1",
    (1.2, 0.0): "0.2 ± 0.1", (1.2, 0.4): "0.5 ± 0.1", (1.2, 0.8): "0.7 ± 0.1",
    (1.4, 0.0): "0.2 ± 0.1", (1.4, 0.4): "0.4 ± 0.1", (1.4, 0.8): "0.6 ± 0.0",
}  # fmt: skip
NOT_BEST = "below another"  # FedAvg or a higher target is better than target 0
CHANGE: dict[
    tuple[str, float, float | None], str
] = {  # points over FedAvg, by data set, EMD and target (5.4.2 to 5.4.4)
    ("mnist", 0.4, 0.0): "loses",
    ("mnist", 0.8, 0.0): NOT_BEST,
    ("mnist", 0.8, 0.4): "gains",
    ("mnist", 1.2, 0.0): NOT_BEST,
    ("mnist", 1.2, 0.4): "gains",
    ("mnist", 1.2, 0.8): "gains, as 0.4",
    ("mnist", 1.4, 0.0): NOT_BEST,
    ("mnist", 1.4, 0.4): "gains",
    ("mnist", 1.4, 0.8): "+2.4",
    ("fashion_mnist", 0.4, 0.0): "loses",
    ("fashion_mnist", 0.8, 0.0): "loses",
    ("fashion_mnist", 0.8, 0.4): "loses",
    ("fashion_mnist", 1.2, 0.0): "loses",
    ("fashion_mnist", 1.2, 0.4): "loses",
    ("fashion_mnist", 1.2, 0.8): "loses",
    ("fashion_mnist", 1.4, 0.0): "gains",
    ("fashion_mnist", 1.4, 0.4): "gains",
    ("fashion_mnist", 1.4, 0.8): "+1.2",
    ("cifar10", 0.4, 0.0): "loses",
    ("cifar10", 0.8, 0.0): "loses",
    ("cifar10", 0.8, 0.4): "loses",
    ("cifar10", 1.2, 0.0): "gains",
    ("cifar10", 1.2, 0.4): "gains",
    ("cifar10", 1.2, 0.8): "gains",
    ("cifar10", 1.4, 0.0): "as 0.8",
    ("cifar10", 1.4, 0.4): "as 0.8",
    ("cifar10", 1.4, 0.8): "+10",
}
TWO_AND_FEDAUG = "two phases, FedAug-0.8"
OURS = {"two phases", "FedAug-0.8"}  # not in the thesis' Figure 6.1
# The toolkit (JMGaljaard/fltk-testbed at e0307a6) subtracts a client's change c twice and adds
# tau_eff c / a: with momentum 0.9 and 20 clients 0.005 c. Its FedProx never adapts mu.
TOOLKIT_STEP = fs.server.optimizer(optax.sgd(1.995))
COMBINED = {  # points over FedAvg in Figure 6.1 (6.4)
    ("mnist", TWO_AND_FEDAUG): "gains",
    ("mnist", "FedNova"): "gains",
    ("fashion_mnist", TWO_AND_FEDAUG): "gains",
    ("fashion_mnist", "FedNova"): "-7",
    ("cifar10", TWO_AND_FEDAUG): "+13",
    ("cifar10", "FedNova"): "+7",
    ("cifar10", "FedProx"): "-1",
}


class Size(NamedTuple):
    """What `--small` reduces.

    Attributes:
        samples: training samples by data set; None for all.
        seeds: repetitions.
        emds: of the clients, in Figures 5.2 to 5.4.
        grown: EMD and target of the second reading of E.
        lr: learning rate; ten times the thesis' where there are a tenth of the steps or fewer.
    """

    samples: Mapping[str, int | None]
    seeds: int
    emds: tuple[float, ...]
    grown: tuple[tuple[float, float], ...]
    lr: float


BOTH = tuple((emd, target) for emd in EMDS for target in TARGETS if target < emd)
FULL = Size(dict.fromkeys(NETWORKS), 4, EMDS, BOTH, 0.001)
SMALL = Size(
    {"mnist": 2000, "fashion_mnist": 2000, "cifar10": 2000}, 4, (0.8, 1.4), ((1.4, 0.8),), 0.01
)


class Setting(NamedTuple):
    """A bar of Figures 5.2 to 5.4.

    Attributes:
        emd: of the clients.
        target: EMD*; None for FedAvg.
        mirror: whether copies may be mirrored.
    """

    emd: float
    target: float | None = None
    mirror: bool = True

    @property
    def method(self) -> str:
        """Its name."""
        if self.target is None:
            return "FedAvg"
        return f"FedAug-{self.target:g}{'' if self.mirror else ', no mirror images'}"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    made = parser(__doc__, "fedaug")
    add = made.add_argument
    add("--datasets", nargs="+", choices=NETWORKS, default=list(NETWORKS), metavar="NAME")
    add("--figures", nargs="+", choices=FIGURES, default=list(FIGURES), metavar="NUMBER",
        help="5 for 5.2 to 5.4, grown for the same with the other reading of E, 6.1, or toolkit "
        "for its FedNova and FedProx in 6.1 (default: all)")  # fmt: skip
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
    _, sample = parse_sampler(f"emd({distance}, in_turn)")
    dealt = sample(dataset.train_y, CLIENTS, seed)
    return dealt if target is None else fedaug(dataset.train_y, dealt, target).partition


def local_update(
    model: fs.Model, dataset: Dataset, name: str, lr: float, *, mirror: bool = True
) -> LocalUpdate:
    """Table 4.2; copies, if there are any, are altered in every step."""
    copies = fedaug_augmentations(dataset.train_x.shape[1:], mirror=mirror)
    return thesis_update(model, 4, lr, [copies, *thesis_transforms(name)])


def settings(name: str, emds: Sequence[float]) -> list[Setting]:
    """The bars of a data set, from left to right."""
    made = []
    for distance in emds:
        made.append(Setting(distance))
        targets = [t for t in TARGETS if t < distance]
        made += [Setting(distance, t, mirror) for t in targets for mirror in MIRRORS[name]]
    return made


def augmentation(
    dataset: Dataset, name: str, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, Curve], dict[Setting, NDArray[np.float64]]]:
    """Figures 5.2 to 5.4 and Table 5.3; settings and seeds with one augmentation are one batch."""
    model, seeds = thesis_model(name, dataset), range(args.seeds)
    bars = settings(name, args.size.emds)
    curves: dict[str, Curve] = {}
    best: dict[Setting, NDArray[np.float64]] = {}
    unaltered: dict[Setting, NDArray[np.float64]] = {}
    for mirror in MIRRORS[name]:
        chosen = [s for s in bars if s.mirror == mirror]
        parts = [clients(dataset, s.emd, s.target, seed) for s in chosen for seed in seeds]
        problem = official(dataset, parts, [*seeds] * len(chosen))
        local = local_update(model, dataset, name, args.size.lr, mirror=mirror)
        title = "FedAvg and FedAug" if mirror else "FedAug, no mirror images"
        arm = Arm(fs.fedavg(local, clients_per_round=CLIENTS), ROUNDS[name])
        curves |= run({title: arm}, model, problem, dataset.classes)
        highest = curves[title].accuracy.max(axis=0).reshape(-1, args.seeds)
        share = np.reshape([np.mean(p.index < len(dataset.train_y)) for p in parts], highest.shape)
        best |= dict(zip(chosen, highest, strict=True))
        unaltered |= dict(zip(chosen, share, strict=True))
    rows = [
        {
            "EMD": s.emd,
            "": s.method,
            "unaltered": spread(unaltered[s]),
            "thesis, Table 5.3": UNALTERED.get((s.emd, s.target), ""),
            **bar_cells(name, s, best),
        }
        for s in bars
    ]
    return rows, curves, {s: best[s] for s in bars}


def grown(
    dataset: Dataset, name: str, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, Curve]]:
    """FedAug with E so much larger that all its samples are included, and FedAvg with that E."""
    model, seeds = thesis_model(name, dataset), range(args.seeds)
    curves: dict[str, Curve] = {}
    rows: list[dict[str, Any]] = []
    for emd, target in args.size.grown:
        dealt, raised = ([clients(dataset, emd, t, s) for s in seeds] for t in (None, target))
        growth = [len(b.index) / len(a.index) for a, b in zip(dealt, raised, strict=True)]
        epochs = 4 * float(np.mean(growth))
        base = Setting(emd)
        best: dict[Setting, NDArray[np.float64]] = {}
        for setting in (base, *(Setting(emd, target, mirror) for mirror in MIRRORS[name])):
            local = local_update(model, dataset, name, args.size.lr, mirror=setting.mirror)
            arm = Arm(
                fs.fedavg(local.change(epochs=epochs), clients_per_round=CLIENTS), ROUNDS[name]
            )
            problem = official(dataset, dealt if setting == base else raised, seeds)
            key = f"EMD {emd:g}, {setting.method}, E = {epochs:.3g}"
            curves |= run({key: arm}, model, problem, dataset.classes)
            best[setting] = curves[key].accuracy.max(axis=0)
            rows.append(
                {
                    "EMD": emd,
                    "": setting.method,
                    "E": f"{epochs:.3g}",
                    **bar_cells(name, setting, best),
                }
            )
    return rows, curves


def bar_cells(
    name: str, setting: Setting, best: Mapping[Setting, NDArray[np.float64]]
) -> dict[str, Any]:
    """What a bar shows, and what the thesis states about it."""
    base = setting.target is None
    return {
        "highest accuracy %": spread(best[setting]),
        "change": "" if base else spread(best[setting] - best[Setting(setting.emd)]),
        "thesis": CHANGE.get((name, setting.emd, setting.target), "") if setting.mirror else "",
    }


def combined(
    dataset: Dataset, name: str, args: argparse.Namespace, *, toolkit: bool = False
) -> tuple[list[dict[str, Any]], dict[str, Curve]]:
    """Figure 6.1 with the settings of Table 6.1, and the two halves of two-phase FedAug alone.

    Or FedAvg, FedProx and FedNova alone, as the toolkit computes them.
    """
    model, seeds = thesis_model(name, dataset), range(args.seeds)
    plain_parts, raised = (
        official(dataset, [clients(dataset, 1.4, target, s) for s in seeds], seeds)
        for target in (None, 0.8)
    )
    local = local_update(model, dataset, name, args.size.lr).change(epochs=12)
    rounds = 9
    # FedNova's correction for momentum assumes a buffer that starts at 0 in every round.
    anew = local.change(optimizer_state="reset")
    common: dict[str, Any] = {"clients_per_round": CLIENTS}
    # E becomes 9 and the rounds 12: as much traffic, as many epochs.
    two = Arm(fs.phase_shift(local, phases=2, mode="epochs", **common), rounds * 4 // 3)
    one = Arm(fs.fedavg(local, **common), rounds)
    if toolkit:
        arms = {
            "FedAvg": one,
            "FedProx, toolkit": Arm(fedprox(anew, mu=0.01, **common), rounds),
            "FedNova, toolkit": Arm(fs.compose(anew, server=TOOLKIT_STEP, **common), rounds),
        }
        curves = run(arms, model, plain_parts, dataset.classes)
    else:
        arms = {
            "FedAvg": one,
            "FedProx": Arm(fedprox(local, adaptive=True, **common), rounds),
            "FedNova": Arm(fednova(anew, lr=args.size.lr, momentum=MOMENTUM, **common), rounds),
            "two phases": two,
        }
        curves = run(arms, model, plain_parts, dataset.classes)
        curves |= run({"FedAug-0.8": one, TWO_AND_FEDAUG: two}, model, raised, dataset.classes)
    base = curves["FedAvg"].accuracy[-1]
    rows = [
        {
            "": key,
            "E": 9 if key.startswith("two phases") else 12,
            "rounds": c.rounds[-1],
            "MB": c.mb,
            "accuracy %": spread(c.accuracy[-1]),
            "change": "" if key == "FedAvg" else spread(c.accuracy[-1] - base),
            "thesis": COMBINED.get((name, key), ""),
        }
        for key, c in curves.items()
    ]
    return rows, curves


def draw_augmentation(best: Mapping[Setting, NDArray[np.float64]], title: str, path: Path) -> None:
    """Dots by EMD, and a dashed line at FedAvg's mean."""
    figure = picture(6.5, 4.2)
    axis = figure.subplots()
    emds = sorted({s.emd for s in best})
    kinds = list(dict.fromkeys((s.method, s.target, s.mirror) for s in best))
    width = 0.8 / len(kinds)
    for i, (method, target, mirror) in enumerate(kinds):
        found = [(x, Setting(d, target, mirror)) for x, d in enumerate(emds)]
        found = [(x, s) for x, s in found if s in best]
        place = np.array([x for x, _ in found]) + width * (i - (len(kinds) - 1) / 2)
        colour = f"C{(None, *TARGETS).index(target)}"
        face = colour if mirror else "white"
        draw_dots(axis, place, np.array([best[s] for _, s in found]), colour, face, method)
    averages = [best[Setting(d)].mean() for d in emds]
    axis.hlines(averages, np.arange(len(emds)) - 0.45, np.arange(len(emds)) + 0.45,
                colors="C0", linestyles="dashed", linewidth=0.8)  # fmt: skip
    axis.set_xticks(range(len(emds)), [f"EMD {d:g}" for d in emds])
    axis.set_ylabel("highest test accuracy (%)")
    axis.set_title(title, fontsize=10)
    axis.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.08))
    plain([axis])
    figure.savefig(path)


def draw_combined(accuracy: Mapping[str, NDArray[np.float64]], title: str, path: Path) -> None:
    """Figure 6.1: a dot for each method, and a dashed line at FedAvg's mean."""
    figure = picture(6.5, 4.2)
    axis = figure.subplots()
    for i, (key, values) in enumerate(accuracy.items()):
        colour = "C7" if key in OURS else "C0"
        draw_dots(axis, np.array([i]), values[None], colour, colour, key)
    axis.axhline(accuracy["FedAvg"].mean(), color="C0", linestyle="dashed", linewidth=0.8)
    names = [key.replace(", ", ",\n") for key in accuracy]
    axis.set_xticks(range(len(names)), names, fontsize=8)
    axis.set_ylabel("test accuracy after the last round (%)")
    note = "\n(grey: not in the thesis)" if accuracy.keys() & OURS else ""
    axis.set_title(title + note, fontsize=10)
    plain([axis])
    figure.savefig(path)


def draw_dots(
    axis: Axes,
    place: NDArray[np.float64],
    values: NDArray[np.float64],
    colour: str,
    face: str,
    label: str,
) -> None:
    """Means of ``values [places, seeds]``, a line of one standard deviation, every seed a point."""
    axis.errorbar(
        place, values.mean(axis=1), values.std(axis=1), fmt="o", color=colour, mfc=face, ms=6,
        elinewidth=1.2, label=label,
    )  # fmt: skip
    axis.plot(np.repeat(place, values.shape[1]), values.ravel(), ".", color="black", ms=3)


def reproduce(figure: str, dataset: Dataset, name: str, args: argparse.Namespace) -> None:
    """One figure on one data set: runs, table, record and picture."""
    started = time.time()
    number = FIGURE[name] if figure == "5" else figure
    special = {
        "grown": f"Figure {FIGURE[name]} with E grown",
        "toolkit": "Figure 6.1 as in the toolkit",
    }
    heading = special.get(figure, f"Figure {number}")
    title = f"{heading}: {name}, {len(dataset.train_y):,} training samples"
    title = f"{title}, {args.seeds} seeds"
    small = "_small" if args.small else ""
    stem = args.out / f"{name}{small}_{number.replace('.', '_')}"
    path = stem.with_suffix(".json")
    announce(f"{name}, Figure {figure}", f"fedaug/{path.name}", seeds=args.seeds)
    args.out.mkdir(parents=True, exist_ok=True)
    if figure == "5":
        rows, curves, best = augmentation(dataset, name, args)
        draw_augmentation(best, title, stem.with_suffix(".png"))
    elif figure == "grown":
        rows, curves = grown(dataset, name, args)
    else:
        rows, curves = combined(dataset, name, args, toolkit=figure == "toolkit")
        last = {key: c.accuracy[-1] for key, c in curves.items()}
        draw_combined(last, title, stem.with_suffix(".png"))
    print(f"\n## {title}\n\n{markdown(rows)}\n", flush=True)
    write_curves(path, started, dataset, args, rows, curves, figure=number, lr=args.size.lr)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs every figure on every data set."""
    args = parse(argv)
    use_cores()
    for name in args.datasets:
        dataset = fewer(fs.load_dataset(name, args.data_dir), args.size.samples[name])
        for figure in args.figures:
            reproduce(figure, dataset, name, args)
    print(f"numbers and pictures: {args.out}")


if __name__ == "__main__":
    main()
