"""Checks whether parts fit together; errors name them in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import (
    Aggregator,
    Broadcast,
    Clock,
    Diagnostic,
    Exchange,
    Finish,
    Flight,
    LocalUpdate,
    Need,
    PreAggregation,
    Refresh,
    Selection,
    Sending,
    Server,
    Variables,
    Weighting,
    concrete,
    ranges,
    shown,
)
from fedjax_sim.base.parts import check_kind, is_users
from fedjax_sim.base.words import as_given
from fedjax_sim.engine import needs, tree
from fedjax_sim.engine.chances import DIVIDED, KNOWN_VISITS
from fedjax_sim.engine.execution import Execution
from fedjax_sim.engine.reading import two_weights
from fedjax_sim.plan.exchange import needs_of
from fedjax_sim.server.weighting import by_samples

KINDS: dict[str, type] = {
    "local": LocalUpdate,
    "selection": Selection,
    "flight": Flight,
    "broadcast": Broadcast,
    "exchange": Exchange,
    "server": Server,
    "execution": Execution,
    "finish": Finish,
    "clock": Clock,
}
OPTIONAL = ("finish", "clock")
SEQUENCES: dict[str, type] = {"sending": Sending, "preaggregation": PreAggregation}
_COUNTS = ranges.limits([("clients_per_round", int, {})])


def check_parts(parts: Any) -> None:
    """Rejects parts of the wrong kind, and parts that do not fit together.

    Raises:
        ValueError: names the part, or both parts, and what would work.
    """
    if parts.clients_per_round is None:
        raise ValueError("clients_per_round must be a whole number at least 1, got None")
    ranges.check(_COUNTS, {"clients_per_round": parts.clients_per_round})
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
    _check_absent(parts.aggregator, parts.slots)


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
        if getattr(parts, role) is not None or role not in OPTIONAL:
            article = "an" if kind.__name__[0] in "AEIOU" else "a"
            check_kind(f"{role} must be {article}", kind, getattr(parts, role))
    for role, kind in SEQUENCES.items():
        for part in getattr(parts, role):
            check_kind(f"{role} must be a sequence of", kind, part)
    for name, diagnostic in parts.diagnostics.items():
        check_kind(f"diagnostics[{name!r}] must be a", Diagnostic, diagnostic)
    flight = parts.flight
    if flight.refresh is not None:
        check_kind("refresh must be a", Refresh, flight.refresh)
    functions = {"weighting": parts.weighting, "aggregator": parts.aggregator}
    if parts.personal is not None:
        functions["personal"] = parts.personal
    if flight.redistribution is not None and parts.learned is None:
        functions["redistribution"] = flight.redistribution
    for role, part in functions.items():
        if isinstance(part, type) or not callable(part):
            raise ValueError(f"{role} must be a function, got {as_given(part)}")


def _check_need(role: str, part: Any, need: Need, parts: Any) -> None:
    if not need.met(parts):
        other = getattr(parts, need.role)
        raise ValueError(
            f"{role} {shown(part)} needs {need.what}, {need.role} is {shown(other)}: use "
            f"{need.instead}"
        )


def _derived(parts: Any) -> Iterator[tuple[str, Any, Need]]:
    """Yields role, part and need, derived from the properties of parts."""
    local, selection, shared = parts.local, parts.selection, needs.shares(parts.local)
    asks = selection.poll is not None and selection.ask is not None
    sees = selection.see is not None
    divided = KNOWN_VISITS, needs.NOBODY_LOST, *DIVIDED
    rules: list[tuple[str, Any, bool, Sequence[Need]]] = [
        ("local", local, shared, [needs.ONE_MODEL]),  # the state belongs to one model
        ("local", local, local.survey is not None, [needs.AS_IT_IS]),  # answers bypass sending
        ("selection", selection, asks, needs.ASKED),
        ("selection", selection, sees, [needs.NO_FLIGHT, needs.ONE_MODEL, needs.A_MODEL_SENT]),
        ("selection", selection, selection.repeats, [needs.NO_FLIGHT, needs.NOTHING_KEPT]),
        ("selection", selection, selection.times, [needs.CLOCK, needs.SYNCHRONOUS]),
        ("exchange", parts.exchange, True, needs_of(parts.exchange)),
        ("weighting", parts.weighting, needs.per_visit(parts), divided),
    ]
    for part in parts.sending:
        unknown = part.measured or (part.withholds and not part.screens)
        rules += [
            # models in flight, or control variates of others, would be lost
            ("sending", part, part.withholds, [needs.NO_FLIGHT, needs.NOTHING_SHARED]),
            ("sending", part, unknown, [needs.BYTES_KNOWN]),
            ("sending", part, part.choose is not None, DIVIDED),
            ("sending", part, not (part.messages and shared), [needs.A_MODEL_SENT]),
        ]
    for role, part, applies, wanted in rules:
        yield from ((role, part, need) for need in wanted if applies)


def _check_effect(parts: Any) -> None:
    """Rejects an aggregator and weights if no models are sent."""
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


def _check_weighting(weighting: Weighting) -> None:
    """Evaluates it on two models: one that is not positive would keep the server where it is."""
    given = two_weights(weighting, (2, 90))
    if given is not None and not np.all(np.isfinite(given) & (given > 0)):
        raise ValueError(
            f"weighting must give each model a positive finite number, {shown(weighting)} gave "
            f"{given.tolist()} for clients of 1 and 40 samples"
        )


def _check_redistribution(redistribute: Callable[..., Any], slots: int) -> None:
    """Evaluates a redistribution: indexing clamps, which would hide a slot that does not exist."""
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


def _check_absent(aggregator: Aggregator, slots: int) -> None:
    """Rejects a user's aggregator that reads rows of weight 0, which several devices may have."""
    if not is_users(getattr(aggregator, "__module__", None) or type(aggregator).__module__):
        return
    values = jax.random.normal(jax.random.key(0), (slots + 1, 3), jnp.float32)
    weights = (jnp.arange(slots + 1) < slots).astype(jnp.float32)
    try:
        with jax.ensure_compile_time_eval():
            one, other = (
                jax.tree.leaves(aggregator(Variables({"w": values.at[-1].set(far)}, {}), weights))
                for far in (1e3, -1e2)
            )
    except Exception:  # it needs another model, or will raise in the first round
        return
    if any(leaf.shape != values.shape[1:] for leaf in one):  # the first round will say so
        return
    pairs = zip(one, other, strict=True)
    if concrete(*one, *other) and not all(np.array_equal(*p, equal_nan=True) for p in pairs):
        raise ValueError(
            "aggregator must leave out rows of weight 0, as there are on several devices: their "
            f"values change what {shown(aggregator)} returns"
        )
