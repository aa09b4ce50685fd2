"""Reads run folders: the series of scores of each method, and its settings."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Metric
from fedjax_sim.cli.loading import SavedRun, load_run
from fedjax_sim.cli.reporting.folders import StudyRecord, is_study, name_folders, study_of
from fedjax_sim.cli.reporting.problems import Problem, problem_of
from fedjax_sim.cli.resuming import HARMLESS

Floats = NDArray[np.float64]

ACROSS = {"samples": "training samples visited", "seconds": "simulated seconds"}
"""What records may count, beside rounds and bytes, and the title of its axis."""

NO_SETTINGS = frozenset(
    {"algo", "compare", "options", "arguments", "partition_hashes", "partitions", "initial_sha256"}
    | {"malicious", "metric", "data", "programs", "format"}
    | HARMLESS
)
"""What ``config.json`` has that nobody has set, or that changes no result."""


class Key(NamedTuple):
    """Identifies a run of a method: equal keys mean the same clients and test samples.

    Attributes:
        seed: the seed of the run.
        fold: None without folds.
        partition: the hash of the partition.
    """

    seed: int
    fold: int | None
    partition: str


@dataclasses.dataclass(frozen=True, eq=False)
class Trial:
    """One method in one folder: T evaluations of R runs; unknown scores are NaN.

    Attributes:
        run: the name of its folder.
        algorithm: its name in the command.
        row: the study's name for the method; None outside of a study.
        cell: the distinguishing settings of its cell of the study; empty outside of a study.
        alone: whether the row has only this setting.
        own: whether personal models are scored.
        problem: the learning problem.
        settings: all settings, including the method's own.
        score: the key of the score; it begins with "client_" if it is the mean over clients.
        metric: how the score is read.
        keys: the keys of the R runs.
        rounds: ``int64[T]``, the rounds done at each evaluation.
        scores: ``f64[T, R]``, on the test set; NaN from the round in which a run diverged.
        validation: on the validation set; None without one.
        sent: ``f64[2, T, R]``, the bytes up and down so far.
        across: ``f64[T, R]``, other totals so far, by their keys in the records.
        by_client: ``f64[K]`` for each run, the clients' scores in the last round; empty if not
          kept.
        diverged: the round in which each run diverged, by its index among the R runs; 0 if unknown.
          If the method ended there, all runs did.
        summary: the method's entry in ``summary.json``.
    """

    run: str
    algorithm: str
    row: str | None
    cell: Mapping[str, Any]
    alone: bool
    own: bool
    problem: Problem
    settings: Mapping[str, Any]
    score: str
    metric: Metric
    keys: tuple[Key, ...]
    rounds: NDArray[np.int64]
    scores: Floats
    validation: Floats | None
    sent: Floats
    across: Mapping[str, Floats]
    by_client: Sequence[Floats]
    diverged: Mapping[int, int]
    summary: Mapping[str, Any]

    @property
    def runs(self) -> int:
        """R, also if no run has reached an evaluation."""
        return len(self.keys) or len(self.settings["seeds"]) * (self.problem.folds or 1)

    @property
    def plain(self) -> str:
        """The algorithm without its settings."""
        return self.algorithm.partition("(")[0]

    @property
    def method(self) -> str:
        """The row of the study, or the algorithm without its settings."""
        return self.plain if self.row is None else self.row

    @property
    def series(self) -> str:
        """The method, and whether the clients' own models are scored."""
        return f"{self.method}{self._whose}"

    @property
    def _whose(self) -> str:
        """The suffix of a name if the clients' own models are scored."""
        if not self.own:
            return ""
        return ", adapted models" if self.summary.get("adapted") else ", own models"

    @property
    def label(self) -> str:
        """The method with its setting, for tables and pictures."""
        if self.row is None or (not self.alone and self.row.partition("(")[0] == self.plain):
            name = self.algorithm
        else:
            name = self.row if self.alone else f"{self.row}: {self.algorithm}"
        return f"{name}{self._whose}"


