"""The Python in README and CONTRIBUTING runs as printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, play

import fedjax_sim as fs

ROOT = Path(__file__).parents[1]


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


def test_the_example_trains() -> None:
    (block,) = python_blocks("README.md")
    scope: dict[str, Any] = {}
    exec(block, scope)
    assert scope["result"].accuracy[-1, 0] > 0.5  # chance is 0.1


@pytest.fixture(scope="module")
def recipes() -> dict[str, Any]:
    """What CONTRIBUTING defines; every block brings its imports."""
    defined: dict[str, Any] = {}
    for block in python_blocks("CONTRIBUTING.md"):
        scope: dict[str, Any] = {}
        exec(block, scope)
        defined |= scope
    return defined


def test_an_algorithm(recipes: dict[str, Any], federation: Federation) -> None:
    model = fs.models.logistic(federation.data.x.shape[1:], federation.classes)
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.05), batch_size=16)
    made = recipes["fedavg_delayed"](local, clients_per_round=4)
    out = play(made, model, federation.data, 4)
    assert [int(m.uploads) for m in out.metrics] == [0, 4, 0, 4]
    assert [int(m.downloads) for m in out.metrics] == [4, 0, 4, 0]


def test_parts(recipes: dict[str, Any], federation: Federation) -> None:
    """Three rounds of three clients each of the eight, in turn, and their largest coordinates."""
    model = fs.models.logistic(federation.data.x.shape[1:], federation.classes)
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.05), batch_size=16)
    parts = {"selection": recipes["in_turn"](), "aggregator": recipes["maximum"]}
    every_round = fs.schedule.every_round(3)
    made = fs.compose(local, schedule=every_round, server=recipes["running_mean"](), **parts)
    out = play(made, model, federation.data, 3)
    visited = [[0, 1, 2], [3, 4, 5], [6, 7, 0]]
    expected = [federation.sizes[clients].sum() for clients in visited]
    assert [int(m.samples) for m in out.metrics] == expected
    assert [int(s.opt_state) for s in out.states] == [2, 3, 4]


def test_a_server_update_is_the_mean_of_all_aggregates(recipes: dict[str, Any]) -> None:
    server = recipes["running_mean"]()
    model, state = jnp.float32(100), server.init(jnp.float32(100))
    for aggregate in (1.0, 2.0, 6.0):
        model, state = server.update(None, jnp.float32(aggregate), model, state, None)
    np.testing.assert_allclose(float(model), 3, rtol=1e-6)


def test_an_aggregator(recipes: dict[str, Any]) -> None:
    stack = {"w": jnp.array([[1.0, 5.0], [3.0, 2.0], [jnp.nan, 9.0]])}
    out = recipes["maximum"](stack, jnp.array([1.0, 2.0, 0.0]))
    assert out["w"].tolist() == [3, 5]
