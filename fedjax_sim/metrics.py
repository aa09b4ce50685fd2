"""Scores of the server model: pooled over the test set, and spread over clients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Array, LossFn, Model, Variables
from fedjax_sim.execution import Execution
from fedjax_sim.losses import Tally, tally


def evaluate(
    model: Model,
    loss: LossFn,
    execution: Execution,
    variables: Variables,
    x: Array,
    y: Array,
    *,
    batch_size: int = 50,
) -> Tally:
    """Counts right answers over a test set, its batches spread over the devices.

    Args:
        model: the model.
        loss: per-sample loss.
        execution: devices.
        variables: the weights; may be batched by vmap.
        x: ``[n, *feature]``.
        y: ``int32[n]``.
        batch_size: rows at once.

    Returns:
        Counts by class over all n samples.
    """
    parts = len(execution.devices)
    batch_size = min(batch_size, -(-len(y) // parts))
    batches = -(-len(y) // (batch_size * parts))  # per part

    def part(pool: tuple[Array, Array], weights: Variables, number: Array) -> Tally:
        xs, ys = pool

        def batch(total: Tally, i: Array) -> tuple[Tally, None]:
            row = (number * batches + i) * batch_size + jnp.arange(batch_size, dtype=jnp.int32)
            mask = row < len(ys)
            row = jnp.minimum(row, len(ys) - 1)
            logits, _ = model.apply(weights, xs[row], train=False)
            part = tally(logits, ys[row], loss(logits, ys[row]), mask)
            return jax.tree.map(jnp.add, total, part), None

        classes = jax.eval_shape(lambda: model.apply(weights, xs[:1], train=False)[0]).shape[-1]
        none = jnp.zeros(classes, jnp.int32)
        return jax.lax.scan(batch, Tally(none, none, jnp.float32(0)), jnp.arange(batches))[0]

    numbers = jnp.arange(parts, dtype=jnp.int32)
    tallies = execution.run(part, (x, y), variables, numbers, common=True)
    return jax.tree.map(lambda a: jnp.sum(a, axis=0), tallies)


def client_accuracy(
    correct: NDArray[np.integer[Any]], count: NDArray[np.integer[Any]], table: NDArray[np.int64]
) -> NDArray[np.float64]:
    r"""Each client's expected accuracy on fresh data with its own label mix.

    .. math:: a_k = \sum_y p_k(y)\, a(y)

    with a(y) the test accuracy on class y. Under label skew this is the accuracy a client would
    see; it costs nothing beyond the test set.

    Args:
        correct: ``int[M]``, right answers by class on the test set.
        count: ``int[M]``, test samples by class.
        table: ``int[N, M]``, samples of each class at each client.

    Returns:
        ``f64[N]``, fractions.

    >>> table = np.array([[9, 1], [0, 5]])
    >>> client_accuracy(np.array([10, 0]), np.array([10, 10]), table).tolist()
    [0.9, 0.0]
    """
    by_class = correct / np.maximum(count, 1)
    return (table / table.sum(axis=1, keepdims=True)) @ by_class


def spread(values: NDArray[np.float64]) -> dict[str, float]:
    """Mean, standard deviation, minimum, 10 % quantile and maximum of ``f64[N]``.

    >>> spread(np.array([0.0, 1.0]))["mean"]
    0.5
    """
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": float(values.min()),
        "p10": float(np.quantile(values, 0.1)),
        "max": float(values.max()),
    }
