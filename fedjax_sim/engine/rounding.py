"""Weights in bfloat16, with stochastic rounding to preserve small steps."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, PyTree
from fedjax_sim.engine.batches import hashed


def nearest(weights: PyTree) -> PyTree:
    """Rounds float32 weights to the nearest bfloat16; leaves other dtypes alone."""
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16) if w.dtype == jnp.float32 else w, weights)


def rounded(key: Array, weights: PyTree) -> PyTree:
    """Rounds float32 weights up or down to bfloat16 at random: the mean is the weight.

    A weight that bfloat16 can represent does not change, nor do leaves of other dtypes. Random bits
    come from the hash that orders a client's samples: threefry takes about as long as a step on a
    GPU.

    Source: Gupta et al. 2015 <https://arxiv.org/abs/1502.02551>, section 3.

    >>> ones = jnp.full(1000, 1 + 2**-10)  # an eighth of the way to the next bfloat16
    >>> found = rounded(jax.random.key(0), ones).astype(jnp.float32)
    >>> sorted(set(found.tolist())), round(float(found.mean() - 1) * 2**10, 1)
    ([1.0, 1.0078125], 1.0)
    """
    words = jax.random.key_data(key)
    high, low = words[..., 0], words[..., -1]
    leaves, structure = jax.tree.flatten(weights)
    before, new = 0, []
    for w in leaves:
        if w.dtype == jnp.float32:
            slot = before + jnp.arange(w.size, dtype=jnp.uint32).reshape(w.shape)
            noise = hashed(hashed(slot + high) ^ low) & jnp.uint32(0xFFFF)
            bits = (jax.lax.bitcast_convert_type(w, jnp.uint32) + noise) >> jnp.uint32(16)
            half = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
            before += w.size
            # NaN would overflow: on GPUs all its bits are ones.
            w = jnp.where(jnp.isfinite(w), half, w.astype(jnp.bfloat16))
        new.append(w)
    return jax.tree.unflatten(structure, new)
