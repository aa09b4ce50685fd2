"""Arithmetic on stacked pytrees: ``[S, *p]`` <-> ``[*p]``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import Array, PyTree
from fedjax_sim.engine import order
from fedjax_sim.engine.memory import check_room
from fedjax_sim.engine.vmapped import everywhere


def expand(v: Array, like: Array) -> Array:
    """Appends axes to ``v [S]`` until it broadcasts against ``like [S, *p]``."""
    return v.reshape(v.shape + (1,) * (like.ndim - v.ndim))


def stack_copies(tree: PyTree, copies: int, name: str | None = None) -> PyTree:
    """Repeats ``[*p]`` on a new leading axis: ``[S, *p]``.

    Args:
        tree: of arrays ``[*p]``.
        copies: S.
        name: the user's argument that sets S, for the error; None if there is no such argument.

    Raises:
        TooLargeError: if this machine has not the memory; says both sizes.

    >>> stack_copies({"w": jnp.arange(2.0)}, 3)["w"].shape
    (3, 2)
    """
    asked = "" if name is None else f"{name}: "
    check_room(f"{asked}{copies:,} copies of a model", copies * num_bytes(tree))
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (copies, *a.shape)), tree)


def take(tree: PyTree, rows: Array) -> PyTree:
    """Gathers rows of a stack: ``[S, *p]``, ``int32[R]`` -> ``[R, *p]``."""
    # a[rows] would ask of each row, for each leaf, whether it is negative.
    return jax.tree.map(lambda a: a.at[rows].get(wrap_negative_indices=False), tree)


def longer(tree: PyTree, more: int, *, axis: int = 0) -> PyTree:
    """Repeats the last entry of an axis; NumPy's arrays stay on the host.

    >>> longer(jnp.arange(3), 2).tolist()
    [0, 1, 2, 2, 2]
    """

    def one(a: Array) -> Array:
        xp: Any = np if isinstance(a, np.ndarray) else jnp
        last = a[(slice(None),) * axis + (slice(-1, None),)]
        longer: Array = xp.concatenate([a, xp.repeat(last, more, axis=axis)], axis=axis)
        return longer

    return jax.tree.map(one, tree)


def only(mask: PyTree, tree: PyTree) -> PyTree:
    """The leaves of ``tree`` for which ``mask`` is True; None, which is no leaf, for the others.

    >>> only({"w": True, "b": False}, {"w": 1, "b": 2})
    {'b': None, 'w': 1}
    """
    return jax.tree.map(lambda chosen, leaf: leaf if chosen else None, mask, tree)


def filled(some: PyTree, whole: PyTree) -> PyTree:
    """``some``, with leaves of ``whole`` in place of None.

    >>> filled({"w": 1, "b": None}, {"w": 3, "b": 4})
    {'b': 4, 'w': 1}
    """
    return jax.tree.map(
        lambda leaf, other: other if leaf is None else leaf,
        some,
        whole,
        is_leaf=lambda leaf: leaf is None,
    )


def select(condition: Array, on_true: PyTree, on_false: PyTree) -> PyTree:
    """One tree or the other, by ``condition bool[]``; NaN in the other does no harm.

    >>> select(jnp.array(True), {"w": jnp.float32(1)}, {"w": jnp.float32(2)})["w"].item()
    1.0
    """
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), on_true, on_false)


def select_rows(mask: Array, on_true: PyTree, on_false: PyTree) -> PyTree:
    """Row-wise choice between two stacks: ``bool[S]``, ``[S, *p]``, ``[S, *p]``."""
    return jax.tree.map(lambda a, b: jnp.where(expand(mask, a), a, b), on_true, on_false)


def mix(matrix: Array, stacked: PyTree) -> PyTree:
    """Weighted sums of the rows of a stack: ``f32[R, S]``, ``[S, *p]`` -> ``[R, *p]``.

    Or one: ``f32[S]``, ``[S, *p]`` -> ``[*p]``.

    >>> mix(jnp.array([[0.5, 0.5]]), {"w": jnp.array([1.0, 3.0])})["w"].tolist()
    [2.0]
    """
    devices = order.sharers()

    # A product: XLA's CPU reductions over a leading axis run at a tenth of the memory's speed.
    def product(columns: Array, rows: Array) -> Array:
        rows = rows.astype(wide(rows.dtype))
        return jnp.tensordot(columns.T.astype(rows.dtype), rows, 1, precision="highest")

    if devices == 1:
        sums = jax.tree.map(functools.partial(product, matrix.T), stacked)
    else:
        columns = order.blocks(matrix.T, devices)
        each = jax.tree.map(lambda a: jax.vmap(product)(columns, order.blocks(a, devices)), stacked)
        sums = order.device_sum(each)
    return jax.tree.map(lambda a, b: in_dtype(a, b.dtype), sums, stacked)


def row_sum(rows: Array) -> Array:
    """The sum over the rows of a stack, ``f[S, *p] -> f[*p]``; over devices in their order.

    >>> row_sum(jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [4.0, 6.0]
    """
    devices = order.sharers()
    if devices == 1:
        return jnp.sum(rows, axis=0)
    if rows.ndim == 1:
        return jnp.sum(order.whole(rows))
    total: Array = order.device_sum(jnp.sum(order.blocks(rows, devices), axis=1))
    return total


def interpolate(start: PyTree, end: PyTree, share: Array | float) -> PyTree:
    """``(1 - share) start + share end``; exactly ``end`` at a share of 1; keeps the dtypes.

    >>> float(interpolate(jnp.float32(2), jnp.float32(6), 0.25))
    3.0
    """

    def between(a: Array, b: Array) -> Array:
        dtype = wide(a.dtype)
        part = jnp.asarray(share, dtype)
        return in_dtype((1 - part) * a.astype(dtype) + part * b.astype(dtype), a.dtype)

    return jax.tree.map(between, start, end)


def scale(factor: Array | float, tree: PyTree) -> PyTree:
    """``factor w``, in the dtypes of w.

    >>> float(scale(0.5, jnp.float32(3)))
    1.5
    """
    return jax.tree.map(lambda a: jnp.asarray(factor).astype(a.dtype) * a, tree)


def add(tree: PyTree, step: PyTree) -> PyTree:
    """``w + step``, in the dtypes of w."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), tree, step)


def sum_of(tree: PyTree, other: PyTree) -> PyTree:
    """``w + v``, leaf by leaf; strict about dtypes, unlike :func:`add`."""
    return jax.tree.map(jnp.add, tree, other)


def subtract(tree: PyTree, other: PyTree) -> PyTree:
    """``w - v``, leaf by leaf."""
    return jax.tree.map(jnp.subtract, tree, other)


def num_bytes(tree: PyTree) -> int:
    """Size in bytes of a pytree of arrays or ``ShapeDtypeStruct``.

    >>> num_bytes({"w": jnp.zeros((2, 3), jnp.float32)})
    24
    """
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def norm(tree: PyTree) -> Array:
    """Euclidean norm over all leaves, ``f32[]``.

    >>> float(norm({"a": jnp.array([3.0]), "b": jnp.array([[4.0]])}))
    5.0
    """
    squares = [jnp.vdot(a, a) for a in jax.tree.leaves(tree)]
    wide = jnp.float64 if any(s.dtype == jnp.float64 for s in squares) else jnp.float32
    return jnp.sqrt(sum((s.astype(wide) for s in squares), jnp.zeros((), wide)))


def norms(stacked: PyTree) -> Array:
    """Euclidean norm of each row over all leaves, ``[S, *p] -> f32[S]``.

    >>> norms({"w": jnp.array([[3.0, 4.0], [0.0, 0.0]])}).tolist()
    [5.0, 0.0]
    """
    return jax.vmap(norm)(stacked)


def mean(stacked: PyTree, weights: Array) -> PyTree:
    r"""Weighted mean of the rows, :math:`\sum_k \frac{a_k}{\sum_j a_j} w_k`.

    Args:
        stacked: ``[S, *p]``.
        weights: ``f32[S]``, a_k at least 0, at least one positive; a row of weight 0 is absent.

    Returns:
        ``[*p]``, in the dtypes of ``stacked``.

    Source: McMahan et al. 2017 <https://arxiv.org/abs/1602.05629>, Algorithm 1.

    >>> mean(jnp.array([1.0, 4.0, jnp.nan]), jnp.array([1.0, 2.0, 0.0])).tolist()
    3.0
    """
    share = weights / row_sum(weights)
    return present_only(functools.partial(mix, share), stacked, weights)


def present_only(reduce: Callable[[PyTree], PyTree], stacked: PyTree, weights: Array) -> PyTree:
    """``reduce(stacked)``, which may hold NaN in rows of weight 0: they are zeros to ``reduce``.

    Args:
        reduce: to one pytree.
        stacked: ``[S, *p]``.
        weights: ``f32[S]``, at least 0.
    """

    def zeroed(rows: PyTree) -> PyTree:
        return jax.tree.map(lambda a: jnp.where(expand(weights, a) > 0, a, 0), rows)

    # 0 * NaN is NaN. The copy of the stack is made only if a row is absent.
    nobody_is_absent = everywhere(jnp.all(weights > 0))
    return jax.lax.cond(nobody_is_absent, reduce, lambda rows: reduce(zeroed(rows)), stacked)


def typed_like(new: PyTree, old: PyTree) -> PyTree:
    """In the types that a loop carries: a norm may take the statistics of bf16 in float32."""
    return jax.tree.map(lambda a, b: a if a.dtype == b.dtype else a.astype(b.dtype), new, old)


def wide(dtype: jnp.dtype) -> jnp.dtype:
    """The type that sums are taken in: float64 for itself, float32 for all others.

    >>> wide(jnp.dtype("bfloat16"))
    dtype('float32')
    """
    return dtype if dtype == jnp.float64 else jnp.dtype(jnp.float32)


def in_dtype(values: Array, dtype: jnp.dtype) -> Array:
    """Counters (Adam's, say) are rounded: cast alone, the mean of 3 and 3 may be 2."""
    whole = jnp.issubdtype(dtype, jnp.integer)
    return (jnp.round(values) if whole else values).astype(dtype)
