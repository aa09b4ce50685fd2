"""What a study found: the chosen setting of each method, its scores, and whether they differ."""

from __future__ import annotations

import csv
import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.cli.report import digits
from fedjax_sim.cli.studies.plan import Cell, Study


class Row(NamedTuple):
    """A method in one cell.

    Attributes:
        cell: its name.
        settings: of the cell.
        method: the row of the study.
        setting: the one that was chosen; None if all have diverged.
        runs: of each run its seed, and its fold if there are folds.
        scores: test scores of the chosen setting, ``f64[R]``.
        validation: of the runs' best rounds, ``f64[R]``; None without validation clients.
        megabytes: up and down, of one run.
        score: what it is.
        lowest: whether low scores are good.
        percent: whether it is a share.
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
    lowest: bool
    percent: bool


class Difference(NamedTuple):
    """Of a method to the baseline, run by run.

    Attributes:
        mean: of the differences.
        p: of Wilcoxon's signed-rank test, two-sided; NaN for a single run.
    """

    mean: float
    p: float


def rows_of(study: Study, cell: Cell, folder: Path) -> list[Row]:
    """The methods of a cell that has run, each with the setting that validation clients chose.

    Args:
        study: which settings belong to a row.
        cell: the cell.
        folder: of its run.
    """
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    runs = [{"seed": seed} for seed in cell.config.experiment.seeds]
    if cell.config.scores.folds is not None:
        runs = [{**run, "fold": f} for run in runs for f in range(cell.config.scores.folds)]
    lowest, percent = config["lowest_is_best"], config["score_is_share"]
    rows = []
    for method, texts in study.rows.items():
        chosen = best_setting({text: summary[text] for text in texts}, lowest=lowest)
        found = summary[chosen] if chosen else {}
        moment = "validated" if "score_validated_per_run" in found else "last"
        validation = found.get("validation_best_per_run")
        rows.append(
            Row(
                cell.name,
                cell.settings,
                method,
                chosen,
                runs,
                np.array(found.get(f"score_{moment}_per_run", ()), np.float64),
                None if validation is None else np.array(validation, np.float64),
                (found.get("bytes_up", 0) + found.get("bytes_down", 0)) / 1e6,
                config["score"],
                lowest,
                percent,
            )
        )
    return rows


def best_setting(summaries: Mapping[str, Mapping[str, Any]], *, lowest: bool) -> str | None:
    """The setting with the best mean validation score, each run at its best round.

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
        mean = sign * float(np.mean(np.array(summaries[name]["validation_best_per_run"], float)))
        return -math.inf if math.isnan(mean) else mean

    return max(finished, key=score, default=None)


def difference(row: Row, baseline: Row) -> Difference | None:
    """Of a method to the baseline in the same cell; None if one has diverged."""
    if not (len(row.scores) and len(baseline.scores)):
        return None
    return paired(row.scores - baseline.scores)


def paired(differences: NDArray[np.float64]) -> Difference:
    """Mean and p of paired differences.

    >>> paired(np.arange(1.0, 7.0))
    Difference(mean=3.5, p=0.03125)
    >>> paired(np.zeros(5))
    Difference(mean=0.0, p=1.0)
    """
    known = differences[np.isfinite(differences)]
    if len(known) < 2:
        return Difference(float(np.mean(known)) if len(known) else math.nan, math.nan)
    if not np.any(known):
        return Difference(0.0, 1.0)
    import scipy.stats  # half a second

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ties and zeros among few runs: it says how it takes them
        p = float(scipy.stats.wilcoxon(known).pvalue)
    return Difference(float(known.mean()), p)


def write_results(study: Study, rows: Sequence[Row], folder: Path) -> None:
    """Writes ``results.csv`` (a line for each run), ``table.md`` and ``table.tex``."""
    keys = study.columns
    with (folder / "results.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*keys, "method", "setting", "seed", "fold", "validation", "test"])
        for row in rows:
            for i, run in enumerate(row.runs if row.setting else ()):
                validation = "" if row.validation is None else _number(row.validation[i])
                place = [run["seed"], run.get("fold", "")]
                told = [
                    *(row.settings.get(key, "") for key in keys),
                    row.method,
                    row.setting,
                    *place,
                    validation,
                ]
                writer.writerow([*told, _number(row.scores[i])])
    (folder / "table.md").write_text(markdown(study, rows) + "\n", encoding="utf-8")
    (folder / "table.tex").write_text(latex(study, rows) + "\n", encoding="utf-8")


def markdown(study: Study, rows: Sequence[Row]) -> str:
    """The table, a line for each method and cell; the best of each cell is bold."""
    lines = list(_lines(study, rows, bold=lambda text: f"**{text}**"))
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def latex(study: Study, rows: Sequence[Row]) -> str:
    """The same table for LaTeX with the package booktabs."""
    head, *lines = _lines(study, rows, bold=lambda text: f"\0{text}\1")
    body = [" & ".join(map(_escaped, line)) + r" \\" for line in lines]
    layout = "l" * (len(study.columns) + 2) + "r" * 4
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{layout}}}",
            r"\toprule",
            " & ".join(map(_escaped, head)) + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
        ]
    )


def _lines(study: Study, rows: Sequence[Row], bold: Any) -> Iterable[list[str]]:
    scores = dict.fromkeys(_named(row) for row in rows)
    head = next(iter(scores)) if len(scores) == 1 else "score"
    yield [*study.columns, "method", "setting", head, f"to {study.baseline}", "p", "MB"]
    cells: dict[str, list[Row]] = {}
    for row in rows:
        cells.setdefault(row.cell, []).append(row)
    for inside in cells.values():
        (baseline,) = (row for row in inside if row.method == study.baseline)
        means = [float(np.nanmean(row.scores)) if len(row.scores) else math.nan for row in inside]
        best = None
        if not np.isnan(means).all():
            best = int((np.nanargmin if inside[0].lowest else np.nanargmax)(means))
        for i, row in enumerate(inside):
            told = [*(str(row.settings.get(key, "")) for key in study.columns), row.method]
            if row.setting is None:
                yield [*told, "-", "diverged", "-", "-", "-"]
                continue
            score = _score(row) + (f" ({_named(row)})" if len(scores) > 1 else "")
            yield [*told, row.setting, bold(score) if i == best else score,
                   *_compared(row, baseline), f"{row.megabytes:,.1f}"]  # fmt: skip


def _named(row: Row) -> str:
    return f"{row.score} %" if row.percent else row.score


def _score(row: Row) -> str:
    known = row.scores[np.isfinite(row.scores)]
    if not len(known):
        return "-"
    mean, std = float(known.mean()), float(known.std())
    if row.percent:
        return f"{100 * mean:.2f} ± {100 * std:.2f}"
    return f"{digits(mean)} ± {digits(std, mean)}"


def _compared(row: Row, baseline: Row) -> tuple[str, str]:
    found = None if row.method == baseline.method else difference(row, baseline)
    if found is None or math.isnan(found.mean):
        return "-", "-"
    mean = f"{100 * found.mean:+.2f}" if row.percent else f"{found.mean:+.4g}"
    return mean, "-" if math.isnan(found.p) else f"{found.p:.2g}"


def _number(value: float) -> str:
    return repr(float(value)) if math.isfinite(value) else ""


def _escaped(text: str) -> str:
    signs = {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
        "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        "±": r"$\pm$", "\0": r"\textbf{", "\1": "}",
    }  # fmt: skip
    return "".join(signs.get(sign, sign) for sign in text)
