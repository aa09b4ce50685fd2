"""Weights of the collected models: ``(n_k int32[P], samples_visited int32[P]) -> a_k f32[P]``.

``samples_visited`` counts the samples of all clients that trained the model since it left the
server. A model that no client trained does not count, even if its weight is positive.
"""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim.base import Array

__all__ = ["by_samples", "by_samples_visited", "equal"]


def by_samples(samples: Array, samples_visited: Array) -> Array:
    """Returns n_k of the client visited last (FedAvg).

    >>> by_samples(jnp.array([3, 5]), jnp.array([9, 9])).tolist()
    [3.0, 5.0]
    """
    return samples.astype(jnp.float32)


def by_samples_visited(samples: Array, samples_visited: Array) -> Array:
    """Returns the samples of all clients visited (Astraea's mediators).

    >>> by_samples_visited(jnp.array([3, 5]), jnp.array([9, 9])).tolist()
    [9.0, 9.0]
    """
    return samples_visited.astype(jnp.float32)


def equal(samples: Array, samples_visited: Array) -> Array:
    """Returns 1 for each model (RADFed).

    >>> equal(jnp.array([3, 5]), jnp.array([9, 9])).tolist()
    [1.0, 1.0]
    """
    return jnp.ones(samples.shape, jnp.float32)
