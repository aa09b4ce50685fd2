"""Several processes compute what one does, and none is left waiting for another."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from several import trained

from fedjax_sim import bench
from fedjax_sim.cli.processes import _digest

METHODS = ("phase_shift", "ditto", "fedadam")
"""The command below runs radfed; of the others tests/test_methods.py asks that no sum is left to
the processes' order."""
TINY = ["--rounds", "2", "--clients", "8", "--seeds", "2", "--model", "logistic", "--emd", "0.9"]
TINY += ["--no-cache", "--compare", "none", "--algo", "fedavg"]
RADFED = ["--algo", "radfed", "--redistribution-rounds", "2"]
LIMIT = 400.0


class Ended(NamedTuple):
    """What a process left."""

    status: int
    out: str
    err: str


class Started:
    """A process whose output lies in files, so that it never waits for a reader."""

    def __init__(self, argv: Sequence[str], place: Path) -> None:
        self._out, self._err = place.with_suffix(".out"), place.with_suffix(".err")
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen([sys.executable, *argv], stdout=out, stderr=err)

    def ended(self, seconds: float = LIMIT) -> Ended:
        """Waits for it; it is killed if it takes longer."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"still there after {seconds} s: {self._err.read_text()}")
        return Ended(status, self._out.read_text(), self._err.read_text())


Start = Callable[[Sequence[str]], Started]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Started] = []

    def begin(argv: Sequence[str]) -> Started:
        started.append(Started(argv, tmp_path / f"process{len(started)}"))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.wait()


@pytest.fixture
def address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"localhost:{free.getsockname()[1]}"


def command(place: str, out: Path, *more: str) -> list[str]:
    told = ["--devices", "2", "--distributed", place, "--out", str(out)]
    return ["-m", "fedjax_sim.bench", *TINY, *told, *more]


@pytest.mark.parametrize(
    "given",
    ["a:b", "localhost:1234", "localhost:1234,2", "localhost,2,0", "localhost:1234,2,2",
     "localhost:1234,0,0", "localhost:1234,-1,0", "localhost:0,2,0", "localhost:65536,2,0", ""],
)  # fmt: skip
def test_wrong_forms_are_refused_in_one_line(
    given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["--distributed", given]) == 2
    assert capsys.readouterr().err == (
        "fedjax_sim.bench: error: --distributed: must be auto or HOST:PORT,PROCESSES,INDEX with an "
        f"index from 0 below the number of processes, as in localhost:1234,2,0, got {given!r}\n"
    )


def test_fingerprint_tells_flags_and_samples_apart() -> None:
    x = np.arange(6, dtype=np.float32)
    same = _digest(["flags", {"x": x}])
    np.testing.assert_array_equal(same, _digest(["flags", {"x": jax.numpy.asarray(x)}]))
    for other in (["flag", {"x": x}], ["flags", {"x": x[::-1]}], ["flags", {"x": x[:5]}]):
        assert not np.array_equal(same, _digest(other))
    assert same.any()  # zeros say that a process failed


def test_one_that_is_stopped_or_left_alone_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    statuses = [0, 1, 2, 3, 130, 143]
    assert [bench.leave(status) for status in statuses] == statuses
    assert ended == [3, 130, 143]


@pytest.mark.slow
def test_auto_without_a_cluster_is_refused_in_one_line(start: Start, tmp_path: Path) -> None:
    ended = start(command("auto", tmp_path / "run")).ended()
    assert (ended.status, ended.out) == (2, "")
    assert re.fullmatch(r"fedjax_sim.bench: error: --distributed: .*; auto is for .*\n", ended.err)


@pytest.mark.slow
def test_weights_states_and_scores_are_those_of_one_process(
    start: Start, address: str, tmp_path: Path
) -> None:
    files = [tmp_path / f"{i}.npz" for i in range(2)]
    script = str(Path(__file__).with_name("several.py"))
    both = [start([script, f"{address},2,{i}", str(out), *METHODS]) for i, out in enumerate(files)]
    with jax.default_device(None):  # all four
        expected = {m: trained(m) for m in METHODS}
    for one, out in zip(both, files, strict=True):
        ended = one.ended()
        assert ended.status == 0, ended.err
        found = np.load(out)
        for method, leaves in expected.items():
            theirs = [found[name] for name in sorted(found) if name.startswith(f"{method}-")]
            assert len(theirs) == len(leaves) > 10
            for a, b in zip(theirs, leaves, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_command_writes_the_records_of_one_process_and_only_once(
    start: Start, address: str, tmp_path: Path
) -> None:
    outs = [tmp_path / f"run{i}" for i in range(2)]
    both = [start(command(f"{address},2,{i}", out, *RADFED)) for i, out in enumerate(outs)]
    assert bench.main([*TINY, *RADFED, "--devices", "4", "--out", str(tmp_path / "one")]) == 0
    first, second = (one.ended() for one in both)
    assert first.status == 0
    assert all(line.startswith("radfed: ") for line in first.err.splitlines())  # how far it is
    assert second == (0, "", "")
    assert "4 x cpu" in first.out
    assert not outs[1].exists()
    assert {p.name for p in outs[0].iterdir()} == {p.name for p in (tmp_path / "one").iterdir()}
    theirs, ours = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (outs[0], tmp_path / "one")
    )
    assert theirs == ours
    settings = [
        json.loads((folder / "config.json").read_text()) for folder in (outs[0], tmp_path / "one")
    ]
    for each in settings:
        assert any(str(tmp_path) in word for word in each.pop("arguments"))
    assert settings[0] | {"devices": 4} == settings[1]


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_a_run_of_one_process_goes_on_in_several_and_the_other_way_round(
    start: Start, address: str, tmp_path: Path
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    more = [*RADFED, "--checkpoint-every", "0", "--or-resume"]

    def one(out: Path, rounds: int) -> None:
        told = ["--devices", "4", "--rounds", str(rounds), "--out", str(out)]
        assert bench.main([*TINY, *more, *told]) == 0

    one(run, 1)
    told = [*more, "--rounds", "2"]
    both = [start(command(f"{address},2,{i}", run, *told)) for i in range(2)]
    for ended in (process.ended() for process in both):
        lines = [e for e in ended.err.splitlines() if not e.startswith("radfed: ")]
        assert (ended.status, lines) == (0, [])
    assert bench.main(["--resume", str(run), "--devices", "4", "--rounds", "4"]) == 0
    one(whole, 4)
    ours, theirs = ((folder / "metrics.jsonl").read_bytes() for folder in (run, whole))
    assert ours == theirs


@pytest.mark.slow
def test_other_flags_than_process_0_are_refused(start: Start, address: str, tmp_path: Path) -> None:
    both = [start(command(f"{address},2,{i}", tmp_path / "run", "--lr", f"0.{i + 1}"))
            for i in range(2)]  # fmt: skip
    told = (
        "fedjax_sim.bench: error: --distributed: all processes must have the same flags, versions, "
        "data and checkpoints, process 1 has others than process 0\n"
    )
    assert [(e.status, e.err) for e in (one.ended() for one in both)] == [(2, told)] * 2
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_one_that_fails_takes_the_others_along(start: Start, address: str, tmp_path: Path) -> None:
    (tmp_path / "something").touch()
    both = [start(command(f"{address},2,{i}", tmp_path)) for i in range(2)]
    first, second = (one.ended() for one in both)
    told = f"fedjax_sim.bench: error: --out {tmp_path} is not empty; name a new folder\n"
    assert (first.status, first.err) == (2, told)
    told = "fedjax_sim.bench: error: --distributed: process 0 failed; see its error\n"
    assert (second.status, second.err) == (2, told)


def endless(start: Start, address: str, out: Path) -> list[Started]:
    """Two processes of a run that never ends, once they have recorded a round."""
    both = [start(command(f"{address},2,{i}", out, "--rounds", "1000000")) for i in range(2)]
    deadline = time.monotonic() + LIMIT
    records = out / "metrics.jsonl"
    while not (records.exists() and records.stat().st_size):
        assert time.monotonic() < deadline, "no round was recorded"
        time.sleep(0.2)
    return both


@pytest.mark.slow
def test_death_of_one_ends_the_other_within_a_minute(
    start: Start, address: str, tmp_path: Path
) -> None:
    both = endless(start, address, tmp_path / "run")
    both[0].process.send_signal(signal.SIGKILL)
    assert both[0].ended(20).status == -signal.SIGKILL
    ended = both[1].ended(60)
    # Whether we or JAX's service notice it first is a race.
    assert ended.status in (bench.LOST, -signal.SIGABRT)
    assert re.search("error: lost another process: |another task died", ended.err)
    for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


@pytest.mark.slow
def test_a_signal_for_one_stops_them_all(start: Start, address: str, tmp_path: Path) -> None:
    both = endless(start, address, tmp_path / "run")
    both[1].process.send_signal(signal.SIGTERM)
    first, second = (one.ended(60) for one in both)
    assert (first.status, second.status) == (143, 143)
    assert "continue with: python -m fedjax_sim.bench --resume" in first.err
