"""Checks whether parts fit together; errors name them in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import (
    Broadcast,
    Clock,
    Diagnostic,
    Exchange,
    Finish,
    Flight,
    LocalUpdate,
    Need,
    Now,
    PreAggregation,
    Refresh,
    Selection,
    Sending,
    Server,
    concrete,
    evaluate_law,
    ranges,
    shown,
)
from fedjax_sim.base.parts import check_kind, uncalled
from fedjax_sim.engine import needs, tree
from fedjax_sim.engine.chances import DIVIDED, KNOWN_VISITS
from fedjax_sim.engine.execution import Execution
from fedjax_sim.round.trial import check_absent
from fedjax_sim.server.weighting import by_samples

KINDS: dict[str, type] = {
    "local": LocalUpdate,
    "selection": Selection,
    "flight": Flight,
    "broadcast": Broadcast,
    "exchange": Exchange,
    "server": Server,
    "execution": Execution,
}
SEQUENCES: dict[str, type] = {"sending": Sending, "preaggregation": PreAggregation}
MADE = ("Aggregator", "LearnedRedistribution", "Redistribution", "Weighting", "Personal")
"""Return types of factories that were passed without a call."""
FUNCTIONS = ("weighting", "aggregator")
BYTES_KNOWN = Need(
    "clock",
    "a clock without a link if models return one by one, as its messages are known too late",
    lambda parts: not parts.asynchronous or parts.clock.link is None,
    "flight=every_round(), or a clock without a link",
)

_COUNTS = ranges.limits([("clients_per_round", int, {})])


def check_parts(parts: Any) -> None:
    """Rejects parts of the wrong kind, and parts that do not fit together.

    Raises:
        ValueError: names the part, or both parts, and what would work.
    """
    if parts.clients_per_round is None:
        raise ValueError("clients_per_round must be a whole number at least 1, got None")
    ranges.check(_COUNTS, (parts.clients_per_round,), {})
    _check_kinds(parts)
    _ = parts.group  # a flight rejects numbers of slots that it cannot group
    for role, part in _by_role(parts):
        for need in getattr(part, "needs", ()):
            _check_need(role, part, need, parts)
    for role, part, need in _derived(parts):
        _check_need(role, part, need, parts)
    _check_effect(parts)
    _check_weighting(parts.weighting)
    redistribution = parts.flight.redistribution
    if redistribution is not None and parts.learned is None:
        _check_redistribution(redistribution, parts.slots)
    if parts.clock is not None:
        _check_laws(parts.clock)
    check_absent(parts)


def _by_role(parts: Any) -> Iterator[tuple[str, Any]]:
    for role, value in parts.by_role().items():
        if role in SEQUENCES:
            yield from ((role, part) for part in value)
        elif role == "diagnostics":
            yield from ((f"diagnostics[{name!r}]", part) for name, part in value.items())
        elif role == "flight":
            yield from ((role, value), ("redistribution", value.redistribution))
            yield "refresh", value.refresh
        else:
            yield role, value


def _check_kinds(parts: Any) -> None:
    for role, kind in KINDS.items():
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        check_kind(f"{role} must be {article}", kind, getattr(parts, role))
    if parts.finish is not None:
        check_kind("finish must be a", Finish, parts.finish)
    if parts.clock is not None:
        check_kind("clock must be a", Clock, parts.clock)
    for role, kind in SEQUENCES.items():
        for part in getattr(parts, role):
            check_kind(f"{role} must be a sequence of", kind, part)
    for name, diagnostic in parts.diagnostics.items():
        check_kind(f"diagnostics[{name!r}] must be a", Diagnostic, diagnostic)
    flight = parts.flight
    if flight.refresh is not None:
        check_kind("refresh must be a", Refresh, flight.refresh)
    functions = {role: getattr(parts, role) for role in FUNCTIONS} | {"personal": parts.personal}
    if parts.learned is None:
        functions["redistribution"] = flight.redistribution
    for role, part in functions.items():
        if part is None and role not in FUNCTIONS:
            continue
        if isinstance(part, type):
            raise ValueError(f"{role} must be a function, got {uncalled(part)}")
        if not callable(part):
            raise ValueError(f"{role} must be a function, got {part!r}")
        if getattr(part, "__annotations__", {}).get("return") in MADE:
            raise ValueError(
                f"{role} must be what {part.__name__}(...) returns, got {part.__name__}"
            )


def _check_need(role: str, part: Any, need: Need, parts: Any) -> None:
    if not need.met(parts):
        other = getattr(parts, need.role)
        raise ValueError(
            f"{role} {shown(part)} needs {need.what}, {need.role} is {shown(other)}: use "
            f"{need.instead}"
        )


def _derived(parts: Any) -> Iterator[tuple[str, Any, Need]]:
    """Yields role, part and need, derived from what parts read, keep and act on."""
    local, selection, shared = parts.local, parts.selection, needs.shares(parts.local)
    if shared:  # the state belongs to one model
        yield "local", local, needs.ONE_MODEL
    if local.survey is not None:  # answers would bypass sending
        yield "local", local, needs.AS_IT_IS
    if selection.poll is not None and selection.ask is not None:
        yield from (("selection", selection, need) for need in needs.ASKED)
    if selection.see is not None:
        for need in (needs.NO_FLIGHT, needs.ONE_MODEL, needs.A_MODEL_SENT):
            yield "selection", selection, need
    if selection.repeats:
        yield from (("selection", selection, n) for n in (needs.NO_FLIGHT, needs.NOTHING_KEPT))
    if selection.times:
        yield from (("selection", selection, n) for n in (needs.CLOCK, needs.SYNCHRONOUS))
    if parts.exchange.fragments:
        yield "exchange", parts.exchange, BYTES_KNOWN
    if needs.per_visit(parts):
        for need in (KNOWN_VISITS, needs.NOBODY_LOST, *DIVIDED):
            yield "weighting", parts.weighting, need
    for part in parts.sending:
        if part.withholds:  # models in flight, or control variates of others, would be lost
            yield from (("sending", part, need) for need in (needs.NO_FLIGHT, needs.NOTHING_SHARED))
        if part.measured or (part.withholds and not part.screens):
            yield "sending", part, BYTES_KNOWN
        if part.choose is not None:
            yield from (("sending", part, need) for need in DIVIDED)
        if not (part.messages and shared):
            yield "sending", part, needs.A_MODEL_SENT


def _check_effect(parts: Any) -> None:
    """Rejects parts that would have no effect."""
    if not parts.exchange.nothing:
        return
    idle = {"weighting": parts.weighting is not by_samples}
    idle["aggregator"] = parts.aggregator is not tree.mean and not needs.shares(parts.local)
    for role, has_no_effect in idle.items():
        if has_no_effect:
            raise ValueError(
                f"{role} {shown(getattr(parts, role))} has no effect with exchange "
                f"{parts.exchange}, by which no model is sent: use exchange=everything()"
            )


def _check_weighting(weighting: Callable[..., Any]) -> None:
    """Evaluates the weighting on three models."""
    with jax.ensure_compile_time_eval():  # the weights need not be traced
        samples, visited = jnp.array([1, 7, 40]), jnp.array([2, 7, 90])
        given = weighting(samples, visited)
    if not concrete(given):
        return
    given = np.asarray(given)
    if given.shape != (3,) or not (np.isfinite(given) & (given > 0)).all():
        raise ValueError(
            f"weighting must give each model a positive finite number, {shown(weighting)} gave "
            f"{given.tolist()} for samples {samples.tolist()}"
        )


def _check_redistribution(redistribute: Callable[..., Any], slots: int) -> None:
    """Evaluates it twice: indexing clamps, so a slot that does not exist would go unnoticed."""
    traced = jax.eval_shape(lambda key: redistribute(key, slots), jax.random.key(0))
    if getattr(traced, "source", None) is None:
        return  # mixing: it would compile for half a second
    for seed in range(2):
        with jax.ensure_compile_time_eval():
            found = np.asarray(redistribute(jax.random.key(seed), slots).source)
        if found.shape != (slots,) or found.min() < 0 or found.max() >= slots:
            raise ValueError(
                f"redistribution must give each of the {slots} slots one of 0..{slots - 1}, "
                f"{shown(redistribute)} gave {found.tolist()}"
            )


def _check_laws(clock: Clock) -> None:
    """Evaluates each distribution on three clients at the start."""
    laws = {"compute": clock.compute}
    if clock.link is not None:
        laws |= {"link.up": clock.link.up, "link.down": clock.link.down}
    for name, law in laws.items():
        with jax.ensure_compile_time_eval():
            client = jnp.arange(min(3, clock.clients or 3), dtype=jnp.int32)
            now = Now(jnp.int32(0), jnp.float32(0))
            given = evaluate_law(law, jax.random.key(clock.seed), client, now)
        if not concrete(given):
            continue
        found = np.asarray(given)
        if found.shape != client.shape or not (np.isfinite(found) & (found > 0)).all():
            raise ValueError(
                f"clock must give each client a positive finite number, {name}={shown(law)} gave "
                f"{found.tolist()}"
            )
