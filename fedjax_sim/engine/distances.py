"""Squared distances between the models of a stack.

Row by row: as fast as a product of the centred stack with itself, and nothing cancels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, PyTree
from fedjax_sim.engine import tree


def squared_between(stacked: PyTree) -> Array:
    """Between all rows ``[P, *p]``: ``f32[P, P]``, infinite in place of NaN.

    >>> squared_between(jnp.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.0, 25.0], [25.0, 0.0]]
    """
    return jax.lax.map(lambda row: squared_from(stacked, row), stacked)


def squared_from(stacked: PyTree, point: PyTree) -> Array:
    """From every row ``[P, *p]`` to a point ``[*p]``: ``f32[P]``, infinite in place of NaN.

    >>> squared_from(jnp.array([[3.0, 4.0], [jnp.nan, 0.0]]), jnp.zeros(2)).tolist()
    [25.0, inf]
    """

    def leaf(rows: Array, at: Array) -> Array:
        square = jnp.square((rows - at[None]).astype(tree.wide(rows.dtype)))
        return jnp.sum(square, axis=tuple(range(1, rows.ndim))).astype(jnp.float32)

    leaves = jax.tree.leaves(jax.tree.map(leaf, stacked, point))
    total = sum(leaves[1:], leaves[0])
    return jnp.where(jnp.isnan(total), jnp.inf, total)
