"""The results of a study: the selected setting of each method, its scores, and tests."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from fedjax_sim.base.files import write_text
from fedjax_sim.cli.reporting.compare import Moment, best_of, decisive, difference, over_runs
from fedjax_sim.cli.reporting.formats import (
    BOLD,
    comma_separated,
    latex_of,
    markdown,
    plain,
    terminal,
)
from fedjax_sim.cli.reporting.read import Reading, Trial, no_score, read
from fedjax_sim.cli.reporting.statistics import OF_FOLDS, OF_SEEDS, spread
from fedjax_sim.cli.reporting.tables import (
    Table,
    chance,
    gain_text,
    over_text,
    placed,
    sent_bytes,
)
from fedjax_sim.cli.reporting.wide import wides
from fedjax_sim.cli.studies import plan
from fedjax_sim.engine.memory import MB


class Row(NamedTuple):
    """A method in one cell.

    Attributes:
        cell: the cell.
        method: the row of the study.
        trial: the setting that was chosen, by the scores of the clients' own models if there are
            any; None if all have diverged.
        moment: of its test scores.
    """

    cell: plan.Cell
    method: str
    trial: Trial | None
    moment: Moment


def rows_of(study: plan.Study, reading: Reading, cells: Collection[str]) -> list[Row]:
    """Returns the methods of the cells of these names, without methods that have no score."""
    rows = []
    for cell in study.cells:
        trials = [t for t in reading.trials if t.run == cell.name and cell.name in cells]
        for method in study.rows:
            tried = [t for t in trials if t.row == method]
            tried = [t for t in tried if t.own] or tried
            finished = [t for t in tried if not t.diverged]
            best = best_of(finished) if len(finished) > 1 else None
            if tried:
                chosen = best or next(iter(finished), None)
                rows.append(Row(cell, method, chosen, decisive(tried)))
    return rows


def write_results(study: plan.Study, cells: Collection[str], folder: Path) -> str:
    """Writes ``results.csv`` (a line for each run), and as ``.md`` and ``.tex`` the table.

    Args:
        study: the study.
        cells: the names of the cells that are done.
        folder: of the study.

    Returns:
        The table for the terminal.
    """
    reading = read([folder])
    rows = rows_of(study, reading, cells)
    write_text(folder / "results.csv", comma_separated([*_lines(study, rows)]))
    if study.across is None:
        made = [("", _table(study, rows), _note(reading, rows))]
    else:
        made = [(w.title, w.table(), w.note) for w in wides(reading, study.across)]
    pages = chain.from_iterable((plain(t), markdown(found), plain(n)) for t, found, n in made)
    write_text(folder / "table.md", "\n\n".join(filter(None, pages)) + "\n")
    write_text(folder / "table.tex", latex_of(made))
    return "\n\n".join(terminal(*one) for one in made)


def _lines(study: plan.Study, rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for cell, method, trial, moment in rows:
        if trial is None:
            continue
        over, validation = over_runs(trial, moment), over_runs(trial, "validation")
        assert over is not None
        for i, (key, test) in enumerate(zip(trial.keys, over.values.tolist(), strict=True)):
            yield {
                **{name: cell.settings.get(name, "") for name in study.columns},
                "method": method,
                "setting": trial.algorithm,
                "seed": key.seed,
                "fold": key.fold,
                "validation": None if validation is None else float(validation.values[i]),
                "test": None if math.isnan(test) else test,
            }


def _note(reading: Reading, rows: Sequence[Row]) -> str:
    """Describes the numbers and the marks of the table."""
    text = BOLD + " " + spread(trial.runs for trial in reading.trials)
    chosen = {row.method: row.trial for row in rows if row.trial is not None}
    if any(row.moment == "validated" for row in rows):
        text += " Each run at the round that is best on its validation set."
    if own := [method for method, trial in chosen.items() if trial.own]:
        text += f" Scores of the clients' own models: {', '.join(own)}."
    if reading.unscored:
        text += f" {no_score(reading.unscored)}"
    runs = max(trial.runs for trial in reading.trials)
    folds = any(key.fold is not None for trial in chosen.values() for key in trial.keys)
    text += f" p: {OF_FOLDS if folds else OF_SEEDS}; two-sided, of the runs' differences, not "
    text += "corrected for the number of comparisons"
    least = f" (of {runs} runs at least {2 ** (1 - runs):.2g})" * (runs > 1 and not folds)
    return f"{text}{least}."


def _table(study: plan.Study, rows: Sequence[Row]) -> Table:
    """Returns a line for each method and cell, the best of each cell marked."""
    titles = dict.fromkeys(_score_title(row.trial) for row in rows if row.trial is not None)
    title = next(iter(titles)) if len(titles) == 1 else "score"
    head = (*study.columns, "method", "setting", title, f"to {study.baseline}", "p", "MB")
    cells: dict[str, list[Row]] = {}
    for row in rows:
        cells.setdefault(row.cell.name, []).append(row)
    lines = []
    for inside in cells.values():
        baseline = next((row.trial for row in inside if row.method == study.baseline), None)
        for row, score in zip(inside, _scores(inside), strict=True):
            trial = row.trial
            named = [*(str(row.cell.settings.get(key, "")) for key in study.columns), row.method]
            if trial is None:
                lines.append([*named, "-", "diverged", "-", "-", "-"])
                continue
            if len(titles) > 1:
                score = type(score)(f"{score} ({_score_title(trial)})")
            gain = p = "-"
            if baseline is not None and trial is not baseline:
                found = difference(trial, baseline, row.moment)
                if len(found.values):
                    gain, p = gain_text(found, trial.metric), chance(found.p)
            megabytes = f"{sum(sent_bytes(trial)) / MB:,.1f}"
            lines.append([*named, trial.algorithm, score, gain, p, megabytes])
    return Table(head, lines, words=True)


def _scores(rows: Sequence[Row]) -> list[str]:
    """Returns the scores of a cell's methods, marked."""
    overs = [None if row.trial is None else over_runs(row.trial, row.moment) for row in rows]
    metric = next((row.trial.metric for row in rows if row.trial is not None), None)
    if metric is None:
        return [""] * len(rows)
    means = [math.nan if over is None else over.mean for over in overs]
    return placed([over_text(over, metric) for over in overs], means, metric)


def _score_title(trial: Trial) -> str:
    return trial.score.removeprefix("client_") + " %" * trial.metric.percent
