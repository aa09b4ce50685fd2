"""Arithmetic on stacked pytrees: ``[S, *p]`` <-> ``[*p]``."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import Array, PyTree
from fedjax_sim.engine import order
from fedjax_sim.engine.memory import check_memory_for
from fedjax_sim.engine.vmapped import everywhere

__all__ = [
    "add",
    "expand",
    "interpolate",
    "mean",
    "norm",
    "norms",
    "row_sum",
    "scale",
    "subtract",
    "sum_of",
]


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
        TooLargeError: if this machine does not have enough memory; names both sizes.

    >>> stack_copies({"w": jnp.arange(2.0)}, 3)["w"].shape
    (3, 2)
    """
    asked = "" if name is None else f"{name}: "
    check_memory_for(f"{asked}{copies:,} copies of a model", copies * num_bytes(tree))
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (copies, *a.shape)), tree)


def take(tree: PyTree, rows: Array) -> PyTree:
    """Gathers rows of a stack: ``[S, *p]``, ``int32[R]`` -> ``[R, *p]``."""
    # a[rows] would test for each row and leaf whether the index is negative.
    return jax.tree.map(lambda a: a.at[rows].get(wrap_negative_indices=False), tree)


def row_shapes(tree: PyTree, rows: int) -> PyTree:
    """Returns the shapes and dtypes of so many rows of a stack."""
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype), tree)


def longer(tree: PyTree, more: int, *, axis: int = 0) -> PyTree:
    """Repeats the last entry of an axis ``more`` times; NumPy arrays stay on the host.

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
    """Returns the leaves of ``tree`` where ``mask`` is True; None, which is not a leaf, elsewhere.

    >>> only({"w": True, "b": False}, {"w": 1, "b": 2})
    {'b': None, 'w': 1}
    """
    return jax.tree.map(lambda chosen, leaf: leaf if chosen else None, mask, tree)


def masked(mask: PyTree, tree: PyTree) -> PyTree:
    """Returns ``tree`` with 0 in the entries where ``mask``, of booleans, is False."""
    return jax.tree.map(lambda has, a: jnp.where(has, a, jnp.zeros((), a.dtype)), mask, tree)


def filled(some: PyTree, whole: PyTree) -> PyTree:
    """Returns ``some`` with None replaced by the leaves of ``whole``."""
    return jax.tree.map(
        lambda leaf, other: other if leaf is None else leaf,
        some,
        whole,
        is_leaf=lambda leaf: leaf is None,
    )


def select(condition: Array, on_true: PyTree, on_false: PyTree) -> PyTree:
    """Selects one of two trees by ``condition bool[]``; NaN in the other has no effect."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), on_true, on_false)


def select_rows(mask: Array, on_true: PyTree, on_false: PyTree) -> PyTree:
    """Selects rows of two stacks: ``bool[S]``, ``[S, *p]``, ``[S, *p]``."""
    return jax.tree.map(lambda a, b: jnp.where(expand(mask, a), a, b), on_true, on_false)