class Reading(NamedTuple):
    """The contents of the folders of a report.

    Attributes:
        runs: the folders with a result, by name.
        trials: their methods, in order.
        unfinished: descriptions of runs without a result.
        unscored: methods that only have whole models at the clients, which were not scored.
        baseline: the row with which the first study compares the others; None without a study.
        columns: the setting in the columns of the first study's table, or None.
    """

    runs: dict[str, SavedRun]
    trials: list[Trial]
    unfinished: list[str]
    unscored: list[str]
    baseline: str | None
    columns: str | None


def read_folders(folders: Sequence[Path]) -> Reading:
    """Reads run folders, and the cells of study folders.

    Raises:
        ValueError: if a folder has no run or is damaged, or nothing is finished.
    """
    runs: dict[str, SavedRun] = {}
    trials: list[Trial] = []
    unfinished: list[str] = []
    unscored: list[str] = []
    studies = {folder: study_of(folder) for folder in folders if is_study(folder)}
    places = name_folders(folders, studies)
    for name, (folder, study) in places.items():
        if study is not None and not (folder / "summary.json").exists():
            unfinished.append(name)
            continue
        saved = load_run(folder)
        unfinished += [f"{name}: {a}" for a in saved.algorithms if a not in saved.summary]
        finished = [a for a in saved.algorithms if a in saved.summary]
        try:
            for algorithm in finished:
                found = [*_trials(name, saved, algorithm, study)]
                trials += found
                if not found:
                    unscored.append(f"{name}: {algorithm}" if len(places) > 1 else algorithm)
        except KeyError as error:
            raise ValueError(f"the records of {folder} are damaged: they lack {error}") from error
        except (TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"the records of {folder} are damaged: {error}") from error
        if finished:
            runs[name] = saved
    if unscored and not trials:
        raise ValueError(no_score(unscored))
    if not trials:
        raise ValueError(f"nothing is finished in {', '.join(map(str, folders))}")
    baseline = next((s.baseline for s in studies.values() if s.baseline), None)
    columns = next((s.columns for s in studies.values() if s.columns), None)
    return Reading(runs, trials, unfinished, unscored, baseline, columns)


def no_score(methods: Sequence[str]) -> str:
    """Returns the line about methods that have no score."""
    return (
        f"No score of {', '.join(methods)}: some leaves stay with the clients; --split holdout "
        "scores their own models."
    )


def _trials(
    name: str, saved: SavedRun, algorithm: str, study: StudyRecord | None
) -> Iterator[Trial]:
    """Yields a method's trials: of the server's model, and of the clients' own if it has any.

    In a study they are repeated for each row that has the setting.
    """
    settings, summary = saved.settings, saved.summary[algorithm]
    rows = _rows(saved, algorithm)
    rounds = [row["round"] for row in next(iter(rows.values()), [])]
    hashes, seeds = settings["partition_hashes"], settings["seeds"]
    by_seed = dict(zip(seeds, hashes * len(seeds) if len(hashes) == 1 else hashes, strict=False))
    last = {(r["seed"], r.get("fold")): r for r in saved.clients if r["algorithm"] == algorithm}
    score = _score(saved)
    by_client = [score] if score.startswith("client_") else ["client_accuracy"]
    lost = np.logical_or.accumulate(np.isnan(_column(rows, ["test_loss"])), axis=0)
    own_settings = dict(settings["options"].get(algorithm, {}))
    others = settings.keys() - NO_SETTINGS - own_settings.keys()
    counted = {key: _column(rows, [key]) for key in ACROSS}
    whose = [] if summary.get("own_leaves") else [False]
    if rounds and "personal" in next(iter(rows.values()))[-1]:
        whose.append(True)
    of_study = {} if study is None else study.rows
    rows_of = {row: len(texts) == 1 for row, texts in of_study.items() if algorithm in texts}
    for own, (row, alone) in itertools.product(whose, rows_of.items() or [(None, False)]):
        place = ["personal"] if own else []
        validating = "personal_validation" if own else "validation"
        mean = [score, "mean"] if score.startswith("client_") else [score]
        scores = _column(rows, [*place, *mean])
        scores[lost] = np.nan
        validation = _column(rows, [validating, *mean])
        yield Trial(
            run=name,
            algorithm=algorithm,
            row=row,
            cell={} if study is None else study.cells.get(saved.folder.name, {}),
            alone=alone,
            own=own,
            problem=problem_of(settings, score),
            settings=own_settings | {k: v for k, v in settings.items() if k in others},
            score=score,
            metric=Metric(**settings["metric"]),
            keys=tuple(Key(seed, fold, by_seed[seed]) for seed, fold in rows),
            rounds=np.array(rounds, np.int64),
            scores=scores,
            validation=None if np.isnan(validation).all() else validation,
            sent=np.stack([_column(rows, [way]) for way in ("bytes_up", "bytes_down")]),
            across={key: found for key, found in counted.items() if not np.isnan(found).any()},
            by_client=[
                _numbers(_at(last[run], [*place, *by_client]) or []) for run in rows if run in last
            ],
            diverged=_diverged(lost, rounds, summary),
            summary=summary,
        )


