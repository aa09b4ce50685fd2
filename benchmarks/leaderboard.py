"""Methods on skewed data, each tuned on validation samples: the results of leaderboard.md.

    python -m benchmarks.leaderboard                          # computes the rows that are missing
    python -m benchmarks.leaderboard --methods FedAvg FedDyn  # only these
    python -m benchmarks.leaderboard --methods                # only the tables and the picture

`leaderboard.toml` has the methods and the settings. All partitions of a method are runs of one
program: run i has the partition i // seeds of the file and the partition's seed i % seeds. A row
is appended to `DATASET.jsonl` when its method has finished; at the end, tables and a picture of all
rows are made.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from numpy.typing import NDArray
from scipy import stats

import fedjax_sim as fs
from benchmarks.reproduce.common import mnist_small
from fedjax_sim.base.files import write_text
from fedjax_sim.cli.reporting.formats import markdown
from fedjax_sim.cli.reporting.statistics import LEVEL, critical_difference, friedman, ranks
from fedjax_sim.cli.reporting.tables import Table
from fedjax_sim.partition.pictures import picture
from fedjax_sim.partition.samplers import parse_sampler
from fedjax_sim.run.environment import environment
from fedjax_sim.run.evaluation import total_bytes

FILE = Path(__file__).with_suffix(".toml")
STUDY = tomllib.loads(FILE.read_text(encoding="utf-8"))
PARTITIONS: list[str] = STUDY["grid"]["partition"]
NAMES = ("IID", "Dirichlet(0.1)", "EMD 1.4", "2 classes", "strokes")
SEEDS: int = STUDY["run"]["seeds"]
BASELINE: str = STUDY["baseline"]
STROKES = 5
"""Levels of the feature that the last partition skews."""

AUGMENTED = (0.4, 0.8)
"""Values of `--fedaug` for FedAvg: augmentation belongs to the data, not to a method."""

Row = dict[str, Any]


def _with_strokes(data: fs.data.Dataset) -> fs.data.Dataset:
    """Adds a feature: how bold a digit is within its class, in equal groups."""
    y = np.concatenate([data.train_y, data.test_y])
    ink = np.concatenate([data.train_x, data.test_x]).reshape(len(y), -1).mean(axis=1)
    level = np.zeros(len(y), np.int32)
    for label in np.unique(y):
        (of,) = np.nonzero(y == label)
        level[of[np.argsort(ink[of], kind="stable")]] = np.arange(len(of)) * STROKES // len(of)
    train, test = np.split(level, [len(data.train_y)])
    return data._replace(features={"strokes": train}, test_features={"strokes": test})


def digits(data_dir: str | None) -> fs.data.Dataset:
    """Returns scikit-learn's digits, with the feature that the last partition skews."""
    return _with_strokes(fs.load_dataset("digits", data_dir))


def mnist(data_dir: str | None) -> fs.data.Dataset:
    """Returns 12,000 samples of MNIST, with the same feature."""
    return _with_strokes(mnist_small(data_dir))


def network(shape: Sequence[int], classes: int) -> fs.Model:
    """Returns an MLP with one hidden layer of 64 units."""
    return fs.models.mlp(shape, classes, widths=(64,))


def skews(labels: Any, clients: int, *, features: Any, seed: int) -> fs.partition.Partition:
    """Draws the partition of a run: the partitions of the file in turn, `SEEDS` runs of each."""
    return _skew(labels.tobytes(), str(labels.dtype), features["strokes"].tobytes(), clients, seed)


