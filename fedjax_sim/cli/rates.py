"""``--lr-schedule``: a factor of the clients' learning rate, round by round, as a text."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax

from fedjax_sim.base import Count, Decay, Within, calls, part
from fedjax_sim.base.binding import build, finder
from fedjax_sim.cli.flags import naming

CONSTANT = "constant"


ByRounds = Callable[[int], optax.Schedule]
"""``rounds -> schedule``; rounds of the whole run."""


@part
def cosine(end: Decay = 0.0) -> ByRounds:
    """Returns a half cosine from 1 to ``end``, which it reaches after the last round."""
    return lambda rounds: optax.cosine_decay_schedule(1.0, rounds, end)


@part
def linear(end: Decay = 0.0) -> ByRounds:
    """Returns a line from 1 to ``end``, which it reaches after the last round."""
    return lambda rounds: optax.linear_schedule(1.0, end, rounds)


@part
def exponential(factor: Within) -> ByRounds:
    """Returns the powers of ``factor``."""
    return lambda rounds: optax.exponential_decay(1.0, 1, factor)


@part
def step(factor: Within, round: Count, *later: int) -> ByRounds:
    """Multiplies by ``factor`` at each of some rounds."""
    at = (round, *later)
    if sorted({*at}) != [*at]:
        raise ValueError(f"rounds must be in order, got {', '.join(map(str, at))}")

    def of(rounds: int) -> optax.Schedule:
        if at[-1] >= rounds:
            raise ValueError(f"round {at[-1]} must be below the {rounds} rounds")
        return optax.piecewise_constant_schedule(1.0, dict.fromkeys(at, factor))

    return of


@part
def warmup(rounds: int) -> ByRounds:
    """Returns a line from 1 / ``rounds`` to 1, which it reaches in that round."""
    if rounds < 2:
        raise ValueError(f"rounds must be at least 2, got {rounds}")
    return lambda _: optax.linear_schedule(1 / rounds, 1.0, rounds - 1)


FORMS: Mapping[str, Callable[..., ByRounds]] = {
    form.__name__: form for form in (cosine, linear, exponential, step, warmup)
}
"""Factors by name; their product is the schedule."""

TEXTS = "cosine(end), linear(end), exponential(factor), step(factor, round, ...), warmup(rounds)"


def schedule(text: str) -> str:
    """Returns the canonical text of a schedule, see :data:`TEXTS`.

    >>> schedule("warmup( 5 )*Cosine()"), schedule("step(0.1, 50,80)"), schedule("constant")
    ('warmup(5) * cosine', 'step(0.1, 50, 80)', 'constant')
    """
    if text.strip().lower() == CONSTANT:
        return CONSTANT
    return " * ".join(str(call).removesuffix("()") for call, _ in _read(text))


def changes_with(text: str) -> str | None:
    """Returns the first form that depends on the number of rounds; None for none.

    >>> changes_with("warmup(5) * cosine(0.1)"), changes_with("exponential(0.9)")
    ('cosine', None)
    """
    forms = [] if text == CONSTANT else _read(text)
    return next((call.name for call, _ in forms if call.name in ("cosine", "linear")), None)


def factor_by_round(text: str, rounds: int) -> optax.Schedule | None:
    """Returns the ``rate_by_round`` of :func:`fedjax_sim.local_sgd` for a text.

    It is ``round -> factor``, rounds from 0; None for a constant one.

    >>> halved = factor_by_round("step(0.5, 2)", 4)
    >>> [float(halved(r)) for r in range(4)]
    [1.0, 1.0, 0.5, 0.5]
    """
    if text == CONSTANT:
        return None
    with naming(f"--lr-schedule {text}"):
        made = [of(rounds) for _, of in _read(text)]

    def product(count: Any) -> Any:
        count = jnp.asarray(count, jnp.float32)  # of strict promotion optax lacks a case
        return functools.reduce(operator.mul, (one(count) for one in made))

    return product


def _read(text: str) -> list[tuple[calls.Call, ByRounds]]:
    """Returns the calls of a text with their results."""
    find = finder("schedule", FORMS)
    with naming(f"must be constant, or one of {TEXTS}, or several joined by *"):
        read = [calls.as_call(node, text) for node in calls.factors(text)]
        named = [dataclasses.replace(call, name=find(call.name).__name__) for call in read]
    with naming(text):
        return [(call, build(call, find)) for call in named]
