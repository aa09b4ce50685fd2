"""Equal weights: how often a client holds a sample changes nothing that a method aggregates."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from conftest import largest_change, make_federation, some_slow

import fedjax_sim as fs
from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.base import ClientData
from fedjax_sim.base.signatures import keywords
from fedjax_sim.cli.making import make, stand_in

ROUNDS, CLASSES = 2, 3
OPTIONS: dict[str, dict[str, Any]] = {
    "dynamic_clustering": {"cluster_limit": 180.0},  # one cluster
    "fedbn": {"norms": "*bias"},
    "robust": {"aggregator": "mean"},
}
EXCEPT = ("fedlc", "fedala")
"""Their clients count the samples of each class, or draw some of their samples."""
CASES = [("mimelite", True), ("fedavg", False)]
CASES += [
    (name, True)
    for name, method in ALGORITHMS.items()
    if "equal_weights" in keywords(method) and name not in ("mimelite", *EXCEPT)
]


def held(first: int, second: int) -> ClientData:
    """Three clients; the first two hold each of their samples so many times."""
    pool = make_federation(sizes=(4, 4, 5, 6))
    x, y = np.asarray(pool.data.x), np.asarray(pool.data.y)
    own = [np.tile(np.arange(4), first), np.tile(np.arange(4, 8), second), np.arange(8, 13)]
    rows = np.concatenate([*own, np.arange(13, 19)])
    start = np.cumsum([0, *map(len, own)]).astype(np.int32)
    partition = fs.partition.Partition(np.arange(start[-1], dtype=np.int32), start)
    return fs.client_data(x[rows], y[rows], partition, root=np.arange(start[-1], len(rows)))


@pytest.mark.parametrize(("name", "equal"), some_slow(CASES, quick=2))
def test_equal_weights_weigh_all_that_is_aggregated(name: str, equal: bool) -> None:
    """A sample held twice adds nothing but weight, as a step is on all samples of a client."""
    model = fs.models.mlp((6,), CLASSES, widths=(5,))
    local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), batch_size=16)
    common = stand_in(
        model, local=local, classes=CLASSES, momentum=0.0, clients_per_round=3,
        execution=fs.make_execution(devices=1),
    )  # fmt: skip
    algorithm = make(name, common, equal_weights=equal, **OPTIONS.get(name, {}))
    step = jax.jit(algorithm.step)

    def run(data: ClientData) -> Any:
        data = jax.tree.map(jax.numpy.asarray, data)
        state = algorithm.init(jax.random.key(0), model.init(jax.random.key(1)), data)
        for t in range(ROUNDS):
            state, _ = step(jax.random.key(t), state, data)
        return state.server, state.shared_state, state.opt_state, state.broadcast

    gap = largest_change(run(held(2, 1)), run(held(1, 2)))
    assert gap < 2e-6 if equal else gap > 1e-4
