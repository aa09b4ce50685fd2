"""Runs user parts once on rows with an absent one, whose values must have no effect."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import Array, Cohort, Gathered, LocalInfo, PyTree, Variables, concrete, shown
from fedjax_sim.base.parts import Origin, Part, is_users
from fedjax_sim.engine import tree

WEIGHTS = 3  # of the model in the trial
FAR = (1e3, -1e2)  # values of the absent row, with different signs and sizes


def check_absent(parts: Any) -> None:
    """Rejects a user part whose result depends on an absent row.

    A cohort may have such rows on several devices, or if clients sleep. Each part runs on a small
    model; a part that fails there because it needs another model, or has traced settings, passes.

    Raises:
        ValueError: names the part.
    """
    for role, part, trial in _trials(parts):
        if not _of_user(part):
            continue
        try:
            with jax.ensure_compile_time_eval():
                one, other = (jax.tree.leaves(trial(*_rows(parts, far))) for far in FAR)
            same = not concrete(*one, *other) or all(
                np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True)
            )
        except Exception:  # a part may raise anything, and will again where it is used
            continue
        if not same:
            raise ValueError(
                f"{role} must leave out absent rows (weight 0, not in cohort.present), as there "
                f"are on several devices: their values change what {shown(part)} returns"
            )


def _trials(parts: Any) -> Iterator[tuple[str, Any, Callable[..., PyTree]]]:
    """Yields role, part and a function that applies it to rows."""
    key = jax.random.key(0)

    def applied(part: Any, rows: Variables, weights: Array, cohort: Cohort) -> PyTree:
        given = cohort._replace(info=cohort.info._replace(extra=dict.fromkeys(part.reads, weights)))
        state = part.init(given.server, None)
        rows, weights, state = part.apply(key, state, rows, weights, given)
        rows = jax.tree.map(lambda a: jnp.where(tree.expand(weights > 0, a), a, 0), rows)
        return rows, weights, state

    def updated(part: Any, rows: Variables, weights: Array, cohort: Cohort) -> PyTree:
        server, step = cohort.server, tree.mean(rows, weights)
        gathered = Gathered(rows, weights, cohort)
        return part.update(key, step, server, part.init(server), gathered)

    def measured(part: Any, rows: Variables, weights: Array, cohort: Cohort) -> PyTree:
        server = cohort.server
        return part.measure(key, part.init(server, None), server, rows, cohort)

    def reduced(rows: Variables, weights: Array, cohort: Cohort) -> PyTree:
        result = parts.aggregator(rows, weights)
        if jax.tree.map(jnp.shape, result) != jax.tree.map(jnp.shape, cohort.server):
            raise ValueError("its result will be rejected in the first round")
        return result

    yield "aggregator", parts.aggregator, reduced
    for part in parts.preaggregation:
        yield "preaggregation", part, lambda *given, part=part: applied(part, *given)
    yield "server", parts.server, lambda *given: updated(parts.server, *given)
    for name, part in parts.diagnostics.items():
        role = f"diagnostics[{name!r}]"
        yield role, part, lambda *given, part=part: measured(part, *given)


def _rows(parts: Any, far: float) -> tuple[Variables, Array, Cohort]:
    """Returns updates, weights and cohort of all slots and an absent row with values ``far``."""
    count = parts.slots + 1
    present = jnp.arange(count) < parts.slots
    values = jax.random.normal(jax.random.key(1), (count, WEIGHTS), jnp.float32)
    rows = Variables({"w": jnp.where(present[:, None], values, far)}, {})
    server = Variables({"w": jnp.ones(WEIGHTS, jnp.float32)}, {})
    ones = present.astype(jnp.int32)
    cohort: Any = Cohort(
        server=server,
        received=tree.stack_copies(server, count if parts.remembers else 1),
        client=jnp.arange(count, dtype=jnp.int32),
        present=present,
        samples=ones,
        info=LocalInfo(jnp.where(present, 1, far).astype(jnp.float32), ones, ones),
        tag=(),
        data=None,  # type: ignore[arg-type]
    )
    return rows, ones.astype(jnp.float32), cohort


def _of_user(part: Any) -> bool:
    """Returns whether any function of a part, or of its inner parts, is user code."""
    known: dict[int, Any] = {}  # a function may be among the arguments of its own origin
    waiting = [part]
    while waiting:
        value = waiting.pop()
        if id(value) in known:
            continue
        known[id(value)] = value
        if isinstance(value, Origin):
            waiting.append(value.arguments)
        elif isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, Part):
            if any(is_users(kind.__module__) for kind in type(value).__mro__):
                return True
            waiting += [value.origin]
        elif isinstance(value, types.FunctionType):
            if is_users(value.__module__):
                return True
            waiting.append(getattr(value, "origin", None))
    return False
