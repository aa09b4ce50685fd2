"""The results of a study: the selected setting of each method, its scores, and tests."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Metric
from fedjax_sim.base.files import write_text
from fedjax_sim.cli.loading import read_summary
from fedjax_sim.cli.report import with_std
from fedjax_sim.cli.reporting.compare import paired
from fedjax_sim.cli.reporting.formats import csv_cell, latex, markdown
from fedjax_sim.cli.reporting.tables import Best, Table
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


def rows_of(study: plan.Study, cell: plan.Cell, folder: Path) -> list[Row]:
    """Returns the methods of a finished cell, each with the setting that validation chose.

    Args:
        study: which settings belong to a row.
        cell: the cell.
        folder: of its run.
    """
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
        validation = found.get(f"{prefix}validation_best_per_run")
        rows.append(
            Row(
                cell.name,
                cell.settings,
                method,
                chosen,
                runs,
                np.array(found.get(f"{prefix}score_{moment}_per_run", ()), np.float64),
                None if validation is None else np.array(validation, np.float64),
                (found.get("bytes_up", 0) + found.get("bytes_down", 0)) / 1e6,
                config["score"],
                metric,
                bool(prefix),
            )
        )
    return rows


def prefix_of(summary: Mapping[str, Any]) -> str:
    """Returns what the keys of a method's scores begin with: clients' own models count if any."""
    return "personal_" if "personal_score_last_per_run" in summary else ""


def best_setting(summaries: Mapping[str, Mapping[str, Any]], *, lowest: bool) -> str | None:
    """Returns the setting with the best mean validation score, each run at its best round.

    Args:
        summaries: of each setting, see :func:`fedjax_sim.cli.report.measurements`.
        lowest: whether low scores are good.

    Returns:
        The first of equals; None if all have diverged.

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
        scores = np.array(found[f"{prefix_of(found)}validation_best_per_run"], float)
        mean = sign * float(np.mean(scores))
        return -math.inf if math.isnan(mean) else mean

    return max(finished, key=score, default=None)


def write_results(study: plan.Study, rows: Sequence[Row], folder: Path) -> Table:
    """Writes ``results.csv`` (a line for each run), and as ``.md`` and ``.tex`` the table."""
    keys, lines = study.columns, io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow([*keys, "method", "setting", "seed", "fold", "validation", "test"])
    for row in rows:
        for i, run in enumerate(row.runs if row.setting else ()):
            validation = "" if row.validation is None else _number(row.validation[i])
            place = [run["seed"], run.get("fold", "")]
            named = [*(row.settings.get(key, "") for key in keys), row.method, row.setting]
            scores = [validation, _number(row.scores[i])]
            writer.writerow([*map(csv_cell, named), *place, *scores])
    found = table(study, rows)
    write_text(folder / "results.csv", lines.getvalue())
    write_text(folder / "table.md", markdown(found) + "\n")
    write_text(folder / "table.tex", latex({"": found}))
    return found


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
        best = best_of(inside)
        for row in inside:
            named = [*(str(row.settings.get(key, "")) for key in study.columns), row.method]
            if row.setting is None:
                lines.append([*named, "-", "diverged", "-", "-", "-"])
                continue
            score = shown_score(row) + (f" ({_named(row)})" if len(scores) > 1 else "")
            score = Best(score) if row is best else score
            numbers = [*_compared(row, baseline), f"{row.megabytes:,.1f}"]
            lines.append([*named, row.setting, score, *numbers])
    return Table(head, lines, words=True)


def best_of(rows: Sequence[Row]) -> Row | None:
    """Returns the row with the best mean of a cell; the first of equals."""
    sign = -1 if rows[0].metric.best == "lowest" else 1
    means = [float(sign * np.mean(row.scores)) if len(row.scores) else math.nan for row in rows]
    return None if np.isnan(means).all() else rows[int(np.nanargmax(means))]


def _named(row: Row) -> str:
    return f"{row.score} %" if row.metric.percent else row.score


def shown_score(row: Row) -> str:
    """Writes mean and standard deviation over runs; - if none is known."""
    known = row.scores[np.isfinite(row.scores)]
    if not len(known):
        return "-"
    return with_std(float(known.mean()), float(known.std()), row.metric)


def _compared(row: Row, baseline: Row) -> tuple[str, str]:
    if row is baseline or baseline.setting is None:
        return "-", "-"
    folds = {run["fold"] for run in row.runs if "fold" in run}
    found = paired(row.scores, baseline.scores, len(folds) or None)
    if not len(found.values):
        return "-", "-"
    mean = float(found.values.mean())
    told = f"{100 * mean:+.2f}" if row.metric.percent else f"{mean:+.4g}"
    return told, "-" if found.p is None else f"{found.p:.2g}"


def _number(value: float) -> str:
    return repr(float(value)) if math.isfinite(value) else ""
