"""A grid of the command: settings that differ in numbers alone are runs of the same programs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

import fedjax_sim as fs
from fedjax_sim import bench
from fedjax_sim.cli import running
from fedjax_sim.cli.build import build
from fedjax_sim.cli.parser import parse
from fedjax_sim.engine.memory import TooLargeError

FLAGS = "--rounds 2 --clients 12 --seeds 2 --model logistic --emd 0.9 --split clients --folds 3"
TINY = [*FLAGS.split(), "--devices", "1"]
GRID = ("fedprox(mu=0.1|3, lr=0.05|0.1)", "fedavg(lr=0.1)")
LABELS = tuple(f"fedprox(mu={mu}, lr={lr})" for mu in ("0.1", "3") for lr in ("0.05", "0.1"))

pytestmark = pytest.mark.usefixtures("bare_commands")


def run(out: Path, *argv: str, status: int = 0) -> fs.cli.loading.SavedRun:
    assert bench.main([*argv, "--out", str(out)]) == status
    return fs.load_run(out)


def rows(found: Any, label: str) -> list[dict[str, Any]]:
    return [record for record in found.records if record["algorithm"] == label]


def assert_close(ours: Any, theirs: Any) -> None:
    """Several runs of one program round otherwise than one."""
    chex.assert_trees_all_equal_structs(ours, theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        if isinstance(a, str):
            assert a == b
        else:
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Any:
    out = tmp_path_factory.mktemp("grid") / "run"
    return run(out, *TINY, "--algo", GRID[0], "--compare", GRID[1])


@pytest.mark.slow
def test_settings_are_runs_of_one_program(together: Any, tmp_path: Path) -> None:
    """Each is what it is alone: records, weights and the summary's scores."""
    assert together.settings["programs"] == [[*LABELS], [GRID[1]]]
    label = LABELS[2]
    alone = run(tmp_path / "run", *TINY, "--algo", label, "--compare", "none")
    assert_close(rows(together, label), rows(alone, label))
    assert_close(*(found.variables(label) for found in (together, alone)))
    for key in ("score_validated_per_run", "validation_best_per_run", "bytes_up", "rounds"):
        assert together.summary[label][key] == alone.summary[label][key]
    assert {together.summary[one]["settings_in_program"] for one in LABELS} == {4}


@pytest.mark.slow
def test_the_best_validation_score_of_each_run_is_told(together: Any) -> None:
    for label in LABELS:
        scores: dict[tuple[int, int], list[float]] = {}
        for row in rows(together, label):
            of_run = scores.setdefault((row["seed"], row["fold"]), [])
            of_run.append(row["validation"]["client_accuracy"]["mean"])
        told = together.summary[label]["validation_best_per_run"]
        np.testing.assert_allclose(told, [max(s) for s in scores.values()], rtol=1e-12)


@pytest.mark.parametrize(
    ("algo", "flags", "found"),
    [
        ("fedavg(lr=0.1|0.2, epochs=1|2)", "", [[0, 2], [1, 3]]),  # other numbers of steps
        ("fedavg(lr=0.1|0.2)", "--budget-mb 1", [[0], [1]]),  # each has its own end
        ("fedavg(lr=0.1|0.2)", "--target 0.9", [[0, 1]]),
        ("fedavg(momentum=0.1|0.2)", "", [[0], [1]]),  # 0 is another optimiser
        ("fedavg(optimizer=sgd|nesterov, lr=0.1|0.2)", "", [[0, 1], [2, 3]]),
        ("radfed(redistribution_rounds=1|2, lr=0.1|0.2)", "", [[0, 1], [2, 3]]),
    ],
)
def test_what_is_one_program(algo: str, flags: str, found: list[list[int]]) -> None:
    config = parse([*TINY, *flags.split(), "--algo", algo, "--compare", "none"])
    labels = [[config.algorithms[i] for i in group] for group in found]
    assert build(config).programs == labels


def test_methods_with_other_settings_of_their_own_are_other_programs() -> None:
    several = ["fedprox(lr=0.1)", "fedprox(mu=0.1)", "fedavg(lr=0.1)", "fedprox(lr=0.2)"]
    config = parse([*TINY, "--algo", several[0], "--compare", *several[1:]])
    found = [[several[0], several[3]], [several[1]], [several[2]]]
    assert build(config).programs == found


@pytest.mark.slow
def test_a_setting_that_diverges_takes_no_other_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost, kept = "fedavg(lr=1e+38)", "fedavg(lr=0.1)"
    algo = "fedavg(lr=1e+38|0.1)"
    found = run(tmp_path / "run", *TINY, "--algo", algo, "--compare", "none", status=1)
    assert "the loss became" in found.summary[lost]["diverged"]
    assert found.summary[kept]["score_last_per_run"]
    assert not rows(found, lost)
    assert len(rows(found, kept)) == 2 * 6
    assert f"{lost}: " in capsys.readouterr().err


@pytest.mark.slow
def test_settings_that_do_not_fit_together_run_one_by_one(
    together: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **how: Any) -> None:
        raise TooLargeError("the run needs more")

    monkeypatch.setattr(running, "run_candidates", refuse)
    two = "fedprox(mu=0.1|3, lr=0.1)"
    found = run(tmp_path / "run", *TINY, "--algo", two, "--compare", "none")
    for label in (LABELS[1], LABELS[3]):
        assert_close(rows(found, label), rows(together, label))
        assert_close(*(one.variables(label) for one in (found, together)))


@pytest.mark.slow
def test_a_grid_goes_on_where_it_was_killed(together: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = [*TINY, "--algo", GRID[0], "--compare", GRID[1], "--checkpoint-every", "0"]
    killer = (
        "import os, sys\n"
        "from fedjax_sim import bench\n"
        "from fedjax_sim.cli import running\n"
        "from fedjax_sim.cli.folder import RunFolder\n"
        "from fedjax_sim.run.programs import Programs\n"
        "running.draw_clients = Programs.check = lambda *args: None\n"
        "log = RunFolder.log\n"
        "def dies(self, name, evaluation, *rest):\n"
        f"    log(self, name, evaluation, *rest)\n"
        f"    if name == {LABELS[-1]!r} and evaluation.round == 2: os.kill(os.getpid(), 9)\n"
        "RunFolder.log = dies\n"
        "bench.main(sys.argv[1:])\n"
    )
    command = [sys.executable, "-c", killer, *flags, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == -9, done.stderr
    assert "fedavg(lr=0.1)" not in fs.load_run(out).summary
    assert bench.main(["--resume", str(out)]) == 0
    found = fs.load_run(out)
    assert json.dumps(found.records) == json.dumps(together.records)
    assert jax.tree.all(
        jax.tree.map(np.array_equal, found.variables(LABELS[1]), together.variables(LABELS[1]))
    )