def select_updated(condition: Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns ``new``; where ``condition bool[]`` does not hold, it may be ``old``.

    On CUDA, XLA only merges kernels that read the same array. Under a vmap ``condition`` is one, so
    all leaves of the same shape are updated by one kernel. A leaf whose shape is unique is left
    alone, because XLA can compute its update in the product that gives its gradient.
    """
    leaves, structure = jax.tree.flatten(new)
    count = Counter(leaf.shape for leaf in leaves)

    def merged(condition: Array, new: list[Array], old: list[Array]) -> list[Array]:
        pairs = zip(new, old, strict=True)
        return [jnp.where(condition, a, b) if count[a.shape] > 1 else a for a, b in pairs]

    out: list[Array] = jax.lax.platform_dependent(
        condition, leaves, jax.tree.leaves(old), cuda=merged, default=lambda _, new, __: new
    )
    return jax.tree.unflatten(structure, out)


def mix(matrix: Array, stacked: PyTree) -> PyTree:
    """Computes weighted sums of the rows of a stack: ``f32[R, S]``, ``[S, *p]`` -> ``[R, *p]``.

    A vector computes one sum: ``f32[S]``, ``[S, *p]`` -> ``[*p]``.

    >>> mix(jnp.array([[0.5, 0.5]]), {"w": jnp.array([1.0, 3.0])})["w"].tolist()
    [2.0]
    """
    devices = order.ordered_devices()

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
    """Sums the rows of a stack, ``f[S, *p] -> f[*p]``; over devices in their order.

    >>> row_sum(jnp.array([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [4.0, 6.0]
    """
    devices = order.ordered_devices()
    if devices == 1:
        return jnp.sum(rows, axis=0)
    if rows.ndim == 1:
        return jnp.sum(order.keep_whole(rows))
    total: Array = order.device_sum(jnp.sum(order.blocks(rows, devices), axis=1))
    return total


def interpolate(start: PyTree, end: PyTree, share: Array | float) -> PyTree:
    """Returns ``(1 - share) start + share end``; exactly ``end`` at a share of 1; keeps dtypes.

    >>> float(interpolate(jnp.float32(2), jnp.float32(6), 0.25))
    3.0
    """

    def between(a: Array, b: Array) -> Array:
        dtype = wide(a.dtype)
        part = jnp.asarray(share, dtype)
        return in_dtype((1 - part) * a.astype(dtype) + part * b.astype(dtype), a.dtype)

    return jax.tree.map(between, start, end)


def scale(factor: Array | float, tree: PyTree) -> PyTree:
    """Returns ``factor w``, in the dtypes of w; integers are rounded.

    >>> float(scale(0.5, jnp.float32(3))), int(scale(0.8, jnp.int32(5)))
    (1.5, 4)
    """

    def scaled(a: Array) -> Array:
        if jnp.issubdtype(a.dtype, jnp.integer):  # the factor itself would become 0
            return in_dtype(jnp.asarray(factor, jnp.float32) * a.astype(jnp.float32), a.dtype)
        return jnp.asarray(factor).astype(a.dtype) * a

    return jax.tree.map(scaled, tree)


def add(tree: PyTree, step: PyTree) -> PyTree:
    """Returns ``w + step``, in the dtypes of w."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), tree, step)


def sum_of(tree: PyTree, other: PyTree) -> PyTree:
    """Returns ``w + v``, leaf by leaf; does not cast, unlike :func:`add`."""
    return jax.tree.map(jnp.add, tree, other)


def subtract(tree: PyTree, other: PyTree) -> PyTree:
    """Returns ``w - v``, leaf by leaf."""
    return jax.tree.map(jnp.subtract, tree, other)


def num_bytes(tree: PyTree) -> int:
    """Returns the size in bytes of a pytree of arrays or ``ShapeDtypeStruct``."""
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


def norm(tree: PyTree) -> Array:
    """Computes the Euclidean norm over all leaves, ``f32[]``.

    >>> float(norm({"a": jnp.array([3.0]), "b": jnp.array([[4.0]])}))
    5.0
    """
    squares = [jnp.vdot(a, a) for a in jax.tree.leaves(tree)]
    wide = jnp.float64 if any(s.dtype == jnp.float64 for s in squares) else jnp.float32
    return jnp.sqrt(sum((s.astype(wide) for s in squares), jnp.zeros((), wide)))


def norms(stacked: PyTree) -> Array:
    """Computes the Euclidean norm of each row over all leaves, ``[S, *p] -> f32[S]``.

    >>> norms({"w": jnp.array([[3.0, 4.0], [0.0, 0.0]])}).tolist()
    [5.0, 0.0]
    """
    return jax.vmap(norm)(stacked)


def mean(stacked: PyTree, weights: Array) -> PyTree:
    r"""Computes the weighted mean of the rows, :math:`\sum_k \frac{a_k}{\sum_j a_j} w_k`.

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
    """Computes ``reduce(stacked)`` with zeros in rows of weight 0, which may hold NaN.

    Args:
        reduce: function of the stack.
        stacked: ``[S, *p]``.
        weights: ``f32[S]``, at least 0.
    """

    def zeroed(rows: PyTree) -> PyTree:
        return jax.tree.map(lambda a: jnp.where(expand(weights, a) > 0, a, 0), rows)

    # 0 * NaN is NaN. The stack is copied only if a row is absent.
    all_present = everywhere(jnp.all(weights > 0))
    return jax.lax.cond(all_present, reduce, lambda rows: reduce(zeroed(rows)), stacked)


def squared_distances(stacked: PyTree, point: PyTree) -> Array:
    """Returns squared distances of all rows ``[P, *p]`` to a point ``[*p]``; inf in place of NaN.

    >>> squared_distances(jnp.array([[3.0, 4.0], [jnp.nan, 0.0]]), jnp.zeros(2)).tolist()
    [25.0, inf]
    """

    def leaf(rows: Array, at: Array) -> Array:
        square = jnp.square((rows - at[None]).astype(wide(rows.dtype)))
        return jnp.sum(square, axis=tuple(range(1, rows.ndim))).astype(jnp.float32)

    leaves = jax.tree.leaves(jax.tree.map(leaf, stacked, point))
    total = sum(leaves[1:], leaves[0])
    return jnp.where(jnp.isnan(total), jnp.inf, total)


def pairwise_squared_distances(stacked: PyTree) -> Array:
    """Returns squared distances between all rows ``[P, *p]``, ``f32[P, P]``; inf in place of NaN.

    Row by row: as fast as a product of the centred stack with itself, and without cancellation.

    >>> pairwise_squared_distances(jnp.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[0.0, 25.0], [25.0, 0.0]]
    """
    return jax.lax.map(lambda row: squared_distances(stacked, row), stacked)


def typed_like(new: PyTree, old: PyTree) -> PyTree:
    """Casts to the dtypes of ``old``: a norm may compute statistics of bf16 in float32."""
    return jax.tree.map(lambda a, b: a if a.dtype == b.dtype else a.astype(b.dtype), new, old)


def wide(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype of sums: float64 for float64, float32 for all others."""
    return dtype if dtype == jnp.float64 else jnp.dtype(jnp.float32)


def in_dtype(values: Array, dtype: jnp.dtype) -> Array:
    """Casts values; rounds for integers (Adam's counters): a cast mean of 3 and 3 may be 2."""
    whole = jnp.issubdtype(dtype, jnp.integer)
    return (jnp.round(values) if whole else values).astype(dtype)
