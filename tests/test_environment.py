"""How records of results are made: what the package and the benchmarks write of it."""

from __future__ import annotations

import json
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from benchmarks.script import write_record
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
    assert record.keys() == environment.environment("").keys() | {"seconds", "table"}
    assert record["seconds"] == pytest.approx(60, abs=1)
    assert record["jax"]["jax_enable_x64"] == jax.config.read("jax_enable_x64")
    assert record["xla_flags"] == "--xla_cpu_enable_fast_math=false"
    assert record["versions"]["jax"] == jax.__version__
    made = environment.environment("python -m ours", started=0)
    assert (made["date"], made["command"]) == ("1970-01-01T00:00:00+00:00", "python -m ours")


RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(RESULTS.glob("*.md"))}
UNNAMED = re.compile(r"Made on (.+?); the records? names? no commit\.")
"""The line of pages whose records are older than the commit in records, with their dates."""


def names(page: str, file: Path) -> bool:
    """Returns whether a page names a file or its folder."""
    top = file.relative_to(RESULTS).parts[0] + ("/" if file.parent != RESULTS else "")
    return re.search(rf"(?<![\w/]){re.escape(top)}", PAGES[page]) is not None


def records_of(file: Path) -> list[dict[str, Any]]:
    text = file.read_text(encoding="utf-8")
    return [*map(json.loads, text.splitlines() if file.suffix == ".jsonl" else [text])]


FILES = sorted(f for f in RESULTS.rglob("*.json*") if not f.name.endswith("config.json"))


@pytest.mark.parametrize("page", PAGES)
def test_a_page_of_results_names_the_commits_of_its_records(page: str) -> None:
    """Or says that there is none, which records since 28 November 2026 have."""
    unnamed = UNNAMED.search(PAGES[page])
    old = []
    for record in (r for file in FILES if names(page, file) for r in records_of(file)):
        if record.get("commit") is None:
            old.append(record.get("date", "")[:10])
        else:
            assert record["commit"][:7] in PAGES[page]
            assert record.keys() >= {"command", "versions", "xla_flags", "date", "machine"}
    assert max(old, default="") < "2026-11-28"
    assert all(unnamed and date in unnamed[1] for date in old)
    assert unnamed or re.search(r"\b(?=[a-f]*\d)[0-9a-f]{7}\b", PAGES[page])


def test_every_record_has_one_page() -> None:
    assert FILES
    for file in FILES:
        assert sum(names(page, file) for page in PAGES) == 1, file
