"""Losses per sample."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array
from fedjax_sim.base.words import array_type

__all__ = ["cross_entropy", "masked_mean", "squared_error"]


def cross_entropy(logits: Array, labels: Array) -> Array:
    r"""Computes the softmax cross-entropy per sample, :math:`\ell = -\log p_y`.

    Args:
        logits: ``f32[B, M]``.
        labels: ``int32[B]`` in ``0..M-1``; -1 has no loss.

    Returns:
        ``f32[B]``, nats.

    Raises:
        ValueError: if the labels are not integers, or not one for each row of logits.

    >>> float(cross_entropy(jnp.zeros((1, 4)), jnp.zeros(1, jnp.int32))[0])  # log 4
    1.3862943649291992
    """
    if labels.shape != logits.shape[:-1] or not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"cross_entropy must have an integer for each row of logits {list(logits.shape)}, got "
            f"labels {array_type(labels)}: empirical_risk(model, task.loss) has a task's own loss"
        )
    log_p = jax.nn.log_softmax(logits)
    # A product with the one-hot label: a gather's gradient is a scatter, slow on every backend.
    return -jnp.sum(log_p * jax.nn.one_hot(labels, logits.shape[-1], dtype=log_p.dtype), axis=-1)


def squared_error(outputs: Array, y: Array) -> Array:
    r"""Computes the mean squared error per sample, :math:`\frac1D \sum_d (\hat y_d - y_d)^2`.

    Args:
        outputs: ``f32[B, D]``, in the units of y.
        y: ``f32[B, D]``, or ``f32[B]`` if D is 1.

    Returns:
        ``f32[B]``, in squared units.

    >>> squared_error(jnp.array([[1.0, 5.0]]), jnp.array([[0.0, 2.0]])).tolist()
    [5.0]
    """
    return jnp.mean(jnp.square(outputs - y.reshape(outputs.shape)), axis=-1)


def labelled(y: Array, mask: Array) -> Array:
    """Returns the rows of a minibatch that have a target, ``bool[B]``: no label is -1.

    >>> labelled(jnp.array([2, -1, 0]), jnp.array([True, True, False])).tolist()
    [True, False, False]
    """
    is_label = y.ndim == 1 and jnp.issubdtype(y.dtype, jnp.signedinteger)
    return mask & (y >= 0) if is_label else mask


def masked_mean(values: Array, mask: Array) -> Array:
    """Returns the mean of ``f32[B]`` over the rows where ``mask bool[B]`` holds; 0 if none does.

    Raises:
        ValueError: if the values are not one for each row, as they would broadcast.

    >>> float(masked_mean(jnp.array([1.0, 3.0, 99.0]), jnp.array([True, True, False])))
    2.0
    """
    if values.shape != mask.shape:
        raise ValueError(
            f"losses must be one per sample, {list(mask.shape)}, got {array_type(values)}: compare "
            "outputs and y of one shape, and average over all axes but the first"
        )
    keep = mask.astype(values.dtype)
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.maximum(jnp.sum(keep), 1)
