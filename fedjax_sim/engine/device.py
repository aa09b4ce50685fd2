"""The tasks of one device, in chunks or in lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, PyTree
from fedjax_sim.engine import tree
from fedjax_sim.engine.chunks import Addend, ran_in_chunks, run_in_chunks
from fedjax_sim.engine.lanes import InSteps, run_in_lanes
from fedjax_sim.engine.vmapped import opened

TaskFn = Callable[[PyTree, PyTree, PyTree, PyTree], PyTree]
"""``(constants, common, own, task) -> result``."""


class Work(NamedTuple):
    """What tasks have of their own, ``[T]``.

    Attributes:
        common: ``int32[T]``, which entry of the pool of common values is theirs.
        own: ``[T, *p]``, one for each; () for none.
        task: ``[T, ...]``, small: keys and integers.
        cost: ``int32[T]``, about how long it takes.
    """

    common: Array
    own: PyTree
    task: PyTree
    cost: Array


def pooled(
    fn: TaskFn | InSteps,
    constants: PyTree,
    common: PyTree,
    own: PyTree,
    tasks: PyTree,
    *,
    lanes: bool,
) -> tuple[TaskFn | InSteps, PyTree]:
    """``fn`` as a function of an entry of a pool, in place of ``common``; and that pool, of one.

    What ``fn`` closes over may be batched by a vmap from outside, as a learning rate: then it is
    one more value that an index of the vmap has of its own.
    """
    example = constants, common, *jax.tree.map(lambda a: a[0], (own, tasks))
    called: TaskFn | InSteps
    closed: PyTree
    if isinstance(fn, InSteps):
        called, closed = fn.opened(*example, lanes=lanes)
    else:
        called, closed = opened(fn, *example)

    def of_entry(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
        def of(constants: PyTree, entry: PyTree, *rest: PyTree) -> PyTree:
            common, closed, _ = entry
            return fn(closed, constants, common, *rest)

        return of

    one = called.changed(of_entry) if isinstance(called, InSteps) else of_entry(called)
    # Never without an array: sums of several runs are kept apart by their entries of the pool.
    return one, tree.stack_copies((common, closed, jnp.zeros(())), 1)


def run_on_device(
    fn: TaskFn | InSteps,
    constants: PyTree,
    pool: PyTree,
    work: Work,
    *,
    chunk: int | None,
    lanes: int | None,
    summed: bool,
) -> tuple[PyTree, PyTree, Array]:
    """All tasks: ``[T, ...]``, the sums by entry of the pool, and the steps that it cost.

    Args:
        fn: what to do, see :func:`pooled`.
        constants: the same for all.
        pool: ``[E, *p]``.
        work: ``[T, ...]``.
        chunk: tasks at once, unless there are lanes; None for all.
        lanes: L, for tasks that can stop between two steps; if they are not fewer than the tasks,
          all are trained at once. None or 0: chunks.
        summed: see :meth:`Execution.run <fedjax_sim.engine.execution.Execution.run>`.

    Returns:
        The results, the sums, and ``int32[T]``, steps run or waited on behalf of each task; zeros
        if nobody knows, because ``fn`` is not ``InSteps``.
    """
    count, entries = len(work.common), len(jax.tree.leaves(pool)[0])

    def paired(out: PyTree) -> PyTree:
        return out if summed else (out, Addend(jnp.ones(()), ()))

    whole: Callable[..., PyTree] = fn.whole if isinstance(fn, InSteps) else fn
    if isinstance(fn, InSteps):
        if lanes and lanes < count:
            end = fn.end

            def of(rows: Array) -> tuple[PyTree, ...]:
                entry, own, task = tree.take((work.common, work.own, work.task), rows)
                return tree.take(pool, entry), own, task

            def ended(*args: Any) -> PyTree:
                return paired(end(*args))

            in_steps = fn._replace(end=ended)
            return run_in_lanes(in_steps, constants, of, work.cost, work.common, entries, lanes)
        chunk = None if lanes else chunk

    def one(work: Work) -> tuple[PyTree, Addend]:
        given: tuple[PyTree, Addend] = paired(
            whole(constants, tree.take(pool, work.common), work.own, work.task)
        )
        return given

    out, sums = run_in_chunks(one, work, work.common, entries, chunk)
    steps = fn.steps(out) if isinstance(fn, InSteps) else jnp.zeros(count, jnp.int32)
    return out, sums, ran_in_chunks(steps, chunk)
