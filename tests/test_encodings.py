"""Commands print whatever the encoding of their output, and files are UTF-8."""

from __future__ import annotations

import ast
import io
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedjax_sim import bench, study
from fedjax_sim.cli import commands, partitioning
from fedjax_sim.cli.reporting import command as report

ROOT = Path(__file__).parents[1]
PRIVATE = (
    "--algo dp_fedavg --compare fedavg --clients 8 --emd 0.9 --rounds 1 --epochs 1 "
    "--model logistic --devices 1 --seeds 2 --out run"
)
STUDY = 'methods = ["dp_fedavg"]\n[run]\nclients = 8\nemd = 0.9\nrounds = 1\n'


def printed(
    main: Callable[[], int], encoding: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    """The exit status of a command, and what it prints to streams of that encoding."""
    out = io.TextIOWrapper(io.BytesIO(), encoding, write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), encoding, errors="backslashreplace", write_through=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        patch.setattr(commands, "listen", lambda: None)  # pytest keeps its own signals
        with pytest.raises(SystemExit) as end:
            commands.enter(main)
    for stream in (out, err):
        stream.seek(0)
    return int(end.value.code or 0), out.read() + err.read()


@pytest.mark.parametrize(
    ("main", "argv"),
    [
        (bench.main, "--help"),
        (bench.main, "--list"),
        (bench.main, f"{PRIVATE} --dry-run"),
        (bench.main, "--algo ε"),
        (partitioning.command, "--help"),
        (study.main, "--help"),
        (study.main, "ours.toml --dry-run --out study"),
        (report.main, "--help"),
    ],
)
def test_every_command_prints_in_every_encoding(
    main: Callable[[list[str]], int], argv: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ours.toml").write_text(STUDY, encoding="utf-8")
    status, text = printed(lambda: main(argv.split()), "ascii", monkeypatch)
    assert status == (2 if "ε" in argv else 0), text


@pytest.mark.usefixtures("bare_command")
def test_a_run_and_its_report_print_in_ascii(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, text = printed(lambda: bench.main(PRIVATE.split()), "ascii", monkeypatch)
    assert status == 0, text
    assert r"a run is (\u03b5, \u03b4)-private" in text
    assert printed(lambda: report.main(["run"]), "ascii", monkeypatch)[0] == 0
    assert "±" in Path("run/report/report.md").read_text(encoding="utf-8")


def test_every_text_file_is_utf_8() -> None:
    """Each call that opens a file is binary or names its encoding: the default is the system's."""
    opens = re.compile(r"(^|\.)open$|\.(read|write)_text$")
    safe = re.compile(r"^(os|archive|Image|tarfile)\.open\(|utf-8|encoding=encoding|'[rwxa]b'")
    unnamed = [
        f"{path.relative_to(ROOT)}: {ast.unparse(call)}"
        for folder in ("fedjax_sim", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and opens.search(ast.unparse(call.func))
        and not safe.search(ast.unparse(call))
    ]
    assert unnamed == []
