"""Rules for an outer vmap over code that runs a stack of tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from fedjax_sim.base import Array, PyTree


def closed_over(fn: Callable[..., PyTree], *example: Any) -> list[Array]:
    """Returns the traced floats that ``fn`` closes over; traces it to find them."""
    closed: list[Array] = jax.closure_convert(fn, *example)[1]
    return closed


def lift_closure(
    fn: Callable[..., PyTree], *example: Any
) -> tuple[Callable[..., PyTree], list[Array]]:
    """Returns ``fn`` with its :func:`closed_over` values as first argument, and these values.

    >>> def doubled(rate):
    ...     fn, closed = lift_closure(lambda x: rate * x, 1.0)
    ...     return fn(closed, 2.0)
    >>> float(jax.jit(doubled)(3.0))
    6.0
    """
    fn = jax.jit(fn, inline=True)  # the same program, but JAX keeps the trace
    closed = closed_over(fn, *example)

    def called(values: list[Array], *args: Any) -> PyTree:
        if not values:
            return fn(*args)
        inner, _ = jax.closure_convert(fn, *args)
        return inner(*args, *values)

    return called, closed


@custom_vmap
def everywhere(condition: Array) -> Array:
    """Returns whether ``condition bool[]`` holds at all indices of every outer vmap.

    A ``lax.cond`` on it stays a branch under vmap. With a batched condition, both branches would
    run and a select would choose.

    >>> jax.vmap(everywhere)(jnp.array([True, False])).tolist()
    [False, False]
    """
    return condition


@everywhere.def_vmap
def _everywhere(size: int, batched: list[bool], condition: Array) -> tuple[Array, bool]:
    del size, batched
    return everywhere(jnp.all(condition)), False


@custom_vmap
def greatest(value: Array) -> Array:
    """Returns the largest ``value int32[]`` over all indices of every outer vmap.

    A ``lax.switch`` on it stays a branch under vmap, like a ``lax.cond`` on :func:`everywhere`.
    """
    return value


@greatest.def_vmap
def _greatest(size: int, batched: list[bool], value: Array) -> tuple[Array, bool]:
    del size, batched
    return greatest(jnp.max(value)), False


def merge_vmap_axes(run: Callable[[PyTree, PyTree, PyTree], PyTree]) -> Callable[..., PyTree]:
    """Merges axes that vmap adds to ``tasks`` into its leading axis, instead of batching ``run``.

    Batching would turn a map over clients into a map over stacks of seeds, and its convolutions
    into grouped ones. In ``run(constants, pool, work)``, pools are merged too, and the entries of
    the tasks shifted to match.

    The merged axis starts with the first tasks of all indices, so any part of it has tasks of each.
    """

    @custom_vmap
    def flat(constants: PyTree, pool: PyTree, tasks: PyTree) -> PyTree:
        return run(constants, pool, tasks)

    @flat.def_vmap
    def _(
        size: int, batched: PyTree, constants: PyTree, pool: PyTree, tasks: PyTree
    ) -> tuple[PyTree, PyTree]:
        if any(jax.tree.leaves(batched[0])):
            raise ValueError("pooled arrays cannot be batched by vmap: pool them, batch the index")

        def merged(a: Array, is_batched: bool) -> Array:
            whole = a if is_batched else jnp.broadcast_to(a, (size, *a.shape))
            return jnp.swapaxes(whole, 0, 1).reshape(-1, *whole.shape[2:])

        def split(a: Array) -> Array:
            return jnp.swapaxes(a.reshape(-1, size, *a.shape[1:]), 0, 1)

        tasks = jax.tree.map(merged, tasks, batched[2])
        if jax.tree.leaves(pool):
            pool = jax.tree.map(merged, pool, batched[1])
            index = jnp.arange(len(tasks.common), dtype=jnp.int32) % size
            tasks = tasks._replace(common=size * tasks.common + index)
        out = jax.tree.map(split, flat(constants, pool, tasks))
        return out, jax.tree.map(lambda _: True, out)

    return flat
