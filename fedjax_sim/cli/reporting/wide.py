"""The table of a paper: methods by the values of one setting."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from fedjax_sim.base.spelling import hint
from fedjax_sim.base.words import counted
from fedjax_sim.cli.reporting.compare import (
    Moment,
    Over,
    best_of,
    by_series,
    decisive,
    difference,
    differing,
    over_runs,
)
from fedjax_sim.cli.reporting.formats import BOLD
from fedjax_sim.cli.reporting.problems import score_text
from fedjax_sim.cli.reporting.read import NO_SETTINGS, Reading, Trial, no_score
from fedjax_sim.cli.reporting.statistics import (
    LEVEL,
    OF_FOLDS,
    OF_SEEDS,
    Difference,
    critical_difference,
    friedman,
    ranks,
    spread,
)
from fedjax_sim.cli.reporting.tables import Table, by_title, chance, mark_best, over_text, with_holm
from fedjax_sim.tasks.sums import Floats

MARK = "†"
"""The sign of a significant difference to the baseline."""

RANK = "average rank"

Entry = tuple[str, str]
"""A method and a column."""


@dataclasses.dataclass(frozen=True, eq=False)
class Wide:
    """The scores of methods by the values of a setting.

    Attributes:
        title: the other settings of the runs; empty if they are the same for all tables.
        setting: the setting whose values are the columns.
        rows: the methods.
        columns: the values of the setting.
        trials: by method and column; a method may lack a column.
        baseline: the method with which the others are compared.
        moment: the moment of the scores, see :func:`over_runs`.
        unscored: methods without a score.
    """

    title: str
    setting: str
    rows: Sequence[str]
    columns: Sequence[str]
    trials: Mapping[Entry, Trial]
    baseline: str
    moment: Moment
    unscored: Sequence[str] = ()

    def over(self, row: str, column: str) -> Over | None:
        """Returns the scores of a method in a column over its runs; None if it has none."""
        trial = self.trials.get((row, column))
        over = None if trial is None else over_runs(trial, self.moment)
        return over if over is None or not over.diverged else over._replace(diverged="diverged")

    @cached_property
    def differences(self) -> dict[Entry, Difference]:
        """The differences from the baseline in the same column."""
        return {
            (row, column): difference(trial, self.trials[self.baseline, column], self.moment)
            for (row, column), trial in self.trials.items()
            if row != self.baseline and (self.baseline, column) in self.trials
        }

    @cached_property
    def chances(self) -> dict[Entry, float]:
        """The p-values of the differences, corrected for all comparisons of the table."""
        return with_holm(self.differences)

    @cached_property
    def ranks(self) -> Floats:
        """The ranks of the k methods in the N columns that have all of them, ``[N, k]``.

        A diverged method is last. A single column has no ranks.
        """
        found = [np.empty((0, len(self.rows)))]
        for column in self.columns if len(self.columns) > 1 else ():
            of = [self.trials[row, column] for row in self.rows if (row, column) in self.trials]
            if len(of) == len(self.rows):
                overs = [over_runs(trial, self.moment) for trial in of]
                means = [math.nan if over is None else over.mean for over in overs]
                found.append(ranks(np.array([means]), lowest=of[0].metric.best == "lowest"))
        return np.concatenate(found)

    def table(self) -> Table:
        """Returns the table: mean ± std, the best and the second-best of each column marked."""
        ranked = self.ranks
        lines = [{"method": row} for row in self.rows]
        several = len({(t.score, t.metric) for t in self.trials.values()}) > 1
        for column in self.columns:
            present = [row for row in self.rows if (row, column) in self.trials]
            if not present:
                continue
            first = self.trials[present[0], column]
            overs = [self.over(row, column) for row in present]
            texts = [
                over_text(over, first.metric)
                + MARK * (self.chances.get((row, column), 1.0) < LEVEL)
                for row, over in zip(present, overs, strict=True)
            ]
            means = [math.nan if over is None else over.mean for over in overs]
            cells = dict(zip(present, mark_best(texts, means, first.metric), strict=True))
            title = f"{column} ({first.score})" if several else column
            for line in lines:
                line[title] = cells.get(line["method"], "-")
        if len(ranked):
            averages = ranked.mean(axis=0).tolist()
            texts = [f"{average:.2f}" for average in averages]
            for line, cell in zip(lines, mark_best(texts, averages, texts), strict=True):
                line[RANK] = cell
        return by_title(lines)

    @cached_property
    def distance(self) -> float | None:
        """The critical difference of average ranks; None where Friedman's test has no result."""
        problems, methods = self.ranks.shape
        return None if friedman(self.ranks) is None else critical_difference(methods, problems)

    @cached_property
    def note(self) -> str:
        """Description of the numbers and the marks of the table."""
        trials = [*self.trials.values()]
        scores = dict.fromkeys(
            f"{score_text(t.score)}{', in %' * t.metric.percent}" for t in trials
        )
        when = {
            "validated": "in each run's round that is best on its validation set",
            "final": "after the last round",
        }[self.moment]
        lines = [f"Score: {' or '.join(scores)}, {when}.", spread(trial.runs for trial in trials)]
        lines += [BOLD, *self._on_marks()]
        if self.unscored:
            lines.append(no_score(self.unscored))
        problems, methods = self.ranks.shape
        if problems:
            some = f"{counted(problems, 'column')} with all methods"
            which = "all columns" if problems == len(self.columns) else some
            lines.append(f"{RANK.capitalize()}: over {which}; 1 is the best.")
        if (test := friedman(self.ranks)) is not None:
            lines.append(
                f"Friedman's test of the ranks of {methods} methods in {problems} columns: χ² = "
                f"{test.statistic:.3g}, p = {chance(test.pvalue)}; Nemenyi's critical difference "
                f"of average ranks at {LEVEL:g}: {self.distance:.2f}."
            )
        return " ".join(lines)

    def _on_marks(self) -> Iterator[str]:
        m = len(self.chances)
        if not m:
            return
        folds = any(key.fold is not None for trial in self.trials.values() for key in trial.keys)
        test = OF_FOLDS if folds else OF_SEEDS
        yield (
            f"{MARK}: differs from {self.baseline}, p < {LEVEL:g} ({test}; two-sided, in pairs of "
            f"the same seed, fold and partition; Holm's correction for the {m} comparisons of the "
            "table)."
        )
        least = [d.least for d in self.differences.values() if d.p is not None and d.least]
        if least and m * min(least) >= LEVEL:
            yield (
                f"With so few runs no difference can be significant: p is at least {min(least):.3g}"
                " before the correction."
            )

    def numbers(self) -> Iterator[dict[str, Any]]:
        """Yields the table as numbers, a row for each method; scores are fractions."""
        ranked = self.ranks
        for i, row in enumerate(self.rows):
            line: dict[str, Any] = {"table": self.title, "method": row}
            for column in self.columns:
                over = self.over(row, column)
                line |= {
                    f"{column} mean": None if over is None else over.mean,
                    f"{column} std": None if over is None else over.std,
                    f"{column} p, Holm": self.chances.get((row, column)),
                }
            yield line | {RANK: ranked[:, i].mean() if len(ranked) else None}


