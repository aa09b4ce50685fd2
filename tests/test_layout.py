"""What clients keep is split over the devices, and nobody but the programs notices."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest
from conftest import assert_trees

import fedjax_sim as fs
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.runner import Runner

TOY = fs.toy(5, 0.9)  # of which 4 devices need rows of padding


@functools.cache  # one is compiled once for each execution that it runs on
def scaffold() -> fs.Algorithm:
    return fs.algorithms.scaffold(fs.local_sgd(TOY.objective, optax.sgd(0.05)), clients_per_round=4)


def experiment_of(devices: int) -> Runner:
    return Experiment(
        scaffold(), TOY.model, TOY.data, TOY.test, classes=10, seeds=(0, 1), eval_every=2,
        execution=fs.make_execution(devices),
    ).runner()  # fmt: skip


@pytest.mark.slow
def test_each_device_holds_an_equal_part() -> None:
    made, alone = experiment_of(4), experiment_of(1)
    run, one = made.start((3, 4)), alone.start((3, 4))
    for _ in range(2):
        for leaf in jax.tree.leaves(run.state.client_state):
            assert {shard.data.shape[1] for shard in leaf.addressable_shards} == {2}
        assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(run.state.server))
        state = made.exported(run).state
        assert all(len(leaf[0]) == 5 for leaf in jax.tree.leaves(state.client_state))
        assert_trees(state, alone.exported(one).state, rtol=2e-5, atol=1e-6)
        run, one = made.advance(run, 2)[0], alone.advance(one, 2)[0]


CLIENTS, WIDTH = 400, 500


def kept(method: str, devices: int, *, personal: bool = False) -> fs.Result:
    """A run in which each client keeps much more than all other arrays hold."""
    d = np.random.default_rng(0).normal(size=(CLIENTS, WIDTH)).astype(np.float32)
    model = fs.models.logistic((WIDTH,), 10)
    y = np.arange(CLIENTS, dtype=np.int32) % 10
    each = fs.partition.partition_from_lists([[k] for k in range(CLIENTS)])
    data = fs.client_data(d, y, each)
    execution = fs.make_execution(devices)
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.05))
    algorithm = fs.ALGORITHMS[method](local, clients_per_round=4).on(execution)
    test = fs.data.eval_set(d, y, each)
    return fs.simulate(
        algorithm, model, data, test, rounds=1, classes=10, execution=execution, personal=personal
    )


@pytest.mark.slow
def test_memory_of_a_device_falls_with_their_number() -> None:
    """Also where own models are scored."""
    all_, samples = CLIENTS * 4 * 10 * (WIDTH + 1), 2 * CLIENTS * 4 * WIDTH  # also to test on
    assert kept("scaffold", 4).device_bytes < 0.45 * (all_ + samples)
    one, four = (kept("ditto", devices, personal=True) for devices in (1, 4))
    assert one.device_bytes > all_
    assert four.device_bytes < 0.45 * one.device_bytes
    assert_trees(four.state, one.state, rtol=2e-5, atol=1e-6)
