"""A case for XLA: on several CPU devices gradients of a CNN are wrong now and then.

    python benchmarks/xla_sharing.py [CALLS]

needs JAX alone. In each of three rounds two CPU devices train copies of a network with two
convolutions and dropout, five each, four steps of SGD; their mean starts the next round. The same
program on the same input should give the same bits every time, and does without the pass
`cpu-parallel-task-assigner`, which splits operations between threads. With it an operation may
start before another thread has written the second half of its input.

Seen on two cores of an AMD EPYC, Python 3.11.7, 2026-11-27, 20 calls: jax 0.10.2 gives 4 different
results with the pass; jax 0.12.0.1 (Python 3.13.0) gives 1. Each gives 1 without.
"""

from __future__ import annotations

import sys
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

DEVICES, ROUNDS, VISITS, STEPS, BATCH = 2, 3, 5, 4, 32
SHAPES = (5, 5, 1, 10), (5, 5, 10, 20), (320, 50), (50, 10)
OPTIONS: dict[str, dict[str, str | bool]] = {
    "with": {},
    "without": {"xla_disable_hlo_passes": "cpu-parallel-task-assigner"},
}
NHWC = ("NHWC", "HWIO", "NHWC")

Weights = tuple[jax.Array, ...]


@jax.custom_vjp
def conv(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolves; its gradients are convolutions of the same layout, which are fast in loops."""
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=NHWC)


def conv_backward(saved: Weights, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of the input and of the kernel."""
    x, kernel = saved
    wide = jnp.pad(dy, ((0, 0), (4, 4), (4, 4), (0, 0)))
    dx = conv(wide, jnp.flip(kernel, (0, 1)).swapaxes(2, 3))
    dk = conv(x.transpose(3, 1, 2, 0), dy.transpose(1, 2, 0, 3)).transpose(1, 2, 0, 3)
    return dx, dk


conv.defvjp(lambda x, kernel: (conv(x, kernel), (x, kernel)), conv_backward)


@jax.custom_vjp
def pool(x: jax.Array) -> jax.Array:
    """Takes the largest of each 2x2 pixels."""
    return pool_forward(x)[0]


def pool_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the largest and which of the four it is."""
    corners = jnp.stack([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)])
    return corners.max(axis=0), corners.argmax(axis=0)


def pool_backward(winner: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    """Returns the gradient of the input: the output's gradient, at the first largest pixel."""
    batch, rows, cols, maps = dy.shape
    corner = jnp.arange(4).reshape(1, 1, 2, 1, 2, 1)
    spread = jnp.where(winner[:, :, None, :, None] == corner, dy[:, :, None, :, None], 0)
    return (spread.reshape(batch, 2 * rows, 2 * cols, maps),)


pool.defvjp(pool_forward, pool_backward)


def loss(weights: Weights, key: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the cross-entropy of a batch."""
    first, second, hidden, last = weights
    x = conv(jax.nn.relu(pool(conv(x, first))), second)
    x = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), 2 * x, 0)
    logits = jax.nn.relu(jax.nn.relu(pool(x)).reshape(BATCH, -1) @ hidden) @ last
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1))


def visit(weights: Weights, x: jax.Array, y: jax.Array) -> Weights:
    """Trains for some steps of SGD."""

    def step(i: jax.Array, weights: Weights) -> Weights:
        key = jax.random.fold_in(jax.random.key(0), i)
        gradients = jax.grad(loss)(weights, key, x[i], y[i])
        return jax.tree.map(lambda w, g: w - 0.05 * g, weights, gradients)

    return jax.lax.fori_loop(0, STEPS, step, weights)


def rounds(weights: Weights, x: jax.Array, y: jax.Array, count: jax.Array) -> Weights:
    """Averages the models of all visits, in each of some rounds."""

    def on_device(weights: Weights, x: jax.Array, y: jax.Array) -> Weights:
        return jax.lax.map(lambda one: visit(weights, *one), (x, y))

    whole, split = PartitionSpec(), PartitionSpec("device")
    train = jax.shard_map(
        on_device,
        mesh=Mesh(jax.devices("cpu"), "device"),
        in_specs=(whole, split, split),
        out_specs=split,
        check_vma=False,
    )

    def one(i: jax.Array, weights: Weights) -> Weights:
        return jax.tree.map(lambda rows: rows.mean(axis=0), train(weights, x, y))

    return jax.lax.fori_loop(0, count, one, weights)


def main() -> None:
    """Prints how many different results the calls give, with the pass and without it."""
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    jax.config.update("jax_num_cpu_devices", DEVICES)
    rng = np.random.default_rng(0)
    weights = tuple(rng.normal(0, 0.1, shape).astype(np.float32) for shape in SHAPES)
    visits = DEVICES * VISITS, STEPS, BATCH
    x = rng.normal(size=(*visits, 28, 28, 1)).astype(np.float32)
    y = rng.integers(0, 10, visits).astype(np.int32)
    given = weights, x, y, np.int32(ROUNDS)
    lowered = jax.jit(rounds).lower(*given)
    print(f"jax {jax.__version__}, {DEVICES} CPU devices, {calls} calls")
    for how, options in OPTIONS.items():
        program, found = lowered.compile(options), Counter[bytes]()
        for _ in range(calls):
            found[b"".join(np.asarray(a).tobytes() for a in program(*given))] += 1
        print(f"{how} the pass: {len(found)} different results, {sorted(found.values())} times")


if __name__ == "__main__":
    main()
