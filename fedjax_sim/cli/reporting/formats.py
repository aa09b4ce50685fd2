"""Tables as text: Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_sim.cli.reporting.compare import Group, Over, over_runs, tuned, worst_tenth
from fedjax_sim.cli.reporting.read import ACROSS
from fedjax_sim.cli.reporting.tables import MOMENTS, Cell, Table, differences, sent_bytes

FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""How a cell begins that spreadsheets compute."""

LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    "[": "{[}", "]": "{]}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
}  # fmt: skip


def markdown(table: Table) -> str:
    """A table in Markdown."""
    cells = [[_markdown(cell) for cell in row] for row in table.rows]
    rule = [":--", *([":--"] if table.words else ["--:"]) * (len(table.head) - 1)]
    head = [plain(title) for title in table.head]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, rule, *cells])


def _markdown(cell: Cell) -> str:
    return f"**{plain(cell.text)}**" if cell.best else plain(cell.text)


def plain(text: str) -> str:
    r"""A text that Markdown shows as it is.

    >>> print(plain("a|b_c <i>"))
    a\|b\_c \<i\>
    """
    return re.sub(r"([\\`*_{}\[\]<>#|&!])", r"\\\1", " ".join(text.split()))


def latex(parts: Mapping[str, Table]) -> str:
    """Tables of the same columns, one below the other, as a ``tabular`` of booktabs.

    Args:
        parts: by title; that of a single one is not shown.
    """
    first = next(iter(parts.values()))
    head = first.head
    lines = [
        r"% \usepackage{booktabs}",
        rf"\begin{{tabular}}{{l{('l' if first.words else 'r') * (len(head) - 1)}}}",
        r"\toprule",
        " & ".join(escaped(title) for title in head) + r" \\",
    ]
    for title, table in parts.items():
        lines.append(r"\midrule")
        if len(parts) > 1:
            lines.append(rf"\multicolumn{{{len(head)}}}{{l}}{{\emph{{{escaped(title)}}}}} \\")
        lines += [" & ".join(map(_latex, row)) + r" \\" for row in table.rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _latex(cell: Cell) -> str:
    text = re.sub(r"^-(?=\d)", "$-$", escaped(cell.text)).replace(" $\\pm$ ", r" $\pm$ ")
    return rf"\textbf{{{text}}}" if cell.best else text


def escaped(text: str) -> str:
    r"""A text that LaTeX shows as it is.

    >>> print(escaped("50 % of a_b & {c}"))
    50 \% of a\_b \& \{c\}
    """
    return "".join(LATEX.get(letter, letter) for letter in " ".join(text.split()))


def comma_separated(groups: Sequence[Group]) -> str:
    """Everything that was measured, a row for each method; an unknown number is empty."""
    rows = [row for group in groups for row in _plain_rows(group)]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({k: "" if v is None or v != v else csv_cell(v) for k, v in row.items()})
    return out.getvalue()


def csv_cell(value: Any) -> Any:
    """Returns a cell of a CSV file; a text that a spreadsheet would compute has a quote before it.

    >>> csv_cell("=1+1"), csv_cell("fedavg"), csv_cell(-0.5)
    ("'=1+1", 'fedavg', -0.5)
    """
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA) else value


def _plain_rows(group: Group) -> Iterator[dict[str, Any]]:
    gains, baseline, chosen = differences(group), group.baseline, tuned(group)
    for label, trial in zip(group.labels, group.trials, strict=True):
        one, tenth = gains.get(trial), worst_tenth(trial)
        row: dict[str, Any] = {"method": label, "algorithm": trial.algorithm, "run": trial.run}
        row |= group.problem._asdict()
        row |= {"score": trial.score, "own_models": trial.own, "runs": trial.runs}
        for moment in MOMENTS:
            over = over_runs(trial, moment)
            row |= {f"{moment}_mean": None, f"{moment}_std": None}
            if over is not None:
                row |= {f"{moment}_mean": over.mean, f"{moment}_std": over.std}
        row["tuned"] = None if chosen is None else trial in chosen.trials
        row["diverged_round"] = min(trial.diverged.values()) if trial.diverged else None
        row["worst_tenth_mean"] = None if tenth is None else tenth.mean
        row["worst_tenth_std"] = None if tenth is None else tenth.std
        row["rounds"] = int(trial.rounds[-1]) if len(trial.rounds) else None
        up, down = sent_bytes(trial) if len(trial.rounds) else (None, None)
        row |= {"bytes_up": up, "bytes_down": down}
        for key in ACROSS:
            found = trial.across.get(key)
            row[key] = float(found[-1].mean()) if found is not None and len(found) else None
        row["baseline"] = None if baseline is None else group.label(baseline)
        n = 0 if one is None else len(one.values)
        over = Over(one.values) if one is not None and n else None
        row["pairs"] = None if one is None else n
        row["difference_mean"] = None if over is None else over.mean
        row["difference_std"] = None if over is None else over.std
        row["p"] = None if one is None else one.p
        row["least_p"] = None if one is None or one.p is None else one.least
        yield row
