"""What is said before a run, printed for scripts, and kept of it."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedjax_sim as fs
from fedjax_sim import bench
from fedjax_sim.cli.config import GROUPS
from fedjax_sim.run.environment import environment

FLAGS = "--clients 12 --seeds 2 --model logistic --emd 0.9 --split clients --folds 3 --rounds 6"
METHODS = ["--algo", "fedavg(lr=0.1|0.5)", "--compare", "radfed", "--evaluated", "server"]
TINY = [*FLAGS.split(), "--eval-every", "2", "--devices", "1", *METHODS]
LABELS = ("fedavg(lr=0.1)", "fedavg(lr=0.5)", "radfed")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("bare_commands")]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> fs.cli.loading.SavedRun:
    out = tmp_path_factory.mktemp("kept") / "run"
    assert bench.main([*TINY, "--keep-weights", "--out", str(out)]) == 0
    return fs.load_run(out)


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> fs.cli.loading.SavedRun:
    """A run with a clock, a target and a budget."""
    out = tmp_path_factory.mktemp("timed") / "run"
    argv = "--clients 6 --seeds 1 --rounds 3 --model logistic --algo fedprox --compare none"
    argv += " --clock simulated(1,watts=2) --target 0.99 --budget-mb 0.04 --devices 1"
    assert bench.main([*argv.split(), "--out", str(out)]) == 0
    return fs.load_run(out)


@functools.cache
def outputs(model: fs.Model) -> Callable[[fs.Variables, Any], Any]:
    return jax.jit(lambda weights, x: model.apply(weights, x, train=False)[0])


def right(run: Any, weights: fs.Variables) -> Any:
    """Whether each test sample is, by its place."""
    return np.argmax(outputs(run.model)(weights, run.test.x), axis=1) == run.test.y


def accuracy(run: Any, weights: fs.Variables, i: int) -> float:
    """Of run i on its test clients, pooled."""
    rows = np.asarray(run.test.index)[i]
    ends = np.asarray(run.test.start)[i]
    hits = right(run, jax.tree.map(lambda w: np.asarray(w)[i], weights))
    return float(np.mean(hits[rows[ends[0] : ends[-1]]]))


@pytest.mark.parametrize("label", LABELS)
def test_weights_of_each_evaluation_are_kept(kept: Any, label: str) -> None:
    rows = [row for row in kept.records if row["algorithm"] == label]
    for at in (2, 4, 6):
        weights = kept.variables(label, at=at)
        told = [row["accuracy"] for row in rows if row["round"] == at]
        found = [accuracy(kept, weights, i) for i in range(6)]
        np.testing.assert_allclose(found, told, atol=1e-6)
    last = kept.variables(label)
    assert jax.tree.all(jax.tree.map(np.array_equal, last, kept.variables(label, at=6)))


@pytest.mark.parametrize("label", LABELS)
def test_the_validated_weights_are_those_of_each_runs_best_round(kept: Any, label: str) -> None:
    weights = kept.variables(label, at="validated")
    rows = [row for row in kept.records if row["algorithm"] == label]
    for i in range(6):
        mine = rows[i::6]
        best = max(mine, key=lambda row: row["validation"]["client_accuracy"]["mean"])
        assert accuracy(kept, weights, i) == pytest.approx(best["accuracy"], abs=1e-6)


def test_what_was_not_kept(kept: Any, timed: Any) -> None:
    with pytest.raises(ValueError, match="at must be a round that was evaluated, one of 2, 4, 6"):
        kept.variables("radfed", at=3)
    with pytest.raises(ValueError, match="the weights of round 1 were not kept: --keep-weights"):
        timed.variables("fedprox", at=1)
    with pytest.raises(ValueError, match="is for a run with --validation or --split"):
        timed.variables("fedprox", at="validated")


def network(shape: tuple[int, ...], classes: int) -> fs.Model:
    return fs.models.mlp(shape, classes, widths=(5,))


OWN = ("fedper(lr=0.1)", "fedper(lr=0.5)")


@pytest.fixture(scope="module")
def owned(tmp_path_factory: pytest.TempPathFactory) -> fs.cli.loading.SavedRun:
    out = tmp_path_factory.mktemp("owned") / "run"
    flags = "--clients 6 --clients-per-round 3 --seeds 2 --rounds 3 --eval-every 2 --devices 1"
    flags += f" --model {__name__}:network"
    argv = [*flags.split(), "--algo", "fedper(lr=0.1|0.5)", "--compare", "fedavg"]
    assert bench.main([*argv, "--out", str(out)]) == 0
    return fs.load_run(out, trust=[__name__])


@pytest.mark.parametrize("label", OWN)
def test_the_clients_own_models_are_those_that_were_scored(owned: Any, label: str) -> None:
    models = jax.device_get(owned.personal(label))
    for i, row in enumerate(r for r in owned.clients if r["algorithm"] == label):
        ends, order = np.asarray(owned.test.start)[i], np.asarray(owned.test.index)[i]
        found = []
        for k in range(6):
            hits = right(owned, jax.tree.map(lambda w, i=i, k=k: w[i, k], models))
            found.append(np.mean(hits[order[ends[k] : ends[k + 1]]]))
        np.testing.assert_allclose(found, row["personal"]["client_accuracy"], atol=1e-6)
    first, second = (jax.tree.leaves(jax.tree.map(lambda w, k=k: w[0, k], models)) for k in (0, 1))
    assert not all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_methods_without_models_of_their_own(owned: Any) -> None:
    with pytest.raises(ValueError, match="fedavg has no models of the clients' own"):
        owned.personal("fedavg")
    with pytest.raises(ValueError, match="algorithm must be one of fedper"):
        owned.personal("fedper")


def test_a_dry_run_runs_nothing_and_tells_what_would(
    kept: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bench.main([*TINY, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert not [*tmp_path.iterdir()]
    assert "logistic of 650 weights" in out
    assert "6 runs on" in out
    rows = [line.split("  ") for line in out.splitlines() if line.startswith(LABELS)]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [row[:4] for row in cells] == [
        [LABELS[0], "1", "6", "4"],
        [LABELS[1], "1", "6", "4"],
        [LABELS[2], "2", "6", "4"],
    ]
    for row in cells:
        summary = kept.summary[row[0]]
        up = 2.6 * 6 * 4  # kB of a model, rounds, models
        if row[0] != "radfed":
            assert row[5] == "2.6"
            assert summary["bytes_up"] == pytest.approx(1e3 * up)


@pytest.mark.parametrize("given", ["--keep-weights", "--checkpoint-every 5"])
def test_settings_of_checkpoints_need_them(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*given.split(), "--no-checkpoints"]) == 2
    assert f"{given.split()[0]} is for runs with checkpoints" in capsys.readouterr().err


def keys_of(page: str, chapter: str) -> set[str]:
    """What stands in the first column of a chapter's table."""
    (text,) = re.findall(
        rf"^## {re.escape(chapter)}\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE
    )
    first = [line.split("|")[1] for line in text.splitlines() if line.startswith("|")]
    return {key for cell in first for key in re.findall(r"`(\w+)`", cell)}


def test_every_key_is_documented(kept: Any, timed: Any) -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "run_folder.md").read_text()
    flags = {field.name for group in GROUPS.values() for field in dataclasses.fields(group)}
    assert set(kept.settings) - flags - {"algo", "compare", "options"} <= keys_of(
        page, "config.json"
    )
    assert f"of format {kept.settings['format']} " in page
    told = keys_of(page, "metrics.jsonl, clients.jsonl")
    for row in (*kept.records, *kept.clients, *timed.records, *timed.clients):
        assert {re.sub("_uncollected$", "", key) for key in row} <= told | {"client_f1"}
    told = keys_of(page, "summary.json")
    assert environment("").keys() | {"devices"} <= told
    for summary in (kept.summary["radfed"], kept.summary[LABELS[0]], timed.summary["fedprox"]):
        scores = re.compile(r"(client_|personal_)?(accuracy|f1)_(last|best|mean|validated)(_std)?")
        assert {key for key in summary if not scores.fullmatch(key)} <= told


def test_a_folder_of_another_format_is_refused(kept: Any, tmp_path: Path) -> None:
    settings = {**kept.settings, "format": 3}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="is of format 3, and this fedjax_sim reads 2"):
        fs.load_run(tmp_path)
