"""``--lr-schedule``: a factor of the clients' learning rate, round by round, as a text."""

from __future__ import annotations

import argparse
import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from fedjax_sim.cli.flags import number

CONSTANT = "constant"


class Form(NamedTuple):
    """A factor that has a name.

    Attributes:
        text: how it is written.
        numbers: how many at least and at most.
        read: checks the numbers one by one.
        make: ``(rounds, *numbers)`` -> an optax schedule.
        of_rounds: whether it is another one if there are more rounds.
    """

    text: str
    numbers: tuple[int, float]
    read: tuple[Callable[[str], float], ...]
    make: Callable[..., optax.Schedule]
    of_rounds: bool = False


def _steps(rounds: int, factor: float, *at: float) -> optax.Schedule:
    if at[-1] >= rounds:
        raise ValueError(f"round {at[-1]:g} must be below the {rounds} rounds")
    return optax.piecewise_constant_schedule(1.0, {int(a): factor for a in at})


_END = (number(float, at_least=0, below=1),)
_FACTOR = number(float, above=0, below=1)
FORMS: Mapping[str, Form] = {
    "cosine": Form(
        "cosine(end)", (0, 1), _END,
        lambda rounds, end=0.0: optax.cosine_decay_schedule(1.0, rounds, end), True,
    ),
    "linear": Form(
        "linear(end)", (0, 1), _END,
        lambda rounds, end=0.0: optax.linear_schedule(1.0, end, rounds), True,
    ),
    "exponential": Form(
        "exponential(factor)", (1, 1), (_FACTOR,),
        lambda rounds, factor: optax.exponential_decay(1.0, 1, factor),
    ),
    "step": Form(
        "step(factor, round, ...)", (2, math.inf), (_FACTOR, number(int, at_least=1)), _steps
    ),
    "warmup": Form(
        "warmup(rounds)", (1, 1), (number(int, at_least=2),),
        lambda rounds, first: optax.linear_schedule(1 / first, 1.0, int(first) - 1),
    ),
}  # fmt: skip
"""By name; their product is the schedule."""


def schedule(text: str) -> str:
    """The text of a schedule in the same words for the same one; an argparse type.

    Args:
        text: forms of :data:`FORMS`, joined by ``*``; or "constant".

    Raises:
        argparse.ArgumentTypeError: if it is none.

    >>> schedule("warmup( 5 )*Cosine()"), schedule("step(0.1, 50,80)"), schedule("constant")
    ('warmup(5) * cosine', 'step(0.1, 50, 80)', 'constant')
    """
    if text.strip().lower() == CONSTANT:
        return CONSTANT
    told = []
    for name, values in _read(text):
        inside = ", ".join(f"{value:g}" for value in values)
        told.append(f"{name}({inside})" if inside else name)
    return " * ".join(told)


def changes_with(text: str) -> str | None:
    """The first form that is another one if there are more rounds; None for none.

    >>> changes_with("warmup(5) * cosine(0.1)"), changes_with("exponential(0.9)")
    ('cosine', None)
    """
    forms = [] if text == CONSTANT else _read(text)
    return next((name for name, _ in forms if FORMS[name].of_rounds), None)


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
    for name, values in _read(text):
        try:
            one = FORMS[name].make(rounds, *values)
        except ValueError as error:
            raise ValueError(f"--lr-schedule {text}: {error}") from error
        if np.all(np.asarray(one(np.arange(rounds, dtype=np.float32))) == 1):
            raise ValueError(f"--lr-schedule {text}: {name} has no effect in {rounds} rounds")
        made.append(one)

    def product(count: Any) -> Any:
        count = jnp.asarray(count, jnp.float32)  # of strict promotion optax lacks a case
        return functools.reduce(operator.mul, (one(count) for one in made))

    return product


def _read(text: str) -> list[tuple[str, list[float]]]:
    found = []
    for word in text.split("*"):
        match = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*", word)
        form = FORMS.get(match[1].lower()) if match else None
        if match is None or form is None:
            known = ", ".join(form.text for form in FORMS.values())
            raise argparse.ArgumentTypeError(
                f"must be constant, or one of {known}, or several joined by *, got {text!r}"
            )
        inside = (match[2] or "").strip()
        texts = [v.strip() for v in inside.split(",")] if inside else []
        least, most = form.numbers
        if not least <= len(texts) <= most:
            raise argparse.ArgumentTypeError(f"{word.strip()} must be written {form.text}")
        try:
            values = [form.read[min(i, len(form.read) - 1)](v) for i, v in enumerate(texts)]
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{form.text} {error}") from error
        if sorted(set(values[1:])) != values[1:]:
            raise argparse.ArgumentTypeError(f"{form.text} must have its rounds in order")
        found.append((match[1].lower(), values))
    return found