def _diverged(
    lost: NDArray[np.bool_], rounds: Sequence[int], summary: Mapping[str, Any]
) -> dict[int, int]:
    """Returns the round in which each run of a method diverged, by ``lost bool[T, R]``."""
    if "diverged" in summary:
        found = re.search(r"in round (\d+)", summary["diverged"])
        return dict.fromkeys(range(max(lost.shape[1], 1)), int(found[1]) if found else 0)
    return {int(r): rounds[int(lost[:, r].argmax())] for r in np.flatnonzero(lost.any(axis=0))}


def _rows(saved: SavedRun, algorithm: str) -> dict[tuple[int, int | None], list[dict[str, Any]]]:
    """Returns a method's records by seed and fold; all runs must have the same rounds."""
    found: dict[tuple[int, int | None], list[dict[str, Any]]] = {}
    for row in saved.records:
        if row["algorithm"] == algorithm:
            found.setdefault((row["seed"], row.get("fold")), []).append(row)
    rounds = {tuple(row["round"] for row in of) for of in found.values()}
    where, summary = saved.folder / "metrics.jsonl", saved.summary[algorithm]
    if len(rounds) > 1:
        raise ValueError(f"{where} is damaged: runs of {algorithm} have other rounds than others")
    if "diverged" not in summary and not any(of[-1:] == (summary["rounds"],) for of in rounds):
        raise ValueError(f"{where} is damaged: it lacks the last round of {algorithm}")
    return found


def _column(rows: Mapping[Any, Sequence[Mapping[str, Any]]], keys: Sequence[str]) -> Floats:
    """Returns one number of each record, ``f64[T, R]``; NaN where it is missing."""
    runs = [_numbers([_at(row, keys) for row in of]) for of in rows.values()]
    return np.stack(runs, axis=1) if runs else np.zeros((0, 0))


def _at(row: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        row = None if row is None else row.get(key)
    return row


def _numbers(values: Sequence[Any]) -> Floats:
    for value in values:
        if not isinstance(value, int | float | None):
            raise TypeError(f"{value!r} is not a number")
    found = np.array([math.nan if value is None else value for value in values], np.float64)
    return np.where(np.isfinite(found), found, np.nan)


def _score(saved: SavedRun) -> str:
    """Returns the key of the score, from the summary or, if nothing has finished, the settings."""
    for algorithm in saved.algorithms:
        if "score" in saved.summary.get(algorithm, {}):
            return str(saved.summary[algorithm]["score"])
    settings = saved.settings
    return f"{'' if settings['split'] == 'official' else 'client_'}{settings['score']}"
