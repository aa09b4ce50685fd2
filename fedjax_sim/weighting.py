"""How much each collected model counts."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim.base import Array


def by_samples(samples: Array) -> Array:
    """n_k: ``int32[S]`` -> ``f32[S]`` (FedAvg).

    >>> by_samples(jnp.array([3, 5])).tolist()
    [3.0, 5.0]
    """
    return samples.astype(jnp.float32)


def equal(samples: Array) -> Array:
    """One each: ``int32[S]`` -> ``f32[S]`` (RADFed).

    >>> equal(jnp.array([3, 5])).tolist()
    [1.0, 1.0]
    """
    return jnp.ones(samples.shape, jnp.float32)
