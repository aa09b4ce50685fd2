"""The page of what the papers name says what is true of the code."""

from __future__ import annotations

import re
import shlex
from functools import reduce
from pathlib import Path

import papers
import pytest

import fedjax_sim as fs
from benchmarks.reproduce import times
from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.cli.parser import parse

PAPERS, ROWS, EXPERIMENTS = papers.read()
NAMES = sorted(row.name for row in ROWS)
BY_NAME = {row.name: row for row in ROWS}
WHY = ("Not written: ", "Outside: ")


def flags(row: papers.Row) -> list[str]:
    """The commands of a row, its own and those of its note or reason."""
    return [row.command, *re.findall(r"`(--[^`]+)`", row.note + row.why)]


def test_names_are_unique_and_in_the_order_of_the_papers() -> None:
    assert len(BY_NAME) == len(ROWS)
    keys = list(PAPERS)

    def place(row: papers.Row) -> tuple[int, int]:
        key, sections = next(iter(row.named.items()))
        return keys.index(key), PAPERS[key].sections.index(sections[0])

    assert sorted(ROWS, key=place) == ROWS


@pytest.mark.parametrize("name", NAMES)
def test_a_row_says_where_it_is_named_and_what_is_here(name: str) -> None:
    row = BY_NAME[name]
    assert row.named
    assert [*row.named] == [key for key in PAPERS if key in row.named]
    for key, sections in row.named.items():
        assert sections
        assert sections == [text for text in PAPERS[key].sections if text in sections]
    assert sum(map(bool, (row.command, row.python, row.why))) == 1
    assert not (row.note and row.why)
    assert not row.why or row.why.startswith(WHY)
    assert row.why.endswith(".") == bool(row.why)


@pytest.mark.parametrize("name", [name for name in NAMES if any(flags(BY_NAME[name]))])
def test_commands_are_read_and_their_methods_listed(name: str) -> None:
    row = BY_NAME[name]
    method = re.findall(r"--algo \w+", row.command)
    for text in filter(None, flags(row)):
        given = shlex.split(" ".join([*method, text]))
        config = parse(given)
        assert "--algo" not in given or config.algo in ALGORITHMS.own


@pytest.mark.parametrize("name", NAMES)
def test_names_in_python_exist(name: str) -> None:
    row = BY_NAME[name]
    text = f"{row.python} {row.note} {row.why}"
    for path in re.findall(r"\bfs((?:\.\w+)+)", text):
        reduce(getattr, path.split(".")[1:], fs)
    for file in re.findall(r"`([\w/]+\.py)`", text):
        assert (Path(__file__).parents[1] / file).is_file()
    assert not row.python or row.python.startswith("fs.")


def test_every_listed_section_names_something() -> None:
    named = {(key, text) for row in ROWS for key, found in row.named.items() for text in found}
    assert named == {(key, text) for key, paper in PAPERS.items() for text in paper.sections}


def test_the_times_of_experiments_are_those_of_records() -> None:
    root = papers.SOURCE.parents[1]
    modules = {path.stem for path in (root / "benchmarks/reproduce").glob("*.py")}
    run = set()
    for experiment in EXPERIMENTS:
        words = shlex.split(experiment.command)
        name = words[2].rpartition(".")[2]
        assert (root / words[3]).is_file() if name == "study" else name in modules
        run.add(words[3] if name == "study" else name)
        for path in experiment.records:
            (record,) = times.read([path])
            assert record["seconds"] > 0
            assert path.startswith(f"{name}/")
            assert name in record["command"]
            assert ("--small" in words) == ("_small" in path)
    toml = {str(path.relative_to(root)) for path in (root / "benchmarks/reproduce").glob("*.toml")}
    commands = {"fedaug", "ozdayi", "phase_shift", "radfed", "skew"}
    assert run == commands | toml


def test_an_experiment_begins_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    name = "radfed/radfed_small_mnist.json"
    figures: dict[str, list[str]] = {"Figures 6 and 7": []}
    times.announce("all", name, seeds=4, **figures)
    times.announce("all", name, seeds=5, **figures)
    times.announce("all", name, seeds=4, **{"Figures 6 and 7": ["MNIST-1"]})
    times.announce("all", "radfed/radfed.json", seeds=4)
    assert capsys.readouterr().err.splitlines() == [
        "all: about 13 min on 2 cores of an AMD EPYC (2026-11-24)",
        *["all: time not measured"] * 3,
    ]


def test_the_page_is_current() -> None:
    written = papers.SOURCE.with_suffix(".md").read_text(encoding="utf-8")
    assert written == papers.page(), "python docs/papers.py > docs/papers.md"