def wides(reading: Reading, setting: str, baseline: str | None = None) -> list[Wide]:
    """Returns the tables of all runs, one for each combination of the other settings that differ.

    Settings with a single value in each column do not count as other settings. By default the
    baseline is the study's, or the first method.

    Raises:
        ValueError: if no run has the setting, or a method occurs twice in a column.
    """
    at = _settings(reading)
    known = dict.fromkeys(key for of in at.values() for key in of)
    if not all(setting in of for of in at.values()):
        meant = (
            hint(setting, known)
            or f"; settings that differ: {', '.join(differing([*at.values()])) or 'none'}"
        )
        raise ValueError(f"the runs have no setting {setting!r}{meant}")
    columns = {run: _text(of[setting]) for run, of in at.items()}
    others = [
        key
        for key in _distinguishing(reading, at)
        if key != setting
        and len({*columns.values()})
        < len({(columns[run], repr(of.get(key))) for run, of in at.items()})
    ]
    parts: dict[str, list[Trial]] = {}
    for trial in reading.trials:
        of = at[trial.run]
        parts.setdefault(", ".join(f"{k} = {_text(of.get(k))}" for k in others), []).append(trial)
    every = tuple(dict.fromkeys(columns.values()))
    wanted = reading.baseline if baseline is None else baseline
    found = [_wide(title, setting, every, of, columns, wanted) for title, of in parts.items()]
    return [dataclasses.replace(wide, unscored=reading.unscored) for wide in found]


def _settings(reading: Reading) -> dict[str, dict[str, Any]]:
    """Returns the settings of each run; settings of a cell are as in the study file."""
    cells = {trial.run: trial.cell for trial in reading.trials}
    return {
        name: {k: v for k, v in run.settings.items() if k not in NO_SETTINGS} | {**cells[name]}
        for name, run in reading.runs.items()
        if name in cells
    }


def _distinguishing(reading: Reading, at: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the settings that distinguish runs: a study's grid and cells, or all that differ."""
    cells = {trial.run: trial.cell for trial in reading.trials}
    if all(cells.values()):
        return [*dict.fromkeys(key for cell in cells.values() for key in cell)]
    return [key for key in differing([*at.values()]) if key != "seeds"]


def _wide(
    title: str,
    setting: str,
    every: Sequence[str],
    trials: Sequence[Trial],
    columns: Mapping[str, str],
    wanted: str | None,
) -> Wide:
    moment = decisive(trials)
    inside = [[t for t in trials if columns[t.run] == column] for column in every]
    chosen = moment == "validated" and any(
        len(of) > 1 for column in inside for of in by_series(column).values()
    )
    found: dict[Entry, Trial] = {}
    for column, of in zip(every, inside, strict=True):
        picked = [best_of(ts) or ts[0] for ts in by_series(of).values()] if chosen else of
        for trial in picked:
            entry = trial.series if chosen else trial.label, column
            if entry in found:
                raise ValueError(
                    f"{entry[0]} occurs twice at {setting} = {column}, in {found[entry].run} and "
                    f"in {trial.run}: report one of them"
                )
            found[entry] = trial
    rows = [*dict.fromkeys(row for row, _ in found)]
    named = (
        row
        for (row, _), t in found.items()
        if wanted in (f"{t.label} [{t.run}]", t.label, t.algorithm, t.method, t.plain)
    )
    baseline = wanted if wanted in rows else next(named, rows[0])
    return Wide(title, setting, rows, every, found, baseline, moment)


def _text(value: Any) -> str:
    return "none" if value is None else str(value)
