"""Tests that docs/papers.toml agrees with the code and the records."""

from __future__ import annotations

import json
import re
import shlex
from functools import reduce
from pathlib import Path

import jax
import numpy as np
import papers
import pytest
from conftest import known
from test_own_clients import cut

import fedjax_sim as fs
from benchmarks.reproduce import skew_accuracy, times
from fedjax_sim.bench import main
from fedjax_sim.cli.build import load_model
from fedjax_sim.cli.commands import Source
from fedjax_sim.cli.parser import parse
from fedjax_sim.partition import expected_emd

PAPERS, ROWS, EXPERIMENTS, FIGURES = papers.read()
NAMES = sorted(row.name for row in ROWS)
BY_NAME = {row.name: row for row in ROWS}
WHY = ("Not implemented: ", "Out of scope: ")


def flags(row: papers.Row) -> list[str]:
    """Returns the commands of a row, its own and those of its note or reason, with its method."""
    method = re.findall(r"--algo \w+", row.command)
    noted = re.findall(r"`(--[^`]+)`", row.note + row.why)
    return [row.command, *(" ".join([*([] if "--algo" in s else method), s]) for s in noted)]


COMMANDS = sorted({s: 0 for row in ROWS for s in flags(row) if s}, key=lambda s: "--dataset" in s)
"""Data sets that are loaded from a folder come last."""


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run, with the files that they name."""
    made = tmp_path_factory.mktemp("papers")
    weights = load_model("logistic", fs.load_dataset("digits")).init(jax.random.key(0))
    fs.save_weights(made / "pretrained.npz", weights)
    return made


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_runs(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Two rounds of one seed, all in one process, so that commands share compiled programs."""
    monkeypatch.chdir(folder)
    load = Source.load
    given, out = shlex.split(command), folder / str(COMMANDS.index(command))
    few = ["--clients", "20", "--model", "logistic"]
    if "--dataset" in given:
        request.getfixturevalue("data_dir")
        few = ["--clients-per-round", "2"]
        if "shakespeare" in given:  # an LSTM on all plays takes minutes
            monkeypatch.setattr(Source, "load", lambda self: cut(load(self)))
    few += ["--compare", "none", "--rounds", "2", "--seeds", "1", "--no-cache", "--devices", "1"]
    assert main([*few, *given, "--out", str(out)]) == 0
    done = fs.load_run(out)
    (name,) = done.algorithms
    assert "--algo" not in given or given[given.index("--algo") + 1] == name
    assert 0 < done.summary[name]["accuracy_last"] <= 1


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


def test_figures_are_made_by_the_experiments_or_by_flags() -> None:
    commands = {experiment.command for experiment in EXPERIMENTS} | {""}
    for figure in FIGURES:
        assert figure.paper in PAPERS
        assert figure.size in ("full", "small", "absent")
        assert figure.note or figure.size == "full"
        assert figure.command or figure.python or figure.size == "absent"
        if figure.command not in commands:
            assert shlex.split(figure.command)[:3] == ["python", "-m", "fedjax_sim.bench"]
            parse(shlex.split(figure.command)[3:])


def test_table_3_1_of_the_thesis() -> None:
    """EMD of related work, as printed; ll(3) is printed with 1.2, for 2(1 - 3/10)."""
    printed = {
        ("q(0.5)", 10, 10): 0.8, ("ll(2)", 10, 10): 1.6, ("ll(5)", 10, 10): 1.0,
        ("ll(2, 0.2)", 10, 5): 0.3, ("ll(2, 0.6)", 10, 5): 1.0, ("ll(2, 0.8)", 10, 5): 1.3,
        ("ll(2, 1.0)", 62, 31): 1.9, ("ll(2, 0.9)", 62, 31): 1.7, ("dirichlet(0.5)", 10, 10): 0.9,
        ("ll(1)", 10, 10): 1.8, ("dirichlet(0.1)", 10, 16): 1.4, ("ll(20)", 100, 100): 1.6,
    }  # fmt: skip
    for setting, emd in printed.items():
        assert round(known(expected_emd(*setting)), 1) == emd
    assert round(known(expected_emd("ll(3)", 10, 10)), 1) == 1.4
    assert 'fs.partition.expected_emd("ll(3)", 10, 10)' in [figure.python for figure in FIGURES]


def test_an_experiment_begins_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    name = "radfed/radfed_small_mnist.json"
    figures: dict[str, list[str]] = {"Figures 6 and 7": []}
    times.announce("all", name, seeds=4, **figures)
    times.announce("all", name, seeds=5, **figures)
    times.announce("all", name, seeds=4, **{"Figures 6 and 7": ["MNIST-1"]})
    times.announce("all", "radfed/radfed.json", seeds=4)
    assert capsys.readouterr().err.splitlines() == [
        f"all: {times.time_of(times.read([name]))}",
        *["all: time not measured"] * 3,
    ]


def test_the_page_is_current() -> None:
    written = papers.SOURCE.with_suffix(".md").read_text(encoding="utf-8")
    assert written == papers.page(), "python docs/papers.py > docs/papers.md"


def test_a_cell_has_the_last_accuracy_and_the_skew_of_the_first_round(tmp_path: Path) -> None:
    """Seeds in the order of the configuration; lines of the metrics in any order."""
    cell = tmp_path / "cells" / "one"
    cell.mkdir(parents=True)
    config = {"partition": "ll(1, 0.5)", "seeds": [3, 1], "dataset": "d", "clients": 4}
    scores = {"score_last_per_run": [0.5, 0.25], "run_seconds": 120.0}
    contents = {"config": config, "summary": {"fedavg": scores, "commit": "abc"}}
    for name, content in contents.items():
        (cell / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    lines = [
        {"round": t, "seed": seed, "B2": 10 * t + seed, "BCGV": -t - seed}
        for t in (2, 1)
        for seed in (1, 3)
    ]
    text = "\n".join(map(json.dumps, lines))
    (cell / "metrics.jsonl").write_text(text, encoding="utf-8")
    (found,) = skew_accuracy.cells_of(tmp_path, {"d": np.arange(400) % 4})
    assert found["accuracy"] == [50, 25]
    assert found["B2"] == [13, 11]
    assert found["BCGV"] == [-4, -2]
    assert found["EMD"] == pytest.approx([2 * 0.5 * (1 - 1 / 4)] * 2)
    assert found["minutes"] == 2


def test_rank_correlations_of_cells() -> None:
    mixed = iter([3.0, 7.0, 1.0, 5.0, 8.0, 2.0, 6.0, 4.0])
    rising = [{m: [i, i + 1.0] for m in skew_accuracy.MEASURES} for i in range(0, 8, 2)]
    cells = [c | {"accuracy": [-v for v in c["EMD"]]} for c in rising]
    found = {
        row["measure"]: row
        for row in skew_accuracy.correlations(
            [c | {"BCGV": [next(mixed), next(mixed)]} for c in cells]
        )
    }
    assert [found["EMD"][name] for name in ("from", "ρ", "to")] == pytest.approx([-1.0] * 3)
    assert found["BCGV"]["from"] < 0 < found["BCGV"]["to"]
