"""Clients whose update is not finite: skipped and counted, or the end of the run."""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import assert_trees

import fedjax_sim as fs
from fedjax_sim import bench
from fedjax_sim.cli.build import build
from fedjax_sim.cli.parser import parse
from fedjax_sim.partition import partition_from_lists

SIZES = (6, 9, 4, 7)
FINITE = fs.sending.finite_only


def problem(broken: tuple[int, ...]) -> tuple[fs.ClientData, Any]:
    """Four clients; the samples of the broken ones are the largest numbers that there are."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(sum(SIZES), 4)).astype(np.float32)
    y = rng.integers(3, size=len(x)).astype(np.int32)
    ends = np.cumsum(SIZES)
    lists = [[*range(end - n, end)] for n, end in zip(SIZES, ends, strict=True)]
    good = x.copy()
    for k in broken:
        x[lists[k]] = 3e38
    return fs.client_data(x, y, partition_from_lists(lists)), (good, y)


def without(data: fs.ClientData, last: int) -> fs.ClientData:
    """The clients but for the last ones."""
    lists = [
        [*range(data.start[k], data.start[k + 1])] for k in range(data.clients - last)
    ]  # fmt: skip
    return fs.client_data(np.asarray(data.x), np.asarray(data.y), partition_from_lists(lists))


MODEL = fs.models.logistic((4,), 3)


def local(**settings: Any) -> fs.LocalUpdate:
    optimizer = optax.sgd(0.1, momentum=0.9)
    return fs.local_sgd(fs.empirical_risk(MODEL), optimizer, 4, 2, **settings)


@functools.cache  # one is compiled once for all clients of the same sizes
def fedavg(clients: int, *, screens: bool, code: bool = False) -> fs.Algorithm:
    codes = [fs.sending.compressed(fs.compression.top_k(0.4))] if code else []
    algorithm = fs.fedavg(
        local(optimizer_state="keep"), clients_per_round=clients,
        ).on(fs.make_execution(devices=1))  # fmt: skip
    return algorithm.replace(sending=[*([FINITE()] if screens else []), *codes])


def run(algorithm: fs.Algorithm, data: fs.ClientData, test: Any) -> fs.Result:
    return fs.simulate(algorithm, MODEL, data, test, rounds=3, classes=3)


def test_it_is_as_if_the_client_were_not_there() -> None:
    """With a code behind it, whose residual at the client stays finite."""
    data, test = problem((3,))
    ours = run(fedavg(4, screens=True, code=True), data, test)
    theirs = run(fedavg(3, screens=False, code=True), without(data, 1), test)
    assert_trees(ours.variables, theirs.variables, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.metrics.loss, theirs.metrics.loss, rtol=1e-5)
    assert ours.metrics.skipped.tolist() == [[1, 1, 1]]
    assert ours.metrics.uploads.tolist() == [[3, 3, 3]]
    assert ours.metrics.downloads.tolist() == [[4, 4, 4]]
    last, rest = ours.evaluations[-1], theirs.evaluations[-1]
    assert last.skipped.tolist() == [3]
    assert rest.skipped.tolist() == [0]
    assert last.bytes_up.tolist() == rest.bytes_up.tolist()
    assert 3 * last.bytes_down == 4 * rest.bytes_down
    # What the client keeps is what it had: nothing that its next visit would begin from.
    kept: Any = ours.state
    for leaf in jax.tree.leaves((kept.client_state, kept.sending)):
        assert np.isfinite(leaf).all()
        assert not np.any(np.asarray(leaf)[:, 3])


@pytest.mark.slow
def test_finite_clients_are_left_as_they_are() -> None:
    data, test = problem(())
    ours, theirs = (run(fedavg(4, screens=screens), data, test) for screens in (True, False))
    assert_trees(ours.variables, theirs.variables, rtol=1e-6, atol=1e-7)
    assert ours.metrics.skipped.tolist() == [[0, 0, 0]]


def test_a_round_of_which_nobody_is_left_ends_the_run() -> None:
    data, test = problem((0, 1, 2, 3))
    with pytest.raises(fs.DivergedError, match="the loss became nan in round 1"):
        run(fedavg(4, screens=True), data, test)


BASE = ["--compare", "none", "--clients", "8", "--model", "logistic", "--on-nan", "skip-client"]
REFUSED = {
    "radfed": "models that return in the round in which they left, flight is ",
    "scaffnew": "--on-nan skip-client: ",
}


@pytest.mark.parametrize("name", REFUSED)
def test_where_a_client_cannot_be_skipped_it_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(REFUSED[name])) as raised:
        build(parse([*BASE, "--algo", name]))
    message = str(raised.value)
    assert message.startswith(f"{name}: --on-nan skip-client: ")
    assert "\n" not in message
    if name != "scaffnew":
        assert "finite_only() needs " in message


def fragile(shape: tuple[int, ...], classes: int) -> fs.Model:
    """Knows nothing of samples of which all numbers are large."""
    inner = fs.models.logistic(shape, classes)

    def apply(variables: fs.Variables, x: Any, **settings: Any) -> Any:
        logits, state = inner.apply(variables, x, **settings)
        return logits * jnp.where(jnp.min(x, axis=1, keepdims=True) > 1, jnp.nan, 1), state

    return fs.Model(inner.init, apply)


@pytest.mark.slow
@pytest.mark.usefixtures("bare_command")
def test_the_command_skips_counts_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, (good, y) = problem((3,))
    owners = np.repeat(np.arange(4), SIZES)
    file = tmp_path / "own.npz"
    x = np.where(np.asarray(data.x) > 1e9, 100, data.x)
    np.savez(file, x_train=x, y_train=y, x_test=good, y_test=y,
             client_train=owners)  # fmt: skip
    flags = "--algo fedavg --compare none --partition natural --model test_skipping:fragile"
    argv = [*flags.split(), "--rounds", "2", "--seeds", "2", "--epochs", "2", "--batch-size", "4"]
    argv += ["--dataset", str(file), "--devices", "1"]
    out = tmp_path / "run"
    assert bench.main([*argv, "--out", str(out), "--on-nan", "skip-client"]) == 0
    assert "fedavg: 4 updates were not finite, and skipped" in capsys.readouterr().out
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [(row["round"], row["skipped"]) for row in rows] == [(1, 1), (1, 1), (2, 2), (2, 2)]
    assert json.loads((out / "summary.json").read_text())["fedavg"]["skipped"] == 4
    assert build(parse(argv)).algorithms["fedavg"].parts.sending == ()  # unless it is asked for
