"""FedJAX: its FedAvg with Haiku networks, client after client, a jitted step for each batch."""

import time
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any

import fedjax
import haiku as hk
import jax
import jax.numpy as jnp

from benchmarks.workloads import CLASSES, SEED, Timing, Workload

Batch = dict[str, jax.Array]


def _mlp(*widths: int) -> Callable[[jax.Array], jax.Array]:
    return lambda x: hk.nets.MLP((*widths, CLASSES))(x)


def _cnn(x: jax.Array) -> jax.Array:
    for width in (32, 64):
        x = jax.nn.relu(hk.Conv2D(width, 3, padding="VALID")(x))
    x = hk.max_pool(x, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return hk.nets.MLP((128, CLASSES))(hk.Flatten()(x))


NETS = {"mlp": _mlp(200, 200), "logreg": _mlp(), "cnn": _cnn}


@lru_cache(maxsize=1)
def _ready(workload: Workload) -> tuple[Any, Any, list[Any], float]:
    """The algorithm, its first state, every client's data set, and the seconds to compile."""
    if workload.net not in NETS:
        raise ValueError(f"fedjax has networks without a state only, {workload.name} has another")
    data = workload.federation()
    net = hk.without_apply_rng(hk.transform(NETS[workload.net]))

    def loss(params: Any, batch: Batch, key: jax.Array) -> jax.Array:
        del key
        logits = net.apply(params, batch["x"].astype(jnp.float32) / 255)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], axis=1)
        return -jnp.mean(chosen)

    algorithm = fedjax.algorithms.fed_avg.federated_averaging(
        jax.jit(jax.grad(loss)),
        fedjax.optimizers.sgd(workload.lr, workload.momentum or None),
        fedjax.optimizers.sgd(1.0),
        fedjax.ShuffleRepeatBatchHParams(batch_size=workload.batch),
    )
    rows = [data.index[a:b] for a, b in pairwise(data.start)]
    clients = [fedjax.ClientDataset({"x": data.x[mine], "y": data.y[mine]}) for mine in rows]
    example = jnp.zeros((1, *workload.shape), jnp.float32)
    state = algorithm.init(net.init(jax.random.key(SEED), example))
    begin = time.perf_counter()
    jax.block_until_ready(algorithm.apply(state, _cohort(clients, [0, 1], 0))[0].params)
    return algorithm, state, clients, time.perf_counter() - begin


def _cohort(clients: list[Any], chosen: Any, number: int) -> list[Any]:
    keys = jax.random.split(jax.random.PRNGKey(number), len(chosen))
    return [(k, clients[k], key) for k, key in zip(map(int, chosen), keys, strict=True)]


def run(workload: Workload, rounds: int, devices: int) -> Timing:
    """Train `rounds` rounds on one device: FedJAX's backend for several is broken on this JAX."""
    del devices
    algorithm, state, clients, compiling = _ready(workload)
    cohorts = workload.cohorts(rounds)
    begin = time.perf_counter()
    for number, chosen in enumerate(cohorts):
        state, _ = algorithm.apply(state, _cohort(clients, chosen, number))
    jax.block_until_ready(state.params)
    seconds = time.perf_counter() - begin
    samples = int(workload.federation().sizes[cohorts].sum())
    return Timing(seconds, samples, compiling, "1 device")
