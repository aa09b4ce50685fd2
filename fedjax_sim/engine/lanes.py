"""Runs the tasks of one device in lanes: a lane takes the next task when its task ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from fedjax_sim.base import Array, PyTree
from fedjax_sim.engine import tree
from fedjax_sim.engine.chunks import plus
from fedjax_sim.engine.vmapped import lift_closure

_MOST = 2**31 - 1


class InSteps(NamedTuple):
    """A task that can stop between two of its steps: lanes of such tasks step together.

    All functions first take ``(constants, common, own, task)``. Three then take ``due bool[]``,
    whether the result is used; in other lanes it is discarded.

    Attributes:
        begin: ``(due) -> (plan, carry)``, constants of the steps and their carry.
        stretch: ``(due, plan, carry) -> (plan, int32[])``, the plan of the next steps and their
            number; 0 if the task is over.
        step: ``(plan, carry) -> carry``.
        end: ``(due, plan, carry) -> result``.
        whole: ``() -> result``, the whole task at once.
        steps: function from results ``[T, ...]`` to the number of steps, ``int32[T]``.
    """

    begin: Callable[..., tuple[PyTree, PyTree]]
    stretch: Callable[..., tuple[PyTree, Array]]
    step: Callable[..., PyTree]
    end: Callable[..., Any]
    whole: Callable[..., PyTree]
    steps: Callable[[PyTree], Array]

    def lifted(self, *example: PyTree, lanes: bool) -> tuple[InSteps, dict[str, list[Array]]]:
        """Lifts the closures of the functions, see :func:`fedjax_sim.engine.vmapped.lift_closure`.

        Without ``lanes`` only ``whole`` is called, and so lifted: tracing a client's training takes
        most of the start.
        """
        if not lanes:
            fn, values = lift_closure(self.whole, *example)
            whole = functools.partial(_call_with, fn, "whole")
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
            fn, closed[name] = lift_closure(getattr(self, name), *example, *more)
            functions[name] = functools.partial(_call_with, fn, name)
        return self._replace(**functions), closed

    def mapped(self, change: Callable[[Callable[..., PyTree]], Callable[..., PyTree]]) -> InSteps:
        """Applies ``change`` to all functions of a task."""
        names = ("begin", "stretch", "step", "end", "whole")
        return self._replace(**{name: change(getattr(self, name)) for name in names})


def _call_with(
    fn: Callable[..., PyTree], name: str, closed: dict[str, list[Array]], *args: PyTree
) -> PyTree:
    return fn(closed[name], *args)


class _Rest(NamedTuple):
    """Splits off the arrays of a tree that are arrays of ``common``: lanes do not store them."""

    structure: Any  # the structure of the tree
    # for each array, its number in common; -1 for an array that is not one of them
    origins: list[int]

    def of(self, whole: PyTree) -> list[Array]:
        """Returns the other arrays."""
        leaves = jax.tree.leaves(whole)
        return [leaf for leaf, origin in zip(leaves, self.origins, strict=True) if origin < 0]

    def whole(self, common: PyTree, rest: list[Array]) -> PyTree:
        """Returns the tree."""
        given, others = jax.tree.leaves(common), iter(rest)
        leaves = [next(others) if origin < 0 else given[origin] for origin in self.origins]
        return jax.tree.unflatten(self.structure, leaves)


def _without_common(fn: InSteps, constants: PyTree, common: PyTree, *task: PyTree) -> InSteps:
    """Returns tasks whose plans and carries lack the arrays of ``common`` that no step changes.

    The server model is such a part of a plan, and weights that do not train of a carry.
    """
    due = jnp.ones((), bool)

    def begin(common: PyTree) -> PyTree:
        return fn.begin(constants, common, *task, due)

    def next_state(common: PyTree, plan: PyTree, carry: PyTree) -> tuple[PyTree, PyTree]:
        plan_after, _ = fn.stretch(constants, common, *task, due, plan, carry)
        return plan_after, fn.step(constants, common, *task, plan, carry)

    plan, carry = jax.eval_shape(begin, common)
    count, plans = len(jax.tree.leaves(common)), len(jax.tree.leaves(plan))
    first, later = _origins(begin, common), _origins(next_state, common, plan, carry)
    origins = [  # the plan and carry come after common in the arguments of next_state
        origin if then in (origin, count + place) else -1
        for place, (origin, then) in enumerate(zip(first, later, strict=True))
    ]
    of_plan = _Rest(jax.tree.structure(plan), origins[:plans])
    of_carry = _Rest(jax.tree.structure(carry), origins[plans:])

    def state(common: PyTree, plan: list[Array], carry: list[Array]) -> tuple[PyTree, PyTree]:
        return of_plan.whole(common, plan), of_carry.whole(common, carry)

    def begun(constants: PyTree, common: PyTree, *rest: PyTree) -> tuple[PyTree, PyTree]:
        plan, carry = fn.begin(constants, common, *rest)
        return of_plan.of(plan), of_carry.of(carry)

    def stretched(constants: PyTree, common: PyTree, *rest: PyTree) -> tuple[PyTree, Array]:
        *given, plan, carry = rest
        plan, steps = fn.stretch(constants, common, *given, *state(common, plan, carry))
        return of_plan.of(plan), steps

    def stepped(constants: PyTree, common: PyTree, *rest: PyTree) -> PyTree:
        *given, plan, carry = rest
        return of_carry.of(fn.step(constants, common, *given, *state(common, plan, carry)))

    def ended(constants: PyTree, common: PyTree, *rest: PyTree) -> PyTree:
        *given, plan, carry = rest
        return fn.end(constants, common, *given, *state(common, plan, carry))

    return fn._replace(begin=begun, stretch=stretched, step=stepped, end=ended)


def _origins(fn: Callable[..., PyTree], *args: PyTree) -> list[int]:
    """Returns for each array of the result its index in the arguments; -1 if it is a new array."""
    return _passed_on(jax.make_jaxpr(fn)(*args).jaxpr)


def _passed_on(traced: Jaxpr) -> list[int]:
    """Returns for each output of a program the input to which it is identical; -1 if none.

    An inner jitted function may also return its inputs, which JAX 0.12 shows as new arrays.
    """
    number = {id(v): i for i, v in enumerate(traced.invars)}
    for equation in traced.eqns:
        if equation.primitive.name in ("jit", "pjit"):
            sources = _passed_on(equation.params["jaxpr"].jaxpr)
            for out, i in zip(equation.outvars, sources, strict=True):
                if i >= 0 and id(equation.invars[i]) in number:
                    number[id(out)] = number[id(equation.invars[i])]
    return [number.get(id(v), -1) for v in traced.outvars]


class _Lanes(NamedTuple):
    """State of the lanes, ``[L, ...]``."""

    task: Array  # int32[L], the task; T for a lane without one
    since: Array  # int32[L], the device's steps when the task began
    left: Array  # int32[L], steps left of the stretch
    plan: PyTree
    carry: PyTree


class _Done(NamedTuple):
    """Results of the device so far."""

    taken: Array  # int32[], tasks taken from the queue
    steps: Array  # int32[], steps of every lane
    ran: Array  # int32[T], steps of each task
    out: PyTree  # [T, ...], results
    sums: PyTree  # sums by entry


def run_in_lanes(
    fn: InSteps,
    constants: PyTree,
    tasks_at: Callable[[Array], tuple[PyTree, ...]],
    cost: Array,
    entry: Array,
    entries: int,
    lanes: int,
) -> tuple[PyTree, PyTree, Array]:
    """Runs all tasks of a device, the most expensive first.

    All lanes step until a stretch of one ends. If its task is over, the result is written, and the
    lane takes the next task of the queue. A lane without a task steps on with unused values.

    Args:
        fn: the tasks; results are pairs whose second value is an :class:`Addend`.
        constants: values that all tasks share.
        tasks_at: ``common``, ``own`` and ``task`` of tasks by number ``int32[L]``; with one entry
            all tasks share ``common``.
        cost: ``int32[T]``.
        entry: ``int32[T]``, index of each task's sum.
        entries: number of sums.
        lanes: L, at most T.

    Returns:
        As :func:`fedjax_sim.engine.chunks.run_in_chunks`, and ``int32[T]``, the steps of the lanes
        for each task; steps of lanes without a task count for the first.
    """
    count = len(cost)
    queue = jnp.argsort(-cost, stable=True).astype(jnp.int32)

    def at(task: Array) -> tuple[PyTree, ...]:
        return tasks_at(jnp.minimum(task, count - 1))

    common, *one = at(queue[:1])
    if entries > 1:
        common = tree.take(common, jnp.int32(0))
    fn = _without_common(fn, constants, common, *tree.take(one, jnp.int32(0)))

    def of_lanes(part: Callable[..., PyTree], more: int) -> Callable[..., PyTree]:
        axes = (0 if entries > 1 else None, *(0,) * (2 + more))
        return jax.vmap(functools.partial(part, constants), in_axes=axes)

    begin, stretch = of_lanes(fn.begin, 1), of_lanes(fn.stretch, 3)
    step, end = of_lanes(fn.step, 2), of_lanes(fn.end, 3)

    def advance(given: PyTree, now: tuple[_Lanes, Array, Array]) -> tuple[_Lanes, Array, Array]:
        """Steps all lanes until a stretch ends; returns which tasks are over."""
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
        """Steps until a task ends; its lane takes the next task."""
        lanes, done = now
        given = at(lanes.task)
        start = lanes, done.steps, jnp.zeros(len(lanes.task), bool)
        lanes, steps, over = jax.lax.while_loop(
            lambda now: ~jnp.any(now[2]), functools.partial(advance, given), start
        )
        result: Any = end(*given, over, lanes.plan, lanes.carry)
        out, addend = result
        row = jnp.where(over, lanes.task, count)

        def write(rows: Array, new: Array) -> Array:
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
            write(done.ran, steps - lanes.since),
            jax.tree.map(write, done.out, out),
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
