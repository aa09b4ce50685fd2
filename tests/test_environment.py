"""How records of results are made: what the package and the benchmarks write of it."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import jax
import pytest

from benchmarks.script import write_record
from fedjax_sim.cli.schema import RUN, check_summary
from fedjax_sim.run import environment


def commit_of(file: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str | None, bool | None]:
    monkeypatch.setattr(environment, "__file__", str(file))
    return environment.commit.__wrapped__()


def test_the_commit_is_that_of_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> str:
        names = ("-c", "user.name=A", "-c", "user.email=a@b")
        done = subprocess.run(
            ["git", "-C", str(tmp_path), *names, *words], check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    package = tmp_path / "package"
    package.mkdir()
    ours = package / "environment.py"
    ours.write_text("a = 1\n")
    assert commit_of(ours, monkeypatch) == (None, None)  # no repository
    git("init")
    (tmp_path / "other.py").write_text("")
    git("add", "other.py")
    git("commit", "-m", "one")
    assert commit_of(ours, monkeypatch) == (None, None)  # another's, in which it is installed
    git("add", ".")
    git("commit", "-m", "two")
    head = git("rev-parse", "HEAD")
    (tmp_path / "result.json").write_text("{}")
    assert commit_of(ours, monkeypatch) == (head, False)
    (tmp_path / "study.toml").write_text("")
    assert commit_of(ours, monkeypatch) == (head, True)
    (tmp_path / "study.toml").unlink()
    ours.write_text("a = 2\n")
    assert commit_of(ours, monkeypatch) == (head, True)


def test_records_of_benchmarks_say_what_run_folders_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false")
    path = tmp_path / "results" / "ours.json"
    write_record(path, time.time() - 60, table=[{"loss": float("inf")}])
    record = json.loads(path.read_text())
    assert record.keys() == (RUN.keys() - {"devices"}) | {"seconds", "table"}
    assert record["seconds"] == pytest.approx(60, abs=1)
    assert record["jax"]["jax_enable_x64"] == jax.config.read("jax_enable_x64")
    assert record["xla_flags"] == "--xla_cpu_enable_fast_math=false"
    assert record["versions"]["jax"] == jax.__version__
    made = environment.environment("python -m ours", started=0)
    assert (made["date"], made["command"]) == ("1970-01-01T00:00:00+00:00", "python -m ours")
    check_summary(path, made)
    with pytest.raises(ValueError, match="damaged: dirty cannot be 'maybe'"):
        check_summary(path, made | {"dirty": "maybe"})
