"""Deals tasks to devices, and runs the tasks of one device in chunks or in lanes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr
from numpy.typing import NDArray

from fedjax_sim.base import Array, PyTree
from fedjax_sim.engine import tree
from fedjax_sim.engine.chunks import Addend, ran_in_chunks, run_in_chunks
from fedjax_sim.engine.lanes import InSteps, run_in_lanes
from fedjax_sim.engine.memory import forward_work
from fedjax_sim.engine.vmapped import lift_closure

_DRAWS = 64

_KERNELS = 10
"""Kernels of a step for each matrix product or convolution of the forward pass.

Compiled for an H100, W1 to W5 and W7 have 7 to 21 (``python -m benchmarks.aot --targets h100``).
"""
_PASSES = 6, 2
"""How often a step reads or writes the weights, and the arrays that the forward pass computes."""
_LAUNCH = 2.2e-6
"""Seconds of a small kernel."""
_SPEED = 3e12
"""Bytes a second that a large kernel moves."""

TaskFn = Callable[[PyTree, PyTree, PyTree, PyTree], PyTree]
"""``(constants, common, own, task) -> result``."""


class Work(NamedTuple):
    """The tasks, ``[T]``."""

    common: Array  # int32[T], index into the pool of common values
    own: PyTree  # [T, *p], values of each task; () for none
    task: PyTree  # [T, ...], small values: keys and integers
    cost: Array  # int32[T], estimated time of each task


def as_pool(
    fn: TaskFn | InSteps,
    constants: PyTree,
    common: PyTree,
    own: PyTree,
    tasks: PyTree,
    *,
    lanes: bool,
) -> tuple[TaskFn | InSteps, PyTree]:
    """Returns ``fn`` as a function of a pool's entry instead of ``common``, and a pool of one.

    Values that ``fn`` closes over, such as a learning rate, become part of the entry: an outer vmap
    may batch them.
    """
    example = constants, common, *jax.tree.map(lambda a: a[0], (own, tasks))
    called: TaskFn | InSteps
    closed: PyTree
    if isinstance(fn, InSteps):
        called, closed = fn.lifted(*example, lanes=lanes)
    else:
        called, closed = lift_closure(fn, *example)

    def of_entry(fn: Callable[..., PyTree]) -> Callable[..., PyTree]:
        def of(constants: PyTree, entry: PyTree, *rest: PyTree) -> PyTree:
            common, closed, _ = entry
            return fn(closed, constants, common, *rest)

        return of

    one = called.mapped(of_entry) if isinstance(called, InSteps) else of_entry(called)
    # Never without an array: sums of several runs differ by their entries of the pool.
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
    """Runs all tasks ``work [T, ...]``, which share ``constants`` and the pool ``[E, *p]``.

    Tasks that can stop between two steps run in L lanes, or all at once if there are no more tasks
    than lanes; others, or without lanes, in chunks. ``fn`` is as in :func:`as_pool`, ``summed`` as
    in :meth:`Execution.run <fedjax_sim.engine.execution.Execution.run>`.

    Returns:
        The results, the sums by entry of the pool, and ``int32[T]``, the steps run or waited for
        each task; zeros if unknown, because ``fn`` is not ``InSteps``.
    """
    count, entries = len(work.common), len(jax.tree.leaves(pool)[0])

    def with_addend(out: PyTree) -> PyTree:
        return out if summed else (out, Addend(jnp.ones(()), ()))

    def entry_of(rows: Array) -> PyTree:
        # All tasks share the only entry: a vmap over tasks does not copy it.
        return tree.take(pool, jnp.int32(0) if entries == 1 else rows)

    whole: Callable[..., PyTree] = fn.whole if isinstance(fn, InSteps) else fn
    if isinstance(fn, InSteps):
        if lanes and lanes < count:
            end = fn.end

            def tasks_at(rows: Array) -> tuple[PyTree, ...]:
                entry, own, task = tree.take((work.common, work.own, work.task), rows)
                return entry_of(entry), own, task

            def end_with_addend(*args: Any) -> PyTree:
                return with_addend(end(*args))

            in_steps = fn._replace(end=end_with_addend)
            return run_in_lanes(
                in_steps, constants, tasks_at, work.cost, work.common, entries, lanes
            )
        chunk = None if lanes else chunk

    def one(work: Work) -> tuple[PyTree, Addend]:
        given: tuple[PyTree, Addend] = with_addend(
            whole(constants, entry_of(work.common), work.own, work.task)
        )
        return given

    out, sums = run_in_chunks(one, work, work.common, entries, chunk)
    steps = fn.steps(out) if isinstance(fn, InSteps) else jnp.zeros(count, jnp.int32)
    return out, sums, ran_in_chunks(steps, chunk)


def balance(cost: Array, n_devices: int, *, in_order: bool) -> Array:
    """Returns the task ``int32[R, P]`` of each row, T for a padding row, for ``Execution.deal``.

    Every device has equally many rows of each of the R lists of tasks, whose costs are
    ``int32[R, T]``. Tasks may stay ``in_order`` if there is only one device.
    """
    lists, count = cost.shape
    block = -(-count // n_devices)
    size = block * n_devices  # P
    if n_devices == 1:
        order = jnp.arange(count, dtype=jnp.int32)
        if in_order:
            return jnp.broadcast_to(order, (lists, count))
        return jnp.argsort(-cost, axis=1, stable=True).astype(jnp.int32)
    flat = jnp.ravel(cost)
    longest_first = jnp.argsort(-flat, stable=True).astype(jnp.int32)

    def assign(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        load, used, rows = carry
        task = longest_first[i]
        list_ = task // count
        device = jnp.argmin(jnp.where(used[list_] < block, load, np.iinfo(np.int32).max))
        row = list_ * size + device * block + used[list_, device]
        return (
            load.at[device].add(flat[task]),
            used.at[list_, device].add(1),
            rows.at[row].set(task % count),
        )

    start = (
        jnp.zeros(n_devices, jnp.int32),
        jnp.zeros((lists, n_devices), jnp.int32),
        jnp.full(lists * size, count, jnp.int32),
    )
    return jax.lax.fori_loop(0, lists * count, assign, start)[2].reshape(lists, size)


def launch_price(forward: Jaxpr, weights: int) -> float:
    r"""Estimates the time of a step's launches on a GPU, in lanes that take as long.

    .. math:: \frac{10\, p \cdot 2.2\, \mu s}{(6 W + 2 A) / (3\, TB/s)}

    with p the matrix products and convolutions of the forward pass of a minibatch, A the bytes that
    it computes, and W the bytes of the weights. By their counts in compiled programs, six networks
    have 0.3 to 2.7 times this price. :func:`lanes_for` with the estimate is at most 4 % slower than
    with the count, on lognormal sizes.

    >>> made = jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones((10, 784)), jnp.ones((784, 10)))
    >>> round(launch_price(made.jaxpr, 4 * 7840))  # of small models many fit
    349
    """
    products, computed = forward_work(forward)
    moved = _PASSES[0] * weights + _PASSES[1] * computed
    return _KERNELS * max(products, 1) * _LAUNCH * _SPEED / max(moved, 1)


def lanes_for(steps: NDArray[np.integer], tasks: int, devices: int, price: float) -> int:
    r"""Returns the number of lanes of a device with the least expected time of a round.

    .. math:: \min_L E\Bigl[\max\Bigl(\frac{\sum_k T_k}{D L}, \max_k T_k\Bigr)\Bigr] (L + c)

    A step of L lanes takes as long as its launches, c lanes, and L lanes.

    Args:
        steps: ``int[R, N]``, local steps of every client in each of R runs.
        tasks: S, the clients that each run draws.
        devices: D.
        price: c, see :func:`launch_price`.

    Returns:
        L; at least S R / D if training all at once is best.

    >>> lanes_for(np.array([[40, 1, 1, 1, 1, 1, 1, 1]]), tasks=8, devices=1, price=2)
    1
    >>> lanes_for(np.full((2, 8), 5), tasks=3, devices=1, price=2)
    6
    """
    rng = np.random.default_rng(0)
    runs, clients = steps.shape
    count = min(tasks, clients)
    total, longest = np.zeros(_DRAWS), np.zeros(_DRAWS)
    for i in range(_DRAWS):
        for of_run in steps:
            some = of_run[rng.choice(clients, count, replace=False, shuffle=False)]
            total[i] += some.sum()
            longest[i] = max(longest[i], some.max())
    lanes = np.arange(1, -(-runs * tasks // devices) + 1)
    duration = np.maximum(total[:, None] / (devices * lanes), longest[:, None]).mean(axis=0)
    return int(lanes[np.argmin(duration * (lanes + price))])
