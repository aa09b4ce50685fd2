"""What the reproductions share: command line, clients, runs of all seeds, tables and records."""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optax
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import ArrayLike, NDArray
from tqdm import tqdm

import fedjax_sim as fs
from benchmarks.script import write_record
from fedjax_sim.base import LocalUpdate, Transform
from fedjax_sim.cli.problem import Problem, official
from fedjax_sim.cli.report import bytes_sent
from fedjax_sim.client.augment import altered, crop, flip, sometimes, warped
from fedjax_sim.data import Dataset
from fedjax_sim.engine.memory import MB
from fedjax_sim.models import cifar_cnn, fashion_cnn, mnist_cnn, with_scaling
from fedjax_sim.partition import Partition, parse_sampler

BENCHMARKS = Path(__file__).resolve().parents[1]

# Of Cornelis' thesis, which ran an altered FLTK that is not to be had. What it leaves open is as in
# the public one, <https://github.com/JMGaljaard/fltk-testbed> of May 2021 (for MNIST of January
# 2022): how the layers of the network for CIFAR-10 are joined, and the mean and deviation that
# inputs in 0..1 are scaled by. One thing differs: its clients call `eval()` when they test, after
# every round, and never `train()`, so that from their second round on they train without dropout
# and with fixed BatchNorm statistics.
Network = Callable[[Sequence[int], int], fs.Model]
NETWORKS: dict[str, tuple[Network, Sequence[float], Sequence[float]]] = {
    "mnist": (mnist_cnn, [0], [1]),
    "fashion_mnist": (fashion_cnn, [0], [1]),
    "cifar10": (
        functools.partial(cifar_cnn, as_fltk=True),
        [0.485, 0.456, 0.406],
        [0.229, 0.224, 0.225],
    ),
}
MOMENTUM = 0.9


class Arm(NamedTuple):
    """A curve to be run: an algorithm, its rounds, and the rounds between two evaluations."""

    algorithm: fs.Algorithm
    rounds: int
    eval_every: int = 1


class Curve(NamedTuple):
    """A curve that was run.

    Attributes:
        rounds: rounds done at each of E evaluations.
        accuracy: on the test set, in percent, [E, seeds].
        server: accuracy at the end before the models in flight were collected, [seeds]; None where
            none were.
        mb: what one seed sent, up and down, in 10^6 bytes.
        seconds: of the run, compiling included.
    """

    rounds: list[int]
    accuracy: NDArray[np.float64]
    server: NDArray[np.float64] | None
    mb: float
    seconds: float


def parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """The flags of every command; `name` is the name of its module and of its results folder."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.reproduce.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--data-dir", help="folder of the data (default: $FEDJAX_SIM_DATA_DIR, else TFDS's own)")
    add("--out", type=Path, default=BENCHMARKS / "results" / name, help="folder of the results")
    return made


def parse_sized(
    made: argparse.ArgumentParser, argv: Sequence[str] | None, full: Any, small: Any, reduced: str
) -> argparse.Namespace:
    """Adds `--small` and `--seeds`, and parses.

    Args:
        made: the parser.
        argv: the arguments; None for the arguments of this process.
        full: the paper's size, of any type with `seeds`.
        small: the other one.
        reduced: what it reduces, in words.

    Returns:
        The arguments, with `size` and `seeds` filled in.
    """
    made.add_argument("--small", action="store_true", help=reduced)
    made.add_argument(
        "--seeds", type=int, help=f"runs of each (default: {full.seeds}, small {small.seeds})"
    )
    args = made.parse_args(argv)
    args.size = small if args.small else full
    args.seeds = args.size.seeds if args.seeds is None else args.seeds
    return args


def fewer(dataset: Dataset, samples: int | None) -> Dataset:
    """The first training samples of each class, equally many of each; None for all."""
    if samples is None:
        return dataset
    y, each = dataset.train_y, samples // dataset.classes
    rows = np.sort(np.concatenate([np.flatnonzero(y == c)[:each] for c in range(dataset.classes)]))
    return dataset._replace(train_x=dataset.train_x[rows], train_y=y[rows])


def dealt(dataset: Dataset, sampler: str, clients: int, seeds: int) -> Problem:
    """Clients of a sampler's text form, another partition for each seed; the official test set."""
    _, sample = parse_sampler(sampler)
    partitions: list[Partition] = [sample(dataset.train_y, clients, s) for s in range(seeds)]
    return official(dataset, partitions, range(seeds))


def thesis_data(name: str, samples: int | None, data_dir: str | Path | None = None) -> Dataset:
    """A data set of the thesis for a study: the first samples, scaled as by `thesis_model`."""
    _, mean, std = NETWORKS[name]
    dataset = fewer(fs.load_dataset(name, data_dir), samples)
    return dataset._replace(mean=_pixels(mean), std=_pixels(std))


