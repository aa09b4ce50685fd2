"""Tables as text: Markdown, LaTeX and CSV."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedjax_sim.cli.report import aligned
from fedjax_sim.cli.reporting.compare import Group, Over, best_settings, over_runs, worst_tenth
from fedjax_sim.cli.reporting.read import ACROSS
from fedjax_sim.cli.reporting.tables import (
    MOMENTS,
    Best,
    Second,
    Table,
    differences,
    sent_bytes,
    with_holm,
)

LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    "[": "{[}", "]": "{]}", "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
    "†": r"$^{\dagger}$",
}  # fmt: skip

BOLD = "Bold: the best of a column; underlined: the second-best of at least three."
STARS = "*: the best of a column; +: the second-best of at least three."
"""The marks of tables, and of tables for the terminal, in words."""

MARKDOWN = {Best: "**{}**", Second: "<ins>{}</ins>"}
TEX = {Best: r"\textbf{{{}}}", Second: r"\underline{{{}}}"}
TERMINAL = {Best: "{}*", Second: "{}+"}


def _marked(cell: str, text: str, marks: Mapping[Any, str]) -> str:
    return marks.get(type(cell), "{}").format(text)


def terminal(title: str, table: Table, note: str) -> str:
    """Formats a table for the terminal, with its title and its note; see :data:`STARS`."""
    rows = [[_marked(cell, cell, TERMINAL) for cell in row] for row in table.rows]
    words = textwrap.fill(note.replace(BOLD, STARS), 100)
    return "\n\n".join(filter(None, [title, aligned([table.head, *rows]), words]))


def markdown(table: Table) -> str:
    """Formats a table in Markdown."""
    rule = [":--", *([":--"] if table.words else ["--:"]) * (len(table.head) - 1)]
    cells = [[_marked(cell, plain(cell), MARKDOWN) for cell in row] for row in table.rows]
    rows = [[plain(title) for title in table.head], rule, *cells]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def plain(text: str) -> str:
    r"""Escapes a text for Markdown.

    >>> print(plain("a|b_c <i>"))
    a\|b\_c \<i\>
    """
    return re.sub(r"([\\`*_{}\[\]<>#|&!])", r"\\\1", " ".join(text.split()))


def latex_of(made: Sequence[tuple[str, Table, str]]) -> str:
    """Formats tables with their titles and notes as one, if their columns are the same.

    Other tables follow one another. The title of a single table is not shown.
    """
    titled = len(made) > 1
    if len({tuple(table.head) for _, table, _ in made}) == 1:
        notes = dict.fromkeys(note for *_, note in made)
        parts = {title: table for title, table, _ in made}
        return latex(parts, " ".join(notes), titled=titled)
    return "\n".join(latex({title: table}, note, titled=titled) for title, table, note in made)


def latex(parts: Mapping[str, Table], note: str, *, titled: bool) -> str:
    """Formats tables with the same columns, one below the other, as a ``tabular`` of booktabs.

    Args:
        parts: the tables by title.
        note: description of the numbers, as a comment.
        titled: whether the titles are shown.
    """
    first = next(iter(parts.values()))
    head = first.head
    lines = [
        r"% \usepackage{booktabs}",
        *textwrap.wrap(note, 100, initial_indent="% ", subsequent_indent="% "),
        rf"\begin{{tabular}}{{l{('l' if first.words else 'r') * (len(head) - 1)}}}",
        r"\toprule",
        " & ".join(escaped(title) for title in head) + r" \\",
    ]
    for title, table in parts.items():
        lines.append(r"\midrule")
        if titled:
            lines.append(rf"\multicolumn{{{len(head)}}}{{l}}{{\emph{{{escaped(title)}}}}} \\")
        lines += [" & ".join(map(_latex, row)) + r" \\" for row in table.rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""])


def _latex(cell: str) -> str:
    text = re.sub(r"^-(?=\d)", "$-$", escaped(cell))
    return _marked(cell, text, TEX)


def escaped(text: str) -> str:
    r"""Escapes a text for LaTeX.

    >>> print(escaped("50 % of a_b & {c}"))
    50 \% of a\_b \& \{c\}
    """
    return "".join(LATEX.get(letter, letter) for letter in " ".join(text.split()))


def comma_separated(rows: Sequence[Mapping[str, Any]]) -> str:
    """Formats rows as CSV, with the columns of all of them; an unknown number is empty."""
    import pandas

    frame = pandas.DataFrame(rows, dtype=object)  # integers stay integers beside unknown ones
    text: str = frame.to_csv(index=False, lineterminator="\n")
    return text


def measurements(group: Group) -> Iterator[dict[str, Any]]:
    """Yields all measurements of each trial of a group."""
    gains, baseline, chosen = differences(group), group.baseline, best_settings(group)
    corrected = with_holm(gains)
    for label, trial in zip(group.labels, group.trials, strict=True):
        gain, began = gains.get(trial), len(trial.rounds) > 0
        up, down = sent_bytes(trial) if began else (None, None)
        last = {key: trial.across[key][-1:] for key in ACROSS if key in trial.across}
        yield {
            "method": label,
            "algorithm": trial.algorithm,
            "run": trial.run,
            **group.problem._asdict(),
            "score": trial.score,
            "own_models": trial.own,
            "runs": trial.runs,
            **{k: v for m in MOMENTS for k, v in _moments(m, over_runs(trial, m)).items()},
            "tuned": None if chosen is None else trial in chosen.trials,
            "diverged_round": min(trial.diverged.values(), default=None),
            **_moments("worst_tenth", worst_tenth(trial)),
            "rounds": int(trial.rounds[-1]) if began else None,
            "bytes_up": up,
            "bytes_down": down,
            **{key: float(last[key].mean()) if len(last.get(key, ())) else None for key in ACROSS},
            "baseline": None if baseline is None else group.label(baseline),
            "pairs": None if gain is None else len(gain.values),
            **_moments("difference", Over(gain.values) if gain and len(gain.values) else None),
            "p": None if gain is None else gain.p,
            "p_holm": corrected.get(trial),
            "least_p": None if gain is None or gain.p is None else gain.least,
        }


def _moments(name: str, over: Over | None) -> dict[str, float | None]:
    if over is None:
        return {f"{name}_mean": None, f"{name}_std": None}
    return {f"{name}_mean": over.mean, f"{name}_std": over.std}
