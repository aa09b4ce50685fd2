"""Writes docs/papers.md from docs/papers.toml: ``python docs/papers.py > docs/papers.md``.

Tests check docs/papers.toml against the code.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

SOURCE = Path(__file__).with_name("papers.toml")
HEAD = """\
# What the papers name

Generated from docs/papers.toml by `python docs/papers.py > docs/papers.md`.

Every method and system that five papers on federated learning from non-IID data name, in the
papers' order, with the main sections. Of {all}, {here} are available: by flags of
`python -m fedjax_sim.bench`, which without `--algo` apply to any method, or in Python (`fs` is
`import fedjax_sim as fs`). A test runs all of these flags for two rounds. The others are not
implemented or out of scope, for the reasons in the tables. Data sets, networks and surveys are left
out, as are the other papers that the web page of RADFed v1 links to."""


EXPERIMENTS = """\
## The experiments and their time

These commands repeat the papers' tables and figures; [benchmarks](../benchmarks/README.md) has the
results. The time is the sum of `seconds` in their records in `benchmarks/results`, most of which
were made next to other work on the machine; a command prints it for each of its parts before it
starts. The flags in the tables below were not timed."""

FIGURES = """\
## The tables and figures and their size

*Full* is the paper's data, network, rounds and seeds; *small* is reduced, as the note and the page
of results explain; *absent* has not been run. Sketches and tables of settings are left out. RADFed
v1 has the tables and figures of v2 except its Table 2; Vo & Rakotobe have no experiments."""


class Paper(NamedTuple):
    """A paper.

    Attributes:
        key: its name in ``Row.named``.
        short: its name in tables.
        title: authors, title, year.
        sections: the sections that name a method or system, in the paper's order.
        url: its address; "" if it is not published.
    """

    key: str
    short: str
    title: str
    sections: list[str]
    url: str = ""

    def __str__(self) -> str:
        return f"[{self.title}]({self.url})" if self.url else self.title


class Row(NamedTuple):
    """A method or system, with a command, Python, or the reason why it is absent.

    Attributes:
        name: its name in the papers, or its authors.
        named: for each paper, the sections that name it.
        command: flags of ``python -m fedjax_sim.bench``.
        python: a public name.
        note: differences from the paper, or other commands.
        why: the reason why it is absent.
    """

    name: str
    named: dict[str, list[str]]
    command: str = ""
    python: str = ""
    note: str = ""
    why: str = ""


class Experiment(NamedTuple):
    """Experiments of the papers that a command repeats.

    Attributes:
        command: the command.
        records: its files in benchmarks/results, whose seconds are added up.
    """

    command: str
    records: list[str] = []  # noqa: RUF012


class Figure(NamedTuple):
    """Tables or figures of a paper.

    Attributes:
        paper: the paper's key.
        what: their numbers.
        size: "full", "small" or "absent".
        command: the command that makes them.
        python: a call that makes them, instead of a command.
        note: the reason for the size, and what differs.
    """

    paper: str
    what: str
    size: str
    command: str = ""
    python: str = ""
    note: str = ""


class Page(NamedTuple):
    """The contents of docs/papers.toml, papers by key."""

    papers: dict[str, Paper]
    rows: list[Row]
    experiments: list[Experiment]
    figures: list[Figure]


def read() -> Page:
    """Returns the contents of docs/papers.toml."""
    data = tomllib.loads(SOURCE.read_text(encoding="utf-8"))
    papers = [Paper(**paper) for paper in data["papers"]]
    experiments = [Experiment(**experiment) for experiment in data["experiments"]]
    figures = [Figure(**figure) for figure in data["figures"]]
    return Page({p.key: p for p in papers}, [Row(**r) for r in data["rows"]], experiments, figures)


def page() -> str:
    """Returns the page, with a table for each paper of the methods that it names first."""
    sys.path.insert(0, str(SOURCE.parents[1]))
    from benchmarks.reproduce import times

    papers, rows, experiments, figures = read()
    lines = [HEAD.format(all=len(rows), here=sum(not row.why for row in rows))]
    lines += ["", EXPERIMENTS, "", "| command | time |", "| --- | --- |"]
    lines += [f"| `{e.command}` | {times.time_of(times.read(e.records))} |" for e in experiments]
    lines += ["", FIGURES, ""]
    lines += ["| table or figure | size | command | note |", "| --- | --- | --- | --- |"]
    for f in figures:
        lines.append(_cells(f"{papers[f.paper].short}: {f.what}", f.size, _code(f), f.note))
    for key, paper in papers.items():
        lines += ["", f"## {paper.short}", "", f"{paper}.", ""]
        lines += ["| method or system | named in | here |", "| --- | --- | --- |"]
        lines += [_line(row, papers) for row in rows if next(iter(row.named)) == key]
    return "\n".join(lines) + "\n"


def _line(row: Row, papers: dict[str, Paper]) -> str:
    places = (f"{papers[key].short} {_places(found)}" for key, found in row.named.items())
    return _cells(row.name, "; ".join(places), _here(row))


def _cells(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _code(entry: Row | Figure) -> str:
    return f"`{entry.command or entry.python}`" if entry.command or entry.python else ""


def _places(sections: list[str]) -> str:
    return ", ".join(text if text.startswith("Table") else f"§{text}" for text in sections)


def _here(row: Row) -> str:
    if row.why:
        return row.why
    return _code(row) + (f"; {row.note}" if row.note else "")


if __name__ == "__main__":
    print(page(), end="")
