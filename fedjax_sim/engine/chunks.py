"""Runs the tasks of one device in chunks under vmap, with results stacked or summed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, PyTree
from fedjax_sim.engine import tree
from fedjax_sim.engine.vmapped import everywhere


class Addend(NamedTuple):
    """A weighted term of a sum."""

    weight: Array  # f32[], at least 0; if 0, the values may be NaN
    values: PyTree  # [*p]


def run_in_chunks(
    fn: Callable[[PyTree], tuple[PyTree, Addend]],
    tasks: PyTree,
    entry: Array,
    entries: int,
    chunk: int | None,
) -> tuple[PyTree, PyTree]:
    """Runs ``fn`` for each task ``[T, ...]``; it returns a result, and an addend of a sum.

    ``entry int32[T]`` is the index of each task's sum. As many tasks as ``chunk`` run at once under
    vmap; 1: no vmap, None: all.

    Returns:
        The results ``[T, ...]``, and the weighted sums ``[entries, *p]``, in float32 at least. Only
        the values of one chunk are in memory at a time.

    >>> out, sums = run_in_chunks(
    ...     lambda x: (2 * x, Addend(jnp.float32(0.5), x)),
    ...     jnp.arange(4.0), jnp.array([0, 0, 1, 1]), entries=2, chunk=3,
    ... )
    >>> out.tolist(), sums.tolist()
    ([0.0, 2.0, 4.0, 6.0], [0.5, 2.5])
    """
    count = len(entry)
    size = min(chunk or count, count)
    # ``fn`` is the local training, which takes longest to trace: trace it once.
    one = tree.take(tasks, jnp.int32(0))
    converted, closed = jax.closure_convert(fn, one)

    def traced(task: PyTree) -> tuple[PyTree, Addend]:
        out: tuple[PyTree, Addend] = converted(task, *closed)
        return out

    batch = traced if size == 1 else jax.vmap(traced)

    def step(sums: PyTree, work: tuple[PyTree, Array]) -> tuple[PyTree, PyTree]:
        tasks, entry = work
        out, addend = batch(tasks)
        return plus(sums, entry, addend), out

    shapes = jax.eval_shape(traced, one)[1].values
    sums = jax.tree.map(lambda a: jnp.zeros((entries, *a.shape), tree.wide(a.dtype)), shapes)
    work = (tasks, entry)
    if size == 1:
        sums, out = jax.lax.scan(step, sums, work)
        return out, sums
    if size == count:
        sums, out = step(sums, work)
        return out, sums
    whole = count // size * size
    blocks = jax.tree.map(lambda a: a[:whole].reshape(-1, size, *a.shape[1:]), work)
    sums, out = jax.lax.scan(step, sums, blocks)
    out = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), out)
    if whole < count:
        sums, rest = step(sums, jax.tree.map(lambda a: a[whole:], work))
        out = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), out, rest)
    return out, sums


def ran_in_chunks(steps: Array, chunk: int | None) -> Array:
    """Returns the steps that a device runs or waits for each task: the longest of its chunk.

    >>> ran_in_chunks(jnp.array([5, 1, 2]), chunk=2).tolist()
    [5, 5, 2]
    """
    size = min(chunk or steps.size, steps.size)
    number = jnp.arange(steps.size, dtype=jnp.int32) // size
    return jax.ops.segment_max(steps, number, num_segments=-(-steps.size // size))[number]


def plus(sums: PyTree, entry: Array, addend: Addend) -> PyTree:
    """Adds the addend of one task, or of several, ``[L]``, to the sums."""
    weight = addend.weight
    if weight.ndim == 0:

        def plus_one(total: Array, value: Array) -> Array:
            value = weight.astype(total.dtype) * value.astype(total.dtype)
            return total.at[entry].add(jnp.where(weight > 0, value, 0))

        return jax.tree.map(plus_one, sums, addend.values)

    def plus_all(values: PyTree) -> PyTree:
        return jax.tree.map(plus_rows, sums, values)

    def plus_rows(total: Array, values: Array) -> Array:
        # A product: a scatter of whole models is slow on accelerators and in an undefined order.
        places = jnp.arange(len(total), dtype=entry.dtype)[:, None] == entry[None]
        matrix = jnp.where(places, weight[None], 0).astype(total.dtype)
        values = values.astype(total.dtype)
        return total + jnp.einsum("es,s...->e...", matrix, values, precision="highest")

    plain = tree.present_only(plus_all, addend.values, weight)
    if all(len(total) == 1 for total in jax.tree.leaves(sums)):
        return plain

    def plus_separately(values: PyTree) -> PyTree:
        return jax.tree.map(plus_finite, sums, values)

    def plus_finite(total: Array, values: Array) -> Array:
        flat = values.reshape(len(values), -1)
        finite = jnp.all(jnp.isfinite(flat), axis=1)
        added = plus_rows(total, jnp.where(tree.expand(finite, values), values, 0))
        places = jnp.arange(len(total), dtype=entry.dtype)[:, None] == entry[None]
        lost = jnp.any(places & (~finite & (weight > 0))[None], axis=1)
        return jnp.where(tree.expand(lost, added), jnp.nan, added)

    # In the product 0 * NaN is NaN: a diverged run must not spoil the others.
    finite = [jnp.all(jnp.isfinite(total)) for total in jax.tree.leaves(plain)]
    whole = everywhere(jnp.all(jnp.stack(finite)))
    return jax.lax.cond(whole, lambda _: plain, plus_separately, addend.values)
