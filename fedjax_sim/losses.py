"""Losses and scores as per-sample values and exact counts."""

from __future__ import annotations

from typing import NamedTuple

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


class Tally(NamedTuple):
    """Counts from which every score of a classifier's accuracy follows.

    Attributes:
        correct: ``int32[M]``, right answers by true class.
        total: ``int32[M]``, samples by true class.
        loss: ``f32[]``, summed loss.
    """

    correct: Array
    total: Array
    loss: Array


def tally(logits: Array, labels: Array, losses: Array, mask: Array) -> Tally:
    """Counts right answers by class over the real rows of a minibatch.

    Args:
        logits: ``f32[B, M]``.
        labels: ``int32[B]``.
        losses: ``f32[B]``.
        mask: ``bool[B]``.

    >>> t = tally(jnp.eye(2), jnp.array([0, 0]), jnp.ones(2), jnp.array([True, True]))
    >>> t.correct.tolist(), t.total.tolist(), float(t.loss)
    ([1, 0], [2, 0], 2.0)
    """
    one_hot = jax.nn.one_hot(labels, logits.shape[-1], dtype=jnp.int32)
    one_hot = one_hot * mask[:, None].astype(jnp.int32)
    hit = (jnp.argmax(logits, axis=-1) == labels).astype(jnp.int32)
    return Tally(
        correct=jnp.sum(one_hot * hit[:, None], axis=0),
        total=jnp.sum(one_hot, axis=0),
        loss=jnp.sum(jnp.where(mask, losses, 0)),
    )
