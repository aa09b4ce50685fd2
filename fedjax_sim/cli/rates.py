"""``--lr-schedule``: a factor of the clients' learning rate, round by round, as a text."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim.base import calls
from fedjax_sim.base.binding import build, finder
from fedjax_sim.cli.flags import number

CONSTANT = "constant"


ByRounds = Callable[[int], optax.Schedule]
"""``rounds -> schedule``; rounds of the whole run."""


def cosine(end: float = 0.0) -> ByRounds:
    """Returns a half cosine from 1 to ``end``, which it reaches after the last round."""
    _within("end", end, float, at_least=0, below=1)
    return lambda rounds: optax.cosine_decay_schedule(1.0, rounds, end)


def linear(end: float = 0.0) -> ByRounds:
    """Returns a line from 1 to ``end``, which it reaches after the last round."""
    _within("end", end, float, at_least=0, below=1)
    return lambda rounds: optax.linear_schedule(1.0, end, rounds)


def exponential(factor: float) -> ByRounds:
    """Returns the powers of ``factor``."""
    _within("factor", factor, float, above=0, below=1)
    return lambda rounds: optax.exponential_decay(1.0, 1, factor)


def step(factor: float, round: int, *later: int) -> ByRounds:
    """Multiplies by ``factor`` at each of some rounds."""
    at = (round, *later)
    _within("factor", factor, float, above=0, below=1)
    for one in at:
        _within("round", one, int, at_least=1)
    if sorted({*at}) != [*at]:
        raise ValueError(f"rounds must be in order, got {', '.join(map(str, at))}")

    def of(rounds: int) -> optax.Schedule:
        if at[-1] >= rounds:
            raise ValueError(f"round {at[-1]} must be below the {rounds} rounds")
        return optax.piecewise_constant_schedule(1.0, dict.fromkeys(at, factor))

    return of


def warmup(rounds: int) -> ByRounds:
    """Returns a line from 1 / ``rounds`` to 1, which it reaches in that round."""
    _within("rounds", rounds, int, at_least=2)
    return lambda _: optax.linear_schedule(1 / rounds, 1.0, rounds - 1)


def _within(name: str, value: Any, of: Any, **limits: float) -> None:
    try:
        number(of, **limits)(str(value))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{name} {error}") from error


FORMS: Mapping[str, Callable[..., ByRounds]] = {
    form.__name__: form for form in (cosine, linear, exponential, step, warmup)
}
"""Factors by name; their product is the schedule."""

TEXTS = "cosine(end), linear(end), exponential(factor), step(factor, round, ...), warmup(rounds)"


def schedule(text: str) -> str:
    """Returns the text of a schedule in the same words for the same one; an argparse type.

    Args:
        text: calls of :data:`FORMS`, joined by ``*``; or "constant".

    Raises:
        argparse.ArgumentTypeError: if it is none.

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
    """What ``rate_by_round`` of :func:`fedjax_sim.local_sgd` takes.

    Args:
        text: of :func:`schedule`.
        rounds: of the whole run.

    Returns:
        ``round -> factor``, rounds from 0; None for a constant one.

    Raises:
        ValueError: if it does nothing in so many rounds; names the flag.

    >>> halved = factor_by_round("step(0.5, 2)", 4)
    >>> [float(halved(r)) for r in range(4)]
    [1.0, 1.0, 0.5, 0.5]
    """
    if text == CONSTANT:
        return None
    made: list[optax.Schedule] = []
    for call, of in _read(text):
        try:
            one = of(rounds)
        except ValueError as error:
            raise ValueError(f"--lr-schedule {text}: {error}") from error
        if np.all(np.asarray(one(np.arange(rounds, dtype=np.float32))) == 1):
            raise ValueError(f"--lr-schedule {text}: {call.name} has no effect in {rounds} rounds")
        made.append(one)

    def product(count: Any) -> Any:
        count = jnp.asarray(count, jnp.float32)  # of strict promotion optax lacks a case
        return functools.reduce(operator.mul, (one(count) for one in made))

    return product


def _read(text: str) -> list[tuple[calls.Call, ByRounds]]:
    """Returns the calls of a text, and what they make."""
    find = finder("schedule", FORMS)
    try:
        read = [calls.as_call(node, text) for node in calls.factors(text)]
        named = [dataclasses.replace(call, name=find(call.name).__name__) for call in read]
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be constant, or one of {TEXTS}, or several joined by *: {error}"
        ) from error
    try:
        return [(call, build(call, find)) for call in named]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error
