"""Named methods made of stand-ins, as the catalogue and the fingerprints make them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fedjax_sim as fs
from fedjax_sim.cli.making import make, stand_in

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", sorted(fs.ALGORITHMS.own))
def test_every_method_is_made_by_its_name(name: str) -> None:
    algorithm = make(name)
    assert isinstance(algorithm, fs.Algorithm)
    assert repr(algorithm).startswith(f"{name}(")


def test_what_the_caller_gives_replaces_the_stand_in() -> None:
    model = fs.models.mlp((6,), 3, widths=(4,))
    common = stand_in(model, classes=3, clock=fs.clock.simulated(2, deadline=9))
    assert "deadline=9" in repr(make("fedcs", common))
    assert make("fedcs", common, clock=fs.clock.simulated(1, deadline=7)).parts.clock is not None
    assert make("fedasync", common).parts.clock is None  # it needs none


@pytest.mark.slow
def test_fingerprints_repeat_and_show_what_differs(tmp_path: Path) -> None:
    def run(*flags: str) -> tuple[int, str]:
        names = ["--methods", "fedavg", "--devices", "1"]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.fingerprints", *flags, *names],
            cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert run(str(first)) == (0, "fedavg on 1 ok\n")
    found = json.loads(first.read_text())
    found["fedavg on 1"]["server"] = "another"
    first.write_text(json.dumps(found))
    assert run(str(second), "--against", str(first)) == (1, "fedavg on 1 differs: server\n")
