"""Losses per sample."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array


def cross_entropy(logits: Array, labels: Array) -> Array:
    r"""Softmax cross-entropy per sample, :math:`\ell = -\log p_y`.

    Args:
        logits: ``f32[B, M]``.
        labels: ``int32[B]`` in ``0..M-1``.

    Returns:
        ``f32[B]``, nats.

    >>> float(cross_entropy(jnp.zeros((1, 4)), jnp.zeros(1, jnp.int32))[0])  # log 4
    1.3862943649291992
    """
    log_p = jax.nn.log_softmax(logits)
    # A product with the one-hot label: a gather's gradient is a scatter, slow on every backend.
    return -jnp.sum(log_p * jax.nn.one_hot(labels, logits.shape[-1], dtype=log_p.dtype), axis=-1)


def masked_mean(values: Array, mask: Array) -> Array:
    """Mean of ``f32[B]`` over the rows where ``mask bool[B]`` holds (at least one).

    >>> float(masked_mean(jnp.array([1.0, 3.0, 99.0]), jnp.array([True, True, False])))
    2.0
    """
    keep = mask.astype(values.dtype)
    return jnp.sum(jnp.where(mask, values, 0)) / jnp.sum(keep)
