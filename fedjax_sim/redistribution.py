"""Where models go between two local rounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array


def keep(key: Array, slots: int) -> Array:
    """Every model stays in its slot.

    >>> keep(jax.random.key(0), 3).tolist()
    [0, 1, 2]
    """
    del key
    return jnp.arange(slots, dtype=jnp.int32)


def permute(key: Array, slots: int) -> Array:
    """A uniformly random permutation: slot i takes the model of slot ``permute(...)[i]``.

    Source: RADFed, Algorithm 1 line 6.

    >>> sorted(permute(jax.random.key(0), 4).tolist())
    [0, 1, 2, 3]
    """
    return jax.random.permutation(key, slots).astype(jnp.int32)
