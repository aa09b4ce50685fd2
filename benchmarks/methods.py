"""A small federation and methods of every shape that train on it, to compare devices by.

`benchmarks.device` prints how far a GPU's weights are from a CPU's;
`pytest -m device` holds them to tolerances.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

import fedjax_sim as fs
from fedjax_sim.base import PyTree

SIZES = (5, 17, 33, 9, 24, 16, 40, 12)
FEATURES, CLASSES = 12, 4
COHORT, ROUNDS = 6, 3
LR, MOMENTUM = 0.05, 0.9
MODEL = fs.models.mlp((FEATURES,), CLASSES, widths=(8,))

_CLOCK = fs.clock.simulated(1.0, fs.clock.bandwidth(1e4, 1e4))
METHODS: dict[str, Callable[..., fs.Algorithm]] = {
    "fedavg": fs.fedavg,
    "phase_shift": functools.partial(fs.phase_shift, phases=3),
    "radfed": functools.partial(fs.radfed, redistribution_rounds=2),
    "scaffold": fs.algorithms.scaffold,
    "fedprox": functools.partial(fs.algorithms.fedprox, mu=0.1),
    "fednova": functools.partial(fs.algorithms.fednova, lr=LR, momentum=MOMENTUM),
    "fedadam": fs.algorithms.fedadam,
    "ditto": fs.algorithms.ditto,
    "fedper": functools.partial(fs.algorithms.fedper, model=MODEL),
    "gossip": fs.algorithms.gossip,
    "stc": functools.partial(fs.algorithms.stc, sparsity=0.1),
    "fedasync": functools.partial(fs.algorithms.fedasync, buffer_size=2, clock=_CLOCK),
    "streaming_diloco": fs.algorithms.streaming_diloco,
    "krum": functools.partial(fs.algorithms.robust, aggregator="krum"),
    "median": fs.algorithms.robust,
    "dp_fedavg": fs.algorithms.dp_fedavg,
}
"""Each takes a local update, `clients_per_round` and `execution`."""


@functools.cache
def federation() -> tuple[fs.ClientData, tuple[np.ndarray, np.ndarray]]:
    """Draws Gaussian blobs at clients of unequal sizes, and a test set."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(CLASSES, FEATURES))
    y = rng.integers(0, CLASSES, sum(SIZES) + 64).astype(np.int32)
    x = (centres[y] + rng.normal(size=(len(y), FEATURES))).astype(np.float32)
    start = np.cumsum([0, *SIZES]).astype(np.int32)
    partition = fs.partition.Partition(np.arange(start[-1], dtype=np.int32), start)
    return fs.client_data(x, y, partition), (x[start[-1] :], y[start[-1] :])


@functools.cache  # a second run of an algorithm compiles nothing
def composed(
    method: Callable[..., fs.Algorithm], execution: fs.Execution, model: fs.Model
) -> fs.Algorithm:
    """Returns a method with SGD with momentum."""
    sgd = optax.sgd(LR, momentum=MOMENTUM)
    local = fs.local_sgd(fs.empirical_risk(model), sgd, batch_size=8)
    return method(local, clients_per_round=COHORT).on(execution)


def trained(
    method: Callable[..., fs.Algorithm],
    execution: fs.Execution,
    model: fs.Model = MODEL,
    **settings: Any,
) -> fs.Result:
    """Trains a method from two seeds; `settings` are arguments of `fs.simulate`."""
    data, test = federation()
    usual: dict[str, Any] = {"rounds": ROUNDS, "seeds": (0, 1), "eval_every": ROUNDS}
    algorithm = composed(method, execution, model)
    return fs.simulate(algorithm, model, data, test, classes=CLASSES, **(usual | settings))


def outcome(result: fs.Result) -> PyTree:
    """Returns the weights of a run: the server's, and what the clients keep."""
    assert result.state is not None
    return jax.device_get((result.variables, result.state.client_state))


def gap(found: PyTree, wanted: PyTree) -> float:
    """Returns the largest difference of an array, relative to the array's largest entry."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-9)) for a, b in pairs)


def same_bits(a: PyTree, b: PyTree) -> bool:
    """Returns whether all arrays are equal."""
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))