@functools.cache  # the last one takes longer than to train a method
def _skew(
    labels: bytes, kind: str, strokes: bytes, clients: int, seed: int
) -> fs.partition.Partition:
    features = {"strokes": np.frombuffer(strokes, np.int32)}
    _, sample = parse_sampler(PARTITIONS[seed // SEEDS])
    return sample(np.frombuffer(labels, kind), clients, seed % SEEDS, features=features)


def _trained(text: str, **settings: Any) -> dict[str, fs.Result]:
    """Returns the results of the settings that have not diverged."""
    run = STUDY["run"] | settings
    run |= {"partition": f"{__spec__.name}:skews", "seeds": SEEDS * len(PARTITIONS)}
    try:
        return fs.run_experiment(text, compare="none", progress=False, **run)
    except fs.DivergedError as error:
        diverged: Any = error
        results: dict[str, fs.Result] = diverged.results
        return results
    finally:
        jax.clear_caches()  # another method has other programs


def chosen(results: Mapping[str, fs.Result], *, personal: bool = False) -> Row | None:
    """Returns by partition the setting with the best validation scores, and its test scores."""
    part: Literal["validation", "personal_validation"]
    part = "personal_validation" if personal else "validation"
    if personal and any(r.evaluations[0].personal is None for r in results.values()):
        return None
    if not personal and any(r.provenance.own_leaves for r in results.values()):
        return None  # there is no whole model at the server
    row = {}
    for i, name in enumerate(NAMES):
        runs = slice(i * SEEDS, (i + 1) * SEEDS)
        of = {setting: result.of_runs(runs) for setting, result in results.items()}
        validation = {
            setting: result.series("accuracy", by_client=True, part=part).max(axis=0)
            for setting, result in of.items()
        }
        if of:
            means = {key: np.nan_to_num(v.mean(), nan=-np.inf) for key, v in validation.items()}
            best = max(means, key=means.__getitem__)
            scores = of[best].validated("accuracy", by_client=True, personal=personal)
            row[name] = {"setting": best, "scores": scores.round(6).tolist()}
    return row


def _within(result: fs.Result, share: float) -> fs.Result:
    """Returns the evaluations of a result within a share of the bytes that FedAvg sends."""
    run = STUDY["run"]
    budget = share * 2 * run["rounds"] * run["clients_per_round"] * result.model_bytes
    kept = [e for e in result.evaluations if total_bytes(e).max() <= budget]
    return dataclasses.replace(result, evaluations=kept)


def compute(method: str, dataset: str = "digits") -> Row:
    """Trains a method with all its settings on all partitions and returns its row."""
    started, processor = time.time(), time.process_time()
    data = {"dataset": f"{__spec__.name}:{dataset}"}
    if method == "FedAug":
        texts = {f"fedaug={x:g}, ": {"fedaug": x, "mirror": False} for x in AUGMENTED}
        results = {
            key + name: result
            for key, settings in texts.items()
            for name, result in _trained(STUDY["methods"][BASELINE], **data, **settings).items()
        }
    else:
        results = _trained(STUDY["methods"][method], **data)
    if not results:
        return {"method": method, "diverged": True, **environment(started=started)}
    last = [total_bytes(r.evaluations[-1]).mean() for r in results.values()]
    one = next(iter(results.values()))
    of_fedavg = 2 * STUDY["run"]["rounds"] * STUDY["run"]["clients_per_round"] * one.model_bytes
    halves = {key: _within(result, 0.5) for key, result in results.items()}
    return {
        "method": method,
        "settings": [*results],
        "traffic": [round(float(x) / of_fedavg, 4) for x in (min(last), max(last))],
        "server": chosen(results),
        "server, half of the bytes": chosen(halves),
        "personal": chosen(results, personal=True),
        "cpu_seconds": round(time.process_time() - processor, 1),
        **environment(started=started),
    }


def read(path: Path) -> dict[str, Row]:
    """Returns the rows of a file by method."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row["method"]: row for row in map(json.loads, lines)}


def methods() -> list[str]:
    """Returns the rows in the order in which they are computed."""
    names = [*STUDY["methods"]]
    at = names.index("FedProx")
    return [*names[:at], "FedAug", *names[at:]]


@dataclasses.dataclass(frozen=True)
class Board:
    """The scores of one kind of models.

    Attributes:
        kind: "server", "server, half of the bytes" or "personal".
        scores: test scores by method, ``f64[partitions, seeds]``.
    """

    kind: str
    scores: Mapping[str, NDArray[np.float64]]

    @functools.cached_property
    def ranks(self) -> NDArray[np.float64]:
        """The ranks of the k methods in each partition, ``f64[partitions, k]``."""
        return ranks(np.array([of.mean(axis=1) for of in self.scores.values()]).T)

    @functools.cached_property
    def averages(self) -> dict[str, float]:
        """The average rank of each method, the best first."""
        averages = dict(zip(self.scores, self.ranks.mean(axis=0).tolist(), strict=True))
        return dict(sorted(averages.items(), key=lambda pair: pair[1]))

    @property
    def distance(self) -> float:
        """Nemenyi's critical difference of average ranks."""
        return critical_difference(len(self.scores), len(NAMES))

    def gain(self, method: str, i: int) -> tuple[float, float]:
        """Returns a method's difference from FedAvg in percent, and half of its 95 % interval."""
        values = 100 * (self.scores[method][i] - self.scores[BASELINE][i])
        t = stats.t.isf(LEVEL / 2, len(values) - 1)
        return float(values.mean()), float(t * values.std(ddof=1) / len(values) ** 0.5)

    def note(self) -> str:
        """Describes the tests of the ranks."""
        test = friedman(self.ranks)
        found = ""
        if test is not None:
            found = f"Friedman χ² = {test.statistic:.1f}, p = {test.pvalue:.2g}; "
        return (
            f"{self.kind}: {len(self.scores)} methods, {found}critical difference of average "
            f"ranks {self.distance:.1f} (Nemenyi, {LEVEL:g})"
        )


def boards(rows: Mapping[str, Row]) -> dict[str, Board]:
    """Returns the scores by kind.

    FedAvg's server model stands among the personal models. Methods with the same server model as
    FedAvg in all runs do not stand among the server models.
    """
    found = {
        kind: {
            method: np.array([row[kind][name]["scores"] for name in NAMES])
            for method, row in rows.items()
            if row.get(kind)
        }
        for kind in ("server", "server, half of the bytes", "personal")
    }
    server, half, personal = found.values()
    same = [m for m in server if m != BASELINE and np.array_equal(server[m], server[BASELINE])]
    for method in same:
        del server[method], half[method]
    personal[BASELINE] = server[BASELINE]
    return {kind: Board(kind, scores) for kind, scores in found.items()}


def table(board: Board, rows: Mapping[str, Row], other: Board | None = None) -> Table:
    """Returns a line for each method: ranks, scores, differences from FedAvg."""
    lines = []
    for place, (method, average) in enumerate(board.averages.items(), 1):
        cells = [str(place), method, f"{average:.1f}"]
        if other is not None:
            cells.append(f"{other.averages[method]:.1f}")
        cells.append(" to ".join(dict.fromkeys(f"{x:.2f}" for x in rows[method]["traffic"])))
        for i, mean in enumerate(100 * board.scores[method].mean(axis=1)):
            middle, half = board.gain(method, i)
            sure = abs(middle) > half
            gain = "" if method == BASELINE else f" ({middle:+z.1f} ± {half:.1f}){'*' * sure}"
            cells.append(f"{mean:.1f}{gain}")
        lines.append(cells)
    halved = [] if other is None else ["rank, half of the bytes"]
    return Table(("", "method", "average rank", *halved, "traffic", *NAMES), lines, words=True)


def draw(board: Board, path: Path) -> None:
    """Draws the average ranks, the ranks in each partition, and the critical difference."""
    order, k = [*board.averages], len(board.averages)
    columns = [[*board.scores].index(method) for method in order]
    first = board.averages[order[0]]
    with picture(path, 6.5, 0.8 + 0.14 * k) as figure:
        axis = figure.subplots()
        axis.axvspan(first, first + board.distance, color="#eeeeee")
        for name, of in zip(NAMES, board.ranks[:, columns], strict=True):
            axis.plot(of, range(k), "|", markersize=4, label=name)
        axis.plot([*board.averages.values()], range(k), "ko", markersize=3, label="average")
        axis.set(xlim=(0, k + 1), ylim=(k - 0.5, -0.5), xlabel="rank")
        axis.set_yticks(range(k), order, fontsize=6)
        figure.legend(fontsize=6, loc="outside upper center", ncols=len(NAMES) + 1)


def main() -> int:
    """Computes the rows that are missing; returns 1 if one of them has failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", choices=("digits", "mnist"), default="digits")
    parser.add_argument("--methods", nargs="*", choices=methods(), default=methods(), metavar="ROW")
    parser.add_argument("--out", type=Path, default=FILE.parent / "results" / "leaderboard")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path, failed = given.out / f"{given.dataset}.jsonl", 0
    for method in dict.fromkeys([BASELINE, *given.methods]):
        if method in read(path):
            continue
        try:
            row = compute(method, given.dataset)
        except ValueError as error:  # the other rows do not need it
            failed = 1
            print(f"{method}: {error}", flush=True)
            continue
        lines = (json.dumps(r, ensure_ascii=False) for r in [*read(path).values(), row])
        write_text(path, "\n".join(lines) + "\n")
        print(f"{method}: {row.get('cpu_seconds')} CPU s", flush=True)
    rows = read(path)
    server, half, personal = (found := boards(rows)).values()
    print(markdown(table(server, rows, half)), markdown(table(personal, rows)), sep="\n\n")
    print("", *(board.note() for board in found.values()), sep="\n")
    if diverged := [method for method, row in rows.items() if "diverged" in row]:
        print(f"all settings diverged: {', '.join(diverged)}")
    draw(server, path.with_suffix(".svg"))
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
