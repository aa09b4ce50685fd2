"""How much each collected model counts: ``(n_k int32[P], seen int32[P]) -> a_k f32[P]``.

``seen`` are the samples of all clients that trained the model since it left the server; a model
that nobody trained does not count, whatever its weight.
"""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim.base import Array


def by_samples(samples: Array, seen: Array) -> Array:
    """n_k of the client visited last (FedAvg).

    >>> by_samples(jnp.array([3, 5]), jnp.array([9, 9])).tolist()
    [3.0, 5.0]
    """
    del seen
    return samples.astype(jnp.float32)


def by_seen(samples: Array, seen: Array) -> Array:
    """The samples of all clients visited (Astraea's mediators).

    >>> by_seen(jnp.array([3, 5]), jnp.array([9, 9])).tolist()
    [9.0, 9.0]
    """
    del samples
    return seen.astype(jnp.float32)


def equal(samples: Array, seen: Array) -> Array:
    """One each (RADFed).

    >>> equal(jnp.array([3, 5]), jnp.array([9, 9])).tolist()
    [1.0, 1.0]
    """
    del seen
    return jnp.ones(samples.shape, jnp.float32)
