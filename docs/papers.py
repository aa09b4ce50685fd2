"""Writes docs/papers.md, what the five papers name: ``python docs/papers.py > docs/papers.md``.

What it says is in docs/papers.toml, which tests hold to the code.
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

Here is every method and system that five papers on federated learning from non-IID data name, in
the papers' order, with the main sections. Of {all}, {here} are there: by flags of
`python -m fedjax_sim.bench`, which without `--algo` hold for any method, or in Python (`fs` is
`import fedjax_sim as fs`). A test runs all of these flags for two rounds. The others could be but
are not written, or are outside what this simulator is for; the table says why. Data sets, networks
and surveys are left out, and so are the other papers that the web page of RADFed v1 links to."""


EXPERIMENTS = """\
## The experiments and their time

These commands repeat the papers' own tables and figures;
[benchmarks](../benchmarks/README.md) has the results. The time is the sum of `seconds` in the
records that they wrote in `benchmarks/results`, most of them beside other work on the machine; the
command prints it for each of its parts before it starts. How long the flags in the tables below
take was not measured: it depends on the data set and the rounds, and a run prints the time left."""

FIGURES = """\
## The tables and figures and their size

*Full* is the paper's data, network, rounds and seeds; *small* is less of them, as the note and the
page of results say; *absent* has not been run. Sketches and tables of settings are left out. RADFed
v1 has the tables and figures of v2 but for its Table 2; Vo & Rakotobe have no experiments."""


class Paper(NamedTuple):
    """One of the five.

    Attributes:
        key: its name in ``Row.named``.
        short: what the table calls it.
        title: authors, title, year.
        sections: those that name something, in the paper's order.
        url: where it is; "" if it is not published.
    """

    key: str
    short: str
    title: str
    sections: list[str]
    url: str = ""

    def __str__(self) -> str:
        return f"[{self.title}]({self.url})" if self.url else self.title


class Row(NamedTuple):
    """A method or system; it has a command, or Python, or why it is not here.

    Attributes:
        name: what the papers call it, or its authors.
        named: by paper, the sections that name it.
        command: flags of ``python -m fedjax_sim.bench``.
        python: a public name.
        note: what else should be known of the command.
        why: why it is not here.
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
        records: the files of benchmarks/results that it wrote, whose seconds are summed.
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
        python: a call that does, in place of a command.
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
    """The page: a table for what each paper is the first to name."""
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
