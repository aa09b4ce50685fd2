"""Folders of runs and studies: one process at a time, full disks, commands started again."""

from __future__ import annotations

import errno
import io
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedjax_sim as fs
from fedjax_sim import bench, study
from fedjax_sim.base.files import append, writing
from fedjax_sim.cli import folder, partitioning, running
from fedjax_sim.cli.claims import Claim, claim_begun, claim_new, make_folder
from fedjax_sim.cli.folder import RunFolder
from fedjax_sim.cli.parser import parse
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.identity import random_settings

RUN = Experiment.run

TINY = ["--clients", "8", "--seeds", "1", "--model", "logistic", "--emd", "0.9", "--rounds", "3"]
TINY += ["--algo", "fedavg", "--compare", "none", "--devices", "1", "--checkpoint-every", "0"]


def bench_main(out: Path, *more: str) -> int:
    return bench.main([*TINY, "--out", str(out), *more])


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("done") / "run"
    assert bench_main(out) == 0
    return out


def complaints(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines on stderr but for those of the progress."""
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if not line.startswith(("fedavg", "fedprox"))]


def last_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The last complaint; the others are warnings."""
    *warnings, last = complaints(capsys)
    assert all(": warning: " in line for line in warnings), warnings
    return last


# One process at a time.


def test_a_folder_is_claimed_once(tmp_path: Path) -> None:
    first = RunFolder(tmp_path / "run", {"of": "the first"})
    with pytest.raises(ValueError, match="run is not empty"):
        claim_new(tmp_path / "run")
    with pytest.raises(ValueError, match="run is in use by another process"):
        claim_begun(tmp_path / "run")
    assert json.loads((first.path / "config.json").read_text()) == {"of": "the first"}
    first.close()
    assert not first.path.exists()


def test_the_claim_of_a_dead_process_is_none(tmp_path: Path) -> None:
    code = "import os, sys; from pathlib import Path; from fedjax_sim.cli.claims import *; "
    code += "c = Claim(Path(sys.argv[1])); print(end='claimed', flush=True); input()"
    argv = [sys.executable, "-c", code, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(argv, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.read(7) == b"claimed"
        with pytest.raises(ValueError, match="in use by another process"):
            claim_new(tmp_path)
        process.kill()
    (tmp_path / ".config.json.1.aside").write_text("half")
    claim_new(tmp_path).release()
    assert not [*tmp_path.iterdir()]


def test_a_default_name_that_is_taken_gets_a_suffix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda form: "now")
    made = [claim_new(Path("runs/digits-now"), named=False) for _ in range(3)]
    names = ["digits-now", "digits-now-2", "digits-now-3"]
    assert [claim.path.name for claim in made] == names
    for claim in made:
        claim.release(remove=True)
    assert not [*Path("runs").iterdir()]
    taken = make_folder(Path("runs/digits-iid-now"))
    argv = ["--sampler", "iid", "--clients", "5"]
    assert partitioning.command(argv) == 0
    assert [p.name for p in Path("runs/digits-iid-now-2").glob("*.npz")] == ["seed0.npz"]
    assert not [*taken.iterdir()]


def test_a_study_that_goes_on_deletes_nothing_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    mine = out / "cells" / "all" / "checkpoints" / "mine.npz"
    mine.parent.mkdir(parents=True)
    mine.write_text("weights")
    (out / "study.toml").write_text('methods = ["fedavg"]\n')
    assert study.main(["--resume", str(out)]) == 2
    told = capsys.readouterr().err
    assert "cells/all has files, but no config.json: move it away" in told
    assert told.count("\n") == 1
    assert mine.read_text() == "weights"


def test_a_study_runs_once_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ours.toml"
    file.write_text('methods = ["fedavg"]\n')
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "study.toml").write_text(file.read_text())
    other = Claim(tmp_path / "out")
    for argv in (["--resume"], [str(file), "--or-resume", "--out"]):
        assert study.main([*argv, str(tmp_path / "out")]) == 2
        assert "out is in use by another process\n" in capsys.readouterr().err
    other.release()


# The disk.


class Full(io.FileIO):
    """A file on a disk of so many bytes for all files of a folder."""

    folder, size = Path(), 0

    def write(self, content: Any) -> int:
        used = sum(p.stat().st_size for p in self.folder.rglob("*") if p.is_file())
        room = max(0, self.size - used)
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(memoryview(content)[:room])


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Full]:
    """All that the package writes below ``tmp_path`` is on a disk of ``size`` bytes."""
    opened = Path.open

    def full(path: Path, mode: str = "r", buffering: int = -1, **more: Any) -> Any:
        if mode not in ("wb", "xb") or not path.is_relative_to(tmp_path):
            return opened(path, mode, buffering, **more)
        raw = Full(path, mode)
        return raw if buffering == 0 else io.BufferedWriter(raw)

    monkeypatch.setattr(Path, "open", full)
    monkeypatch.setattr(Full, "folder", tmp_path)
    monkeypatch.setattr(Full, "size", 0)
    return Full


SIZES = [8_000, 40_000, 150_000, 400_000]


