"""The results of a study: the selected setting of each method, its scores, and tests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Metric
from fedjax_sim.base.files import write_text
from fedjax_sim.cli.loading import read_summary
from fedjax_sim.cli.reporting.compare import Over
from fedjax_sim.cli.reporting.formats import (
    BOLD,
    comma_separated,
    latex_of,
    markdown,
    plain,
    terminal,
)
from fedjax_sim.cli.reporting.read import no_score, read
from fedjax_sim.cli.reporting.statistics import OF_FOLDS, OF_SEEDS, paired, spread
from fedjax_sim.cli.reporting.tables import Table, chance, gain_text, over_text, placed
from fedjax_sim.cli.reporting.wide import wides
from fedjax_sim.cli.resuming import written
from fedjax_sim.cli.studies import plan


class Row(NamedTuple):
    """A method in one cell.

    Attributes:
        cell: its name.
        settings: of the cell.
        method: the row of the study.
        setting: the one that was chosen; None if all have diverged.
        runs: of each run its seed, and its fold if there are folds.
        scores: test scores of the chosen setting, ``f64[R]``.
        validation: of the runs' best rounds, ``f64[R]``; None without a validation set.
        megabytes: up and down, of one run.
        score: the name of the score.
        metric: how it is read.
        own: whether these are scores of the clients' own models.
        unscored: whether the clients have own models, and no scores.
    """

    cell: str
    settings: Mapping[str, Any]
    method: str
    setting: str | None
    runs: Sequence[Mapping[str, int]]
    scores: NDArray[np.float64]
    validation: NDArray[np.float64] | None
    megabytes: float
    score: str
    metric: Metric
    own: bool = False
    unscored: bool = False

    @property
    def text(self) -> str:
        """The mean and the standard deviation over runs."""
        return over_text(Over(self.scores), self.metric)


def rows_of(study: plan.Study, cell: plan.Cell, folder: Path) -> list[Row]:
    """Returns the methods of a finished cell, each with the setting that validation chose."""
    summary, config = read_summary(folder), written(folder)
    runs = [{"seed": seed} for seed in cell.config.experiment.seeds]
    if cell.config.scores.folds is not None:
        runs = [{**run, "fold": f} for run in runs for f in range(cell.config.scores.folds)]
    metric = Metric(**config["metric"])
    rows = []
    for method, texts in study.rows.items():
        tried = {text: summary[text] for text in texts}
        chosen = best_setting(tried, lowest=metric.best == "lowest")
        found = summary[chosen] if chosen else {}
        prefix = prefix_of(found)
        moment = "validated" if f"{prefix}score_validated_per_run" in found else "last"
        scores = found.get(f"{prefix}score_{moment}_per_run", ())
        validation = found.get(f"{prefix}validation_best_per_run")
        if lacks_score(found):
            scores, validation = np.full(len(runs), math.nan), None
        rows.append(
            Row(
                cell.name,
                cell.settings,
                method,
                chosen,
                runs,
                np.array(scores, np.float64),
                None if validation is None else np.array(validation, np.float64),
                (found.get("bytes_up", 0) + found.get("bytes_down", 0)) / 1e6,
                config["score"],
                metric,
                bool(prefix),
                lacks_score(found),
            )
        )
    return rows


def prefix_of(summary: Mapping[str, Any]) -> str:
    """Returns what the keys of a method's scores begin with: clients' own models count if any."""
    return "personal_" if "personal_score_last_per_run" in summary else ""


def lacks_score(summary: Mapping[str, Any]) -> bool:
    """Returns whether some leaves are the clients' own, whose models are not scored."""
    return bool(summary.get("own_leaves")) and not prefix_of(summary)


def best_setting(summaries: Mapping[str, Mapping[str, Any]], *, lowest: bool) -> str | None:
    """Returns the setting with the best mean validation score, each run at its best round.

    It is the first of equals; None if all have diverged.

    >>> scores = {"a": {"validation_best_per_run": [0.5, 0.7]}, "b": {"diverged": "in round 2"}}
    >>> best_setting(scores, lowest=False)
    'a'
    """
    finished = [name for name, s in summaries.items() if "diverged" not in s]
    if len(summaries) == 1:
        return next(iter(finished), None)
    sign = -1 if lowest else 1

    def score(name: str) -> float:
        found = summaries[name]
        if lacks_score(found):
            return -math.inf
        scores = np.array(found[f"{prefix_of(found)}validation_best_per_run"], float)
        mean = sign * float(np.mean(scores))
        return -math.inf if math.isnan(mean) else mean

    return max(finished, key=score, default=None)


