"""The tasks of one device in lanes: a lane takes the next of a queue when its task ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, PyTree
from fedjax_sim.engine import tree
from fedjax_sim.engine.chunks import plus
from fedjax_sim.engine.vmapped import opened

_MOST = 2**31 - 1


class InSteps(NamedTuple):
    """A task that can stop between two of its steps: lanes of such tasks step together.

    All functions take ``(constants, common, own, task)`` first. Three are then told whether the
    task is ``due bool[]``: what they give for one that is not, beside others that are, is thrown
    away.

    Attributes:
        begin: ``(due) -> (plan, carry)``, what its steps read and what they change.
        stretch: ``(due, plan, carry) -> (plan, int32[])``, what the next steps read and how many
          there are; 0 if the task is over.
        step: ``(plan, carry) -> carry``.
        end: ``(due, plan, carry) -> result``.
        whole: ``() -> result``, all of them.
        steps: how many steps results ``[T, ...]`` say that their tasks took, ``int32[T]``.
    """

    begin: Callable[..., tuple[PyTree, PyTree]]
    stretch: Callable[..., tuple[PyTree, Array]]
    step: Callable[..., PyTree]
    end: Callable[..., Any]
    whole: Callable[..., PyTree]
    steps: Callable[[PyTree], Array]

    def opened(self, *example: PyTree, lanes: bool) -> tuple[InSteps, dict[str, list[Array]]]:
        """The same as functions of what they close over, too: see ``vmapped.opened``.

        Without ``lanes`` only ``whole`` is, which is all that is called then: to trace a client's
        training is most of what a start takes.
        """
        if not lanes:
            fn, values = opened(self.whole, *example)
            whole = functools.partial(_with_own, fn, "whole")
            return self._replace(whole=whole), {"whole": values}
        due = jnp.ones((), bool)
        state = jax.eval_shape(self.begin, *example, due)
        rest: dict[str, tuple[Any, ...]] = {
            "begin": (due,),
            "stretch": (due, *state),
            "step": state,
            "end": (due, *state),
            "whole": (),
        }
        functions, closed = {}, {}
        for name, more in rest.items():
            fn, closed[name] = opened(getattr(self, name), *example, *more)
            functions[name] = functools.partial(_with_own, fn, name)
        return self._replace(**functions), closed

    def changed(self, change: Callable[[Callable[..., PyTree]], Callable[..., PyTree]]) -> InSteps:
        """The same with all functions of a task changed."""
        names = ("begin", "stretch", "step", "end", "whole")
        return self._replace(**{name: change(getattr(self, name)) for name in names})


def _with_own(
    fn: Callable[..., PyTree], name: str, closed: dict[str, list[Array]], *args: PyTree
) -> PyTree:
    return fn(closed[name], *args)


class _Lanes(NamedTuple):
    """What each lane is at, ``[L, ...]``.

    Attributes:
        task: ``int32[L]``, T of a lane that has none.
        since: ``int32[L]``, the steps of the device when it began.
        left: ``int32[L]``, steps of the stretch.
        plan: of the task.
        carry: of the task.
    """

    task: Array
    since: Array
    left: Array
    plan: PyTree
    carry: PyTree


class _Done(NamedTuple):
    """What the device has done.

    Attributes:
        taken: ``int32[]``, tasks of the queue.
        steps: ``int32[]``, of every lane.
        ran: ``int32[T]``, of each task.
        out: ``[T, ...]``.
        sums: by entry.
    """

    taken: Array
    steps: Array
    ran: Array
    out: PyTree
    sums: PyTree


def run_in_lanes(
    fn: InSteps,
    constants: PyTree,
    of: Callable[[Array], tuple[PyTree, ...]],
    cost: Array,
    entry: Array,
    entries: int,
    lanes: int,
) -> tuple[PyTree, PyTree, Array]:
    """Runs all tasks of a device, those of the highest cost first.

    All lanes step until a stretch of one ends. If its task is over, the result is written out, and
    the lane takes the next of the queue. A lane that finds none steps on: nobody reads what.

    Args:
        fn: the tasks; results are pairs, of which the second is an :class:`Addend`.
        constants: the same for all.
        of: ``common``, ``own`` and ``task`` of tasks by number ``int32[L]``.
        cost: ``int32[T]``.
        entry: ``int32[T]``, which sum.
        entries: how many sums there are.
        lanes: L, at most T.

    Returns:
        As :func:`fedjax_sim.engine.chunks.run_in_chunks`, and ``int32[T]``, the steps of the lanes
        on behalf of each task; the first bears those of lanes without one.
    """
    count = len(cost)
    queue = jnp.argsort(-cost, stable=True).astype(jnp.int32)
    begin, stretch, step, end = (
        jax.vmap(functools.partial(part, constants))
        for part in (fn.begin, fn.stretch, fn.step, fn.end)
    )

    def at(task: Array) -> tuple[PyTree, ...]:
        return of(jnp.minimum(task, count - 1))

    def advance(given: PyTree, now: tuple[_Lanes, Array, Array]) -> tuple[_Lanes, Array, Array]:
        """Every lane goes on until a stretch ends; who is at its task's end."""
        lanes, steps, _ = now
        runs = lanes.task < count
        todo = jnp.min(jnp.where(runs, lanes.left, _MOST))
        carry = jax.lax.fori_loop(0, todo, lambda _, c: step(*given, lanes.plan, c), lanes.carry)
        left = lanes.left - todo
        due = runs & (left == 0)
        plan, more = stretch(*given, due, lanes.plan, carry)
        plan = tree.select_rows(due, plan, lanes.plan)
        lanes = lanes._replace(left=jnp.where(due, more, left), plan=plan, carry=carry)
        return lanes, steps + todo, due & (more == 0)

    def turn(now: tuple[_Lanes, _Done]) -> tuple[_Lanes, _Done]:
        """Goes on until a task ends; its lane takes the next."""
        lanes, done = now
        given = at(lanes.task)
        start = lanes, done.steps, jnp.zeros(len(lanes.task), bool)
        lanes, steps, over = jax.lax.while_loop(
            lambda now: ~jnp.any(now[2]), functools.partial(advance, given), start
        )
        ended: Any = end(*given, over, lanes.plan, lanes.carry)
        out, addend = ended
        row = jnp.where(over, lanes.task, count)

        def written(rows: Array, new: Array) -> Array:
            return rows.at[row].set(new, mode="drop")

        addend = addend._replace(weight=jnp.where(over, addend.weight, 0))
        sums = plus(done.sums, entry[jnp.minimum(lanes.task, count - 1)], addend)
        place = done.taken + jnp.cumsum(over, dtype=jnp.int32) - 1
        new = jnp.where(place < count, queue[jnp.minimum(place, count - 1)], count)
        task = jnp.where(over, new, lanes.task)
        fresh = over & (task < count)
        state = tree.select_rows(fresh, begin(*at(task), fresh), (lanes.plan, lanes.carry))
        taken = done.taken + jnp.sum(over, dtype=jnp.int32)
        done = _Done(
            taken,
            steps,
            written(done.ran, steps - lanes.since),
            jax.tree.map(written, done.out, out),
            sums,
        )
        return _Lanes(task, jnp.where(over, steps, lanes.since), lanes.left, *state), done

    first, none = queue[:lanes], jnp.zeros(lanes, jnp.int32)
    everyone = jnp.ones(lanes, bool)
    state = begin(*at(first), everyone)
    shapes, addend = jax.eval_shape(lambda: end(*at(first), everyone, *state))
    out = jax.tree.map(lambda a: jnp.zeros((count, *a.shape[1:]), a.dtype), shapes)
    sums = jax.tree.map(
        lambda a: jnp.zeros((entries, *a.shape[1:]), tree.wide(a.dtype)), addend.values
    )
    zero = jnp.int32(0)
    done = _Done(jnp.int32(lanes), zero, jnp.zeros(count, jnp.int32), out, sums)
    _, done = jax.lax.while_loop(
        lambda now: jnp.any(now[0].task < count), turn, (_Lanes(first, none, none, *state), done)
    )
    waited = lanes * done.steps - jnp.sum(done.ran, dtype=jnp.int32)
    return done.out, done.sums, done.ran.at[0].add(waited)
