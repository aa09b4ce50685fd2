"""Studies on other processes: the same bytes as in one, also if workers are killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future
from pathlib import Path
from typing import Any

import pytest

from fedjax_sim import study
from fedjax_sim.cli.studies import cells
from fedjax_sim.cli.studies.asked import parse_study
from fedjax_sim.cli.studies.plan import read_study

STUDY = """
run = {{model = "logistic", clients = 6, rounds = {rounds}, seeds = 1}}
grid = {{emd = [{emds}]}}
methods = ["fedavg(lr=0.1)", "fedavg(lr=0.01)"]
"""
LIMIT = 240.0
pytestmark = pytest.mark.usefixtures("bare_commands")


class Fragile(Executor):
    """Runs nothing; what comes of each task is given beforehand."""

    def __init__(self, outcomes: list[Any]) -> None:
        self._outcomes = outcomes

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        job: Future[Any] = Future()
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            job.set_exception(outcome)
        else:
            job.set_result(outcome)
        return job


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(cells, "opened", lambda text: Fragile(found))
    monkeypatch.setattr(cells, "POLL", 0.0)
    return found


def run(names: str, folder: Path) -> list[tuple[str, int]]:
    argvs = {name: [name] for name in names}
    return [*cells.by_executor("mine", lambda argv: 0, argvs, folder)]


@pytest.mark.parametrize(
    ("lost", "third"), [(RuntimeError("gone"), 1), (BrokenExecutor("all gone"), 0)]
)
def test_a_lost_cell_runs_again(
    lost: Exception, third: int, outcomes: list[Any], tmp_path: Path
) -> None:
    """And all that have not ended, if it took the others along."""
    outcomes += [0, lost, 1, 0, 0]
    assert sorted(run("abc", tmp_path)) == [("a", 0), ("b", 0), ("c", third)]


def test_workers_may_be_lost_now_and_then(outcomes: list[Any], tmp_path: Path) -> None:
    outcomes += [RuntimeError("gone"), 0] * cells.LOSSES + [0] * cells.LOSSES
    assert run("abcdefgh", tmp_path) == [(name, 0) for name in "bdfhaceg"]


def test_workers_that_are_always_lost_end_the_study(outcomes: list[Any], tmp_path: Path) -> None:
    outcomes += [0, *[RuntimeError("gone")] * cells.LOSSES]
    with pytest.raises(ValueError, match=r"--executor mine: lost 4 workers in a row, .*gone"):
        run("ab", tmp_path)


WRONG = {
    "dusk(tcp://a:1)": "'dusk' is no executor; did you mean dask?",
    "dask(tcp://a:1": "must be one of processes",
    "": "must be one of processes",
    "foo": "'foo' is no executor; use one of processes(N), dask",
    "processes(0)": "processes(N) must have a whole number N at least 1, or none, got '0'",
    "mpi(x)": "mpi(N) must have a whole number N at least 1, or none, got 'x'",
}


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_executor(text: str) -> None:
    with pytest.raises(ValueError, match="--executor") as error:
        parse_study(["a.toml", "--executor", text])
    assert WRONG[text] in str(error.value)


def test_a_shard_is_every_nth_cell() -> None:
    assert parse_study(["a.toml", "--shard", "2/3"]).shard == (2, 3)
    for text in ("0/3", "4/3", "2", "2/0"):
        with pytest.raises(ValueError, match="--shard: must be I/N with 1 <= I <= N"):
            parse_study(["a.toml", "--shard", text])
    with pytest.raises(ValueError, match="--merge is for a new folder, not for --shard"):
        parse_study(["a.toml", "--shard", "1/2", "--merge", "."])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of four cells that has run in one process; the file lies beside its folder."""
    folder = tmp_path_factory.mktemp("whole")
    emds = ", ".join(f"{0.1 * i:.1f}" for i in range(1, 5))
    (folder / "s.toml").write_text(STUDY.format(rounds=60, emds=emds))
    assert study.main([str(folder / "s.toml"), "--devices", "1", "--out", str(folder / "out")]) == 0
    return folder / "out"


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts Python modules, which end with the test."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(*argv: str, where: Path | None = None) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", *argv],
            cwd=where,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        begun.append(process)
        return process

    yield start
    for process in begun:
        process.kill()
        process.wait()


def wait_for(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_killed_dask_workers_change_nothing(
    whole: Path, tmp_path: Path, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    file = tmp_path / "scheduler.json"
    start("dask", "scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", str(file))
    wait_for(file.exists)
    common = ("--nthreads", "1", "--no-nanny", "--no-dashboard", "--scheduler-file", str(file))
    workers = [start("dask", "worker", *common) for _ in range(3)]
    out = tmp_path / "out"
    address = json.loads(file.read_text())["address"]
    argv = ["--devices", "1", "--out", "out", "--executor", f"dask({address})"]
    running = start("fedjax_sim.study", str(whole.parent / "s.toml"), *argv, where=tmp_path)
    for worker in workers[:2]:
        wait_for(lambda: len([*out.glob("cells/*/metrics.jsonl")]) >= 2)
        worker.send_signal(signal.SIGKILL)
    assert running.wait(LIMIT) == 0
    for name in ("results.csv", "table.md", "study.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    for cell in read_study(out / "study.toml").cells:
        ours, theirs = (f / "cells" / cell.name / "metrics.jsonl" for f in (out, whole))
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.slow
def test_shards_are_merged(whole: Path, tmp_path: Path) -> None:
    """One of them lacks a cell, which runs then."""
    file, shards = str(whole.parent / "s.toml"), [str(tmp_path / name) for name in "ab"]
    for i, shard in enumerate(shards, 1):
        argv = [file, "--devices", "1", "--out", shard, "--shard", f"{i}/2"]
        assert study.main(argv) == 0
        assert not (Path(shard) / "results.csv").exists()
    (lacking, *_) = sorted((Path(shards[0]) / "cells").iterdir())
    lacking.rename(tmp_path / "moved")
    out = tmp_path / "out"
    argv = ["--merge", *shards, "--devices", "1", "--out", str(out)]
    assert study.main([*argv, "--executor", "processes(2)"]) == 0
    assert (out / "results.csv").read_bytes() == (whole / "results.csv").read_bytes()
    for cell in (out / "cells").iterdir():
        theirs = whole / "cells" / cell.name / "metrics.jsonl"
        assert (cell / "metrics.jsonl").read_bytes() == theirs.read_bytes()