def write_results(study: plan.Study, rows: Sequence[Row], folder: Path) -> str:
    """Writes ``results.csv`` (a line for each run), and as ``.md`` and ``.tex`` the table.

    Returns:
        The table for the terminal.
    """
    write_text(folder / "results.csv", comma_separated([*_lines(study, rows)]))
    if study.across is None:
        made = [("", table(study, rows), explained(rows))]
    else:
        made = [(w.title, w.table(), w.note) for w in wides(read([folder]), study.across)]
    pages = ([plain(title), markdown(found), plain(note)] for title, found, note in made)
    write_text(folder / "table.md", _paragraphs(pages) + "\n")
    write_text(folder / "table.tex", latex_of(made))
    return "\n\n".join(terminal(*one) for one in made)


def _paragraphs(parts: Iterable[Iterable[str]]) -> str:
    return "\n\n".join(filter(None, chain.from_iterable(parts)))


def _lines(study: plan.Study, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for row in rows:
        for i, run in enumerate(row.runs if row.setting else ()):
            named = {key: row.settings.get(key, "") for key in study.columns}
            named |= {"method": row.method, "setting": row.setting}
            named |= {"seed": run["seed"], "fold": run.get("fold")}
            validation = None if row.validation is None else float(row.validation[i])
            test = float(row.scores[i])
            yield named | {"validation": validation, "test": None if math.isnan(test) else test}


def explained(rows: Sequence[Row]) -> str:
    """Describes the numbers and the marks of the table."""
    text = BOLD + " " + spread(len(row.runs) for row in rows)
    if any(row.validation is not None for row in rows):
        text += " Each run at the round that is best on its validation set."
    if own := dict.fromkeys(row.method for row in rows if row.own):
        text += f" Scores of the clients' own models: {', '.join(own)}."
    if unscored := dict.fromkeys(row.method for row in rows if row.unscored):
        text += f" {no_score([*unscored])}"
    runs = max(len(row.runs) for row in rows)
    folds = any("fold" in run for row in rows for run in row.runs)
    text += f" p: {OF_FOLDS if folds else OF_SEEDS}; two-sided, of the runs' differences, not "
    text += "corrected for the number of comparisons"
    least = f" (of {runs} runs at least {2 ** (1 - runs):.2g})" * (runs > 1 and not folds)
    return f"{text}{least}."


def table(study: plan.Study, rows: Sequence[Row]) -> Table:
    """Returns a line for each method and cell, the best of each cell marked."""
    scores = dict.fromkeys(map(_named, rows))
    name = next(iter(scores)) if len(scores) == 1 else "score"
    head = (*study.columns, "method", "setting", name, f"to {study.baseline}", "p", "MB")
    cells: dict[str, list[Row]] = {}
    for row in rows:
        cells.setdefault(row.cell, []).append(row)
    lines = []
    for inside in cells.values():
        (baseline,) = (row for row in inside if row.method == study.baseline)
        known = [row.scores[np.isfinite(row.scores)] for row in inside]
        means = [float(of.mean()) if len(of) else math.nan for of in known]
        shown = placed([row.text for row in inside], means, inside[0].metric)
        for row, score in zip(inside, shown, strict=True):
            named = [*(str(row.settings.get(key, "")) for key in study.columns), row.method]
            if row.setting is None:
                lines.append([*named, "-", "diverged", "-", "-", "-"])
                continue
            if len(scores) > 1:
                score = type(score)(f"{score} ({_named(row)})")
            numbers = [*_compared(row, baseline), f"{row.megabytes:,.1f}"]
            lines.append([*named, row.setting, score, *numbers])
    return Table(head, lines, words=True)


def _named(row: Row) -> str:
    return f"{row.score} %" if row.metric.percent else row.score


def _compared(row: Row, baseline: Row) -> tuple[str, str]:
    if row is baseline or baseline.setting is None:
        return "-", "-"
    folds = {run["fold"] for run in row.runs if "fold" in run}
    found = paired(row.scores, baseline.scores, len(folds) or None)
    return (gain_text(found, row.metric), chance(found.p)) if len(found.values) else ("-", "-")