mnist = functools.partial(thesis_data, "mnist", None)
mnist_small = functools.partial(thesis_data, "mnist", 2000)


def thesis_model(name: str, dataset: Dataset) -> fs.Model:
    """The thesis' network for a data set, on its pixels as they are stored."""
    make, mean, std = NETWORKS[name]
    model = make(dataset.train_x.shape[1:], dataset.classes)
    return with_scaling(model, _pixels(mean), _pixels(std))


def _pixels(values: Sequence[float]) -> NDArray[np.float32]:
    return 255 * np.asarray(values, np.float32)


def thesis_update(
    model: fs.Model, epochs: float, lr: float = 0.001, transforms: Sequence[Transform] = ()
) -> LocalUpdate:
    """Local training by Table 4.2 of Cornelis' thesis; a client keeps its momentum, as in FLTK."""
    return fs.local_sgd(
        fs.empirical_risk(model),
        optax.sgd(lr, momentum=MOMENTUM),
        batch_size=16,
        epochs=epochs,
        optimizer_state="keep",
        transforms=transforms,
    )


def thesis_transforms(name: str) -> list[Transform]:
    """What FLTK does to every minibatch: it flips and crops the images of CIFAR-10."""
    return [altered([warped(sometimes(0.5, flip)), crop(4)])] if name == "cifar10" else []


def simulate(
    name: str,
    arm: Arm,
    model: fs.Model,
    problem: Problem,
    classes: int,
    *,
    auc: bool | None = None,
) -> fs.Result:
    """All seeds, or all folds of all seeds, of one arm as one batch, behind a progress bar."""
    # disable=None: no bar where stderr is a file.
    with tqdm(total=arm.rounds, desc=name, unit="round", disable=None) as bar:
        return fs.simulate(
            arm.algorithm,
            model,
            problem.data,
            problem.test,
            rounds=arm.rounds,
            classes=classes,
            seeds=[r["seed"] for r in problem.runs],
            eval_every=min(arm.eval_every, arm.rounds),
            validation=problem.validation,
            auc=auc,
            on_evaluation=lambda e: bar.update(e.round - bar.n),
        )


def run(
    arms: Mapping[str, Arm], model: fs.Model, problem: Problem, classes: int
) -> dict[str, Curve]:
    """Runs one arm after another."""
    curves = {}
    for name, arm in arms.items():
        began = time.perf_counter()
        result = simulate(name, arm, model, problem, classes)
        last = result.evaluations[-1]
        server = None if last.uncollected is None else 100 * last.uncollected
        curves[name] = Curve(
            [e.round for e in result.evaluations],
            100 * result.accuracy,
            server,
            bytes_sent(last) / MB,
            time.perf_counter() - began,
        )
        print(f"{name}: {spread(curves[name].accuracy[-1])} %, {curves[name].seconds:.0f} s",
              file=sys.stderr, flush=True)  # fmt: skip
    return curves


def spread(values: NDArray[np.float64]) -> str:
    """Mean ± standard deviation over seeds."""
    return f"{np.mean(values):.2f} ± {np.std(values):.2f}"


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Records as a table; numbers with up to three decimals."""

    def cell(value: Any) -> str:
        return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)

    lines = [list(rows[0]), ["---"] * len(rows[0]), *([cell(v) for v in r.values()] for r in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_curves(
    path: Path,
    started: float,
    dataset: Dataset,
    args: argparse.Namespace,
    table: Sequence[Mapping[str, Any]],
    curves: Mapping[str, Curve],
    **content: Any,
) -> None:
    """A record of the table and the curves of one data set, and of what else there is."""
    write_record(
        path,
        started,
        dataset=dataset.name,
        training_samples=len(dataset.train_y),
        seeds=args.seeds,
        **content,
        table=table,
        curves={name: curve._asdict() for name, curve in curves.items()},
    )


def picture(width: float, height: float) -> Figure:
    """An empty picture, in inches."""
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(axes: Sequence[Axes]) -> None:
    """A light grid and no frame."""
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)


def draw_curve(axis: Axes, x: ArrayLike, values: NDArray[np.float64], **style: Any) -> None:
    """The mean over seeds of ``values [E, seeds]``, and a band of one standard deviation."""
    mean, std = np.mean(values, axis=1), np.std(values, axis=1)
    (line,) = axis.plot(x, mean, **style)
    axis.fill_between(x, mean - std, mean + std, color=line.get_color(), alpha=0.18, linewidth=0)
