"""Arithmetic on stacked pytrees: ``[S, *p]`` <-> ``[*p]``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, PyTree


def expand(v: Array, like: Array) -> Array:
    """Appends axes to ``v [S]`` until it broadcasts against ``like [S, *p]``."""
    return v.reshape(v.shape + (1,) * (like.ndim - v.ndim))


def stack_copies(tree: PyTree, copies: int) -> PyTree:
    """Repeats ``[*p]`` on a new leading axis: ``[S, *p]``.

    >>> stack_copies({"w": jnp.arange(2.0)}, 3)["w"].shape
    (3, 2)
    """
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (copies, *a.shape)), tree)


def take(tree: PyTree, rows: Array) -> PyTree:
    """Gathers rows of a stack: ``[S, *p]``, ``int32[R]`` -> ``[R, *p]``."""
    return jax.tree.map(lambda a: a[rows], tree)


def select_rows(mask: Array, on_true: PyTree, on_false: PyTree) -> PyTree:
    """Row-wise choice between two stacks: ``bool[S]``, ``[S, *p]``, ``[S, *p]``."""
    return jax.tree.map(lambda a, b: jnp.where(expand(mask, a), a, b), on_true, on_false)


def num_bytes(tree: PyTree) -> int:
    """Size in bytes of a pytree of arrays or ``ShapeDtypeStruct``.

    >>> num_bytes({"w": jnp.zeros((2, 3), jnp.float32)})
    24
    """
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))
