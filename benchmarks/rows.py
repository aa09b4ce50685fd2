"""What it would cost if no part saw rows: the models put in the order of slots before they meet.

    python -m benchmarks.rows [--devices 4] [--rounds 5] [--repeats 7]

Each composition runs as it is and with a pre-aggregation that gathers the stack in another order,
as un-permuting it inside the execution would for every method; in turn, the best of the repeats.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fedjax_sim as fs
from fedjax_sim.base import Array, ClientData, Cohort, PreAggregation, PyTree, Variables
from fedjax_sim.engine import tree

COHORT = 40
SAMPLES = {"logistic": 60, "mlp": 60, "two_conv": 50}


class in_slot_order(PreAggregation):
    """Gathers all rows in the order of their clients."""

    def apply(
        self, key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        row = jnp.argsort(cohort.client)
        ordered: Variables = tree.take(updates, row)
        return ordered, weights[row], state


def federation(name: str) -> tuple[fs.Model, ClientData]:
    """Random pixels at clients of unequal sizes."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(SAMPLES[name] // 2, 3 * SAMPLES[name] // 2, COHORT)
    total = int(sizes.sum())
    x = rng.integers(0, 256, (total, 28, 28, 1)).astype(np.uint8)
    y = rng.integers(0, 10, total).astype(np.int32)
    starts = np.cumsum([0, *sizes]).astype(np.int32)
    partition = fs.partition.Partition(np.arange(total, dtype=np.int32), starts)
    model = fs.models.MODELS[name]((28, 28, 1), 10)
    half = np.full(1, 127.5, np.float32)
    return fs.models.with_scaling(model, half, half), fs.client_data(x, y, partition)


def compiled(
    algorithm: fs.Algorithm, model: fs.Model, data: ClientData, rounds: int
) -> Callable[[], float]:
    """Runs ``rounds`` rounds in one program; returns the seconds of one."""
    data = jax.tree.map(jnp.asarray, data)
    state = jax.jit(lambda key: algorithm.init(key, model.init(key), data))(jax.random.key(0))

    @jax.jit
    def run(key: Array, state: PyTree) -> PyTree:
        return jax.lax.fori_loop(
            0, rounds, lambda t, s: algorithm.step(jax.random.fold_in(key, t), s, data)[0], state
        )

    jax.block_until_ready(run(jax.random.key(1), state))

    def timed() -> float:
        began = time.perf_counter()
        jax.block_until_ready(run(jax.random.key(1), state))
        return (time.perf_counter() - began) / rounds

    return timed


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", given.devices)
    execution = fs.make_execution(devices=given.devices)
    print(
        f"{given.devices} x {jax.devices()[0].device_kind}, {os.cpu_count()} cores, "
        f"jax {jax.__version__}; seconds a round, cohort {COHORT}"
    )
    for name in SAMPLES:
        model, data = federation(name)
        local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.01), batch_size=10)
        size = tree.num_bytes(jax.eval_shape(model.init, jax.random.key(0)))
        for method in (fs.algorithms.fedavg, fs.algorithms.radfed):
            plain = method(local, clients_per_round=COHORT).on(execution)
            ordered = plain.replace(preaggregation=(in_slot_order(),))
            one, other = (compiled(a, model, data, given.rounds) for a in (plain, ordered))
            times = np.array([[one(), other()] for _ in range(given.repeats)])
            before, after = times.min(axis=0)
            print(
                f"{name:9} {size / 1e6:6.2f} MB  {method.__name__:7} rows {before:.4f}  "
                f"slots {after:.4f}  {after / before:.2f}x"
            )


if __name__ == "__main__":
    main()
