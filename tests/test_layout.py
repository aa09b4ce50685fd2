"""What clients keep is split over the devices, and nobody but the programs notices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from conftest import assert_trees

import fedjax_sim as fs
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.simulation import experiment


def experiment_of(clients: int, devices: int, method: str = "scaffold") -> Experiment:
    problem, execution = fs.toy(clients, 0.9), fs.make_execution(devices)
    local = fs.local_sgd(problem.objective, optax.sgd(0.05))
    algorithm = fs.ALGORITHMS[method](local, clients_per_round=4, execution=execution)
    return experiment(
        algorithm, problem.model, problem.data, problem.test, classes=10, seeds=(0, 1),
        eval_every=2, execution=execution,
    )  # fmt: skip


@pytest.mark.parametrize("clients", [5, 8])
def test_each_device_holds_an_equal_part(clients: int) -> None:
    made, alone = experiment_of(clients, 4), experiment_of(clients, 1)
    run, one = made.start((3, 4)), alone.start((3, 4))
    for _ in range(2):
        for leaf in jax.tree.leaves(run.state.client_state):
            assert {shard.data.shape[1] for shard in leaf.addressable_shards} == {2}
        assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(run.state.server))
        state = made.told(run).state
        assert all(len(leaf[0]) == clients for leaf in jax.tree.leaves(state.client_state))
        assert_trees(state, alone.told(one).state, rtol=2e-5, atol=1e-6)
        run, one = made.advance(run, 2)[0], alone.advance(one, 2)[0]


def kept(method: str, devices: int, clients: int, **changed: Any) -> fs.Result:
    """A run in which each client keeps much more than all other arrays hold."""
    d = np.random.default_rng(0).normal(size=(clients, 500)).astype(np.float32)
    model = fs.models.logistic((500,), 10)
    y = np.arange(clients, dtype=np.int32) % 10
    each = fs.partition.partition_from_lists([[k] for k in range(clients)])
    data = fs.client_data(d, y, each)
    execution = fs.make_execution(devices)
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.05))
    algorithm = fs.ALGORITHMS[method](local, clients_per_round=4, execution=execution)
    test = fs.data.eval_set(d, y, each)
    given = {"rounds": 1, "classes": 10, "execution": execution, **changed}
    return fs.simulate(algorithm, model, data, test, **given)


@pytest.mark.parametrize(("method", "personal"), [("scaffold", False), ("ditto", True)])
def test_memory_of_a_device_falls_with_their_number(method: str, personal: bool) -> None:
    one, four = (kept(method, devices, 400, personal=personal) for devices in (1, 4))
    assert one.device_bytes > 400 * 4 * 5010
    assert four.device_bytes < 0.45 * one.device_bytes
    assert_trees(four.state, one.state, rtol=2e-5, atol=1e-6)


def test_a_run_goes_on_on_other_devices(tmp_path: Any) -> None:
    """Neither their number nor the padding is in a checkpoint."""
    kept("scaffold", 4, 10, rounds=2, checkpoints=tmp_path)
    went_on = kept("scaffold", 1, 10, rounds=4, checkpoints=tmp_path)
    assert_trees(went_on.state, kept("scaffold", 1, 10, rounds=4).state, rtol=2e-5, atol=1e-6)
