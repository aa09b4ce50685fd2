"""What the loop promises to every composition."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import Federation, assert_trees, known, make_federation, play

import fedjax_sim as fs
from fedjax_sim import (
    aggregators,
    attacks,
    clustering,
    flight,
    redistribution,
    selection,
    sending,
    tree,
)
from fedjax_sim.base import Cohort, Gathered
from fedjax_sim.privacy import poisson


def local_of(model: fs.Model) -> fs.LocalUpdate:
    return fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=16)


RING = redistribution.mix(redistribution.metropolis(redistribution.ring(3)))


def test_a_model_that_keeps_its_slot_meets_every_client(models: Any) -> None:
    """Not only those of low or high numbers."""
    clients = 10
    algorithm = fs.compose(
        local_of(models["logistic"]),
        selection=selection.uniform(),
        clients_per_round=3,
        flight=flight.serverless(redistribution=RING),
    ).on(fs.make_execution(devices=2))
    data = make_federation([4] * clients).data
    seen: list[set[int]] = [set(), set(), set()]
    for state in play(algorithm, models["logistic"], data, rounds=40).states:
        for slot, client in enumerate(state.slots.client):
            seen[slot].add(int(client))
    # A slot misses a client in all 40 rounds with probability 0.7^40, below 1e-6.
    assert seen == [set(range(clients))] * 3


@pytest.mark.slow
def test_clipped_clusters_stay_apart(federation: Federation, models: Any) -> None:
    model, limit = models["logistic"], 1e-3
    local, risk = local_of(model), fs.empirical_risk(model)
    algorithm = fs.compose(
        local,
        selection=selection.uniform(),
        clients_per_round=8,
        broadcast=clustering.ifca(2, risk),
        sending=[sending.clip_norm(limit)],
    ).on(fs.make_execution(devices=2))
    states = play(algorithm, model, federation.data, rounds=3).states
    before = jax.tree.map(np.asarray, states[0].broadcast.variables.params)
    after = states[-1].broadcast.variables.params
    for j in range(2):
        moved = tree.norm(jax.tree.map(lambda a, b, j=j: a[j] - b[j], after, before))
        assert float(moved) <= 2 * limit * 1.001  # two rounds of changes of at most C
    assert float(tree.norm(jax.tree.map(lambda a: a[0] - a[1], after))) > 10 * limit


def test_clusters_are_reduced_by_the_aggregator() -> None:
    def risk(*_: Any) -> Any:
        raise AssertionError

    # Of clusters at 7, 4 and 1: the models are 1, 2, 30; 5; and one that is absent.
    updates = fs.Variables(jnp.array([-6.0, -5.0, 23.0, 1.0, jnp.nan]), ())
    weights, tag = jnp.array([1.0, 1, 1, 1, 0]), jnp.array([0, 0, 0, 1, 1])
    none: Any = None
    start = clustering.Models(fs.Variables(jnp.array([7.0, 4.0, 1.0]), ()), jnp.int32(3))
    received = tree.take(start.variables, tag)
    cohort = Cohort(none, received, jnp.arange(5), none, none, none, tag, none)
    gathered, median = Gathered(updates, weights, cohort), aggregators.coordinate_median
    new = clustering.ifca(3, risk).update(start, none, gathered, median).variables.params
    assert new.tolist() == [2.0, 5.0, 1.0]  # no client chose the third


def test_an_empty_cohort_moves_nothing(models: Any) -> None:
    """Nor does it make the model NaN."""
    algorithm = fs.compose(
        local_of(models["logistic"]),
        selection=poisson(0.5),
        clients_per_round=4,
        server=fs.server.optimizer(optax.sgd(0.5, momentum=0.9)),
    ).on(fs.make_execution(devices=1))
    ours = play(algorithm, models["logistic"], make_federation([5] * 8).data, rounds=12)
    empty = [int(m.visits) == 0 for m in ours.metrics]
    assert any(empty)
    assert not all(empty)
    for t in range(1, 12):
        if empty[t]:
            assert_trees(ours.states[t].server, ours.states[t - 1].server)
            assert_trees(ours.states[t].opt_state, ours.states[t - 1].opt_state)
        else:
            assert float(jnp.abs(tree.norm(ours.states[t].server.params))) > 0


def test_the_last_collection_draws_by_the_run(federation: Federation, models: Any) -> None:
    noise = attacks.gaussian(np.ones(8, bool), sigma=1.0)
    algorithm = fs.compose(
        local_of(models["logistic"]),
        selection=selection.uniform(sticky=True),
        clients_per_round=5,
        flight=flight.delayed(rounds=3),
        sending=[noise],
    ).on(fs.make_execution(devices=1))
    model, data = models["logistic"], jax.device_put(federation.data)
    state = algorithm.init(jax.random.key(0), model.init(jax.random.key(0)), data)
    state, _ = jax.jit(algorithm.step)(jax.random.key(1), state, data)
    collect = jax.jit(algorithm.collect)
    one, same, other = (collect(jax.random.key(k), state, data)[0] for k in (2, 2, 3))
    assert_trees(one, same)
    assert float(tree.norm(jax.tree.map(jnp.subtract, one.params, other.params))) > 0.1


def test_corrections_keep_the_dtype() -> None:
    half = fs.Variables({"w": jnp.full(2, 4, jnp.bfloat16)}, {"n": jnp.int32(3)})
    server = fs.Variables({"w": jnp.zeros(2, jnp.bfloat16)}, {"n": jnp.int32(3)})
    correct = known(flight.drift_correction().correct)
    new = correct(server, jnp.float32(30), half, jnp.float32(10))
    wanted = fs.Variables({"w": jnp.ones(2, jnp.bfloat16)}, {"n": jnp.int32(3)})
    chex.assert_trees_all_equal_shapes_and_dtypes(new, wanted)
    assert_trees(new, wanted)


def test_parts_of_the_wrong_kind_are_named(federation: Federation, models: Any) -> None:
    local, rule = local_of(models["logistic"]), optax.sgd(1.0)
    plain: dict[str, Any] = {"clients_per_round": 3}
    wrong: dict[str, dict[str, Any]] = {
        "sending must be a sequence of Sending, got the class clip_norm": {
            "sending": (sending.clip_norm,)
        },
        "server must be a Server, got Gradient": {"server": rule},
    }
    for message, parts in wrong.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            fs.compose(local, **(plain | parts))
    unreduced = fs.compose(
        local, clients_per_round=3, aggregator=lambda stacked, weights, /: stacked
    )
    with pytest.raises(ValueError, match=r"aggregator must return what the server holds"):
        play(unreduced, models["logistic"], federation.data, rounds=1)


@pytest.mark.slow
def test_importing_is_light() -> None:
    """Each of these takes a tenth of a second to seconds; whoever needs one imports it.

    The data that runs have by default need none.
    """
    heavy = ["scipy.stats", "scipy.optimize", "sklearn", "matplotlib", "PIL", "tensorflow_datasets"]
    code = (
        "import sys, fedjax_sim; fedjax_sim.load_dataset('digits'); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