@pytest.mark.parametrize(
    "size",
    [s if i < 2 else pytest.param(s, marks=pytest.mark.slow) for i, s in enumerate(SIZES)],
)
def test_a_full_disk_is_one_line_and_the_run_goes_on_to_the_bit(
    size: int, done: Path, disk: type[Full], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk.size = size
    out = tmp_path / "run"
    status = bench_main(out)
    assert status in (0, 2)
    if status == 2:
        last = last_line(capsys)
        assert last.startswith("fedjax_sim.bench: error: ")
        assert "No space left on device" in last
        assert out.exists() == (f"--resume {out}" in last)
    assert not [*tmp_path.rglob("*.aside")]
    assert not [*tmp_path.rglob(".lock")]
    disk.size = 10**9
    assert bench_main(out, "--or-resume") == 0
    assert not [*tmp_path.rglob(".*")]
    for name in ("metrics.jsonl", "clients.jsonl"):
        assert (out / name).read_bytes() == (done / name).read_bytes()


def test_a_picture_that_fails_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*args: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(folder, "draw_curves", fails)
    monkeypatch.setattr(running, "draw_clients", lambda *args: None)
    assert bench_main(tmp_path / "run", "--rounds", "1") == 0
    (told,) = complaints(capsys)
    assert told.startswith(f"fedjax_sim: warning: {tmp_path}/run/curves.png was not drawn: OSError")


def test_a_line_is_appended_whole_or_not_at_all(disk: type[Full], tmp_path: Path) -> None:
    disk.size = 10
    with (tmp_path / "lines").open("xb", buffering=0) as file:
        append(file, b"line 1\n")
        with pytest.raises(OSError, match=r"No space left on device: .*lines"):
            append(file, b"line 2\n")
    assert (tmp_path / "lines").read_bytes() == b"line 1\n"


def written(path: Path) -> None:
    with writing(path) as file:
        file.write(bytes(100))


def weighed(path: Path) -> None:
    fs.models.save_weights(path, fs.Variables({"w": np.zeros(9)}, {}))


@pytest.mark.parametrize("write", [written, weighed])
def test_what_is_not_written_names_its_file_and_leaves_the_old_one(
    write: Callable[[Path], None], disk: type[Full], tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("whole")
    disk.size = 50
    with pytest.raises(OSError, match=r"No space left on device: '.*/a'"):
        write(tmp_path / "a")
    assert [p.read_text() for p in tmp_path.iterdir()] == ["whole"]


# Commands that are started again.


def test_a_command_goes_on_or_says_that_it_is_done(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, before = shutil.copytree(done, tmp_path / "run"), capsys.readouterr()
    monkeypatch.setattr(running, "draw_clients", lambda *args: None)
    assert bench_main(run, "--or-resume") == 0
    assert capsys.readouterr() == (f"done before: {run}\n", "")
    assert bench_main(run, "--or-resume", "--lr", "0.3") == 2
    assert "--lr is 0.3, and 0.02 in the run in" in capsys.readouterr().err
    assert bench_main(run, "--or-resume", "--rounds", "5") == 0
    first, again = ((f / "metrics.jsonl").read_text() for f in (done, run))
    assert again.startswith(first)
    assert again.count("\n") == 5
    arguments = json.loads((run / "config.json").read_text())["arguments"]
    assert arguments[-2:] == ["--rounds", "5"]
    assert before.err == ""


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--or-resume"], "--or-resume is for --out, which names the folder of the run"),
        (["--out", "x", "--or-resume", "--no-checkpoints"], "--no-checkpoints is for a new run"),
        (["--out", ""], "--out: must name a folder, got ''"),
        (["--resume", ""], "--resume: must name a folder, got ''"),
    ],
)
def test_folders_that_cannot_be_meant(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(argv) == 2
    assert message in capsys.readouterr().err


def test_a_study_begins_or_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, asked = tmp_path / "ours.toml", []
    file.write_text('methods = ["fedavg"]\n[run]\nrounds = 1\n')

    def run(argv: list[str]) -> int:
        asked.append(argv[-3:])
        return 2

    monkeypatch.setattr("fedjax_sim.bench.main", run)
    for _ in range(2):
        assert study.main([str(file), "--out", str(tmp_path / "out"), "--or-resume"]) == 2
    cell = str(tmp_path / "out" / "cells" / "all")
    assert asked == [["--out", cell, "--or-resume"]] * 2
    assert study.main([str(file), "--or-resume"]) == 2
    assert "--or-resume is for --out" in capsys.readouterr().err


def test_other_random_numbers_are_another_run(
    done: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(done, tmp_path / "run")
    settings = json.loads((run / "config.json").read_text())
    assert settings["jax"] == random_settings()
    settings["jax"]["jax_threefry_partitionable"] ^= True
    (run / "config.json").write_text(json.dumps(settings))
    assert bench.main(["--resume", str(run)]) == 2
    assert "jax_threefry_partitionable is True, and False in the run" in capsys.readouterr().err


def test_where_a_run_goes_on_is_not_what_it_was_begun_with(done: Path, tmp_path: Path) -> None:
    run = shutil.copytree(done, tmp_path / "run")
    settings = json.loads((run / "config.json").read_text())
    settings["arguments"] += ["--distributed=localhost:1,2,0", "--or-resume"]
    (run / "config.json").write_text(json.dumps(settings))
    assert parse(["--resume", str(run)]).machine.distributed is None
    now = ["--resume", str(run), "--distributed", "localhost:2,3,1"]
    assert parse(now).machine.distributed == ("localhost:2", 3, 1)
