"""Types of settings with a range, which every part and method checks when it is made."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple, TypeAlias

from fedjax_sim.base.arrays import concrete

LARGEST = 2**31 - 1
"""The largest integer that parts and flags accept."""

MOST = 10_000_000
"""The largest number of those that have records of their own: clients of a round, classes."""

COUNTED = ("clients_per_round", "slots", "at_work", "classes")
"""The settings that are such numbers, from 1; all other integers may be negative."""


class Range(NamedTuple):
    """A range of numbers; NaN is in none.

    Attributes:
        words: what a number must be.
        least: lower bound.
        most: upper bound.
        open_below: whether the lower bound itself is out of range.
        open_above: whether the upper bound itself is out of range.
    """

    words: str
    least: float
    most: float = float("inf")
    open_below: bool = False
    open_above: bool = False

    def __contains__(self, value: Any) -> bool:
        above = value > self.least if self.open_below else value >= self.least
        below = value < self.most if self.open_above else value <= self.most
        return bool(above and below)


Count: TypeAlias = Annotated[int, Range("at least 1", 1)]
Natural: TypeAlias = Annotated[int, Range("at least 0", 0)]
Positive: TypeAlias = Annotated[float, Range("positive", 0, open_below=True)]
NonNegative: TypeAlias = Annotated[float, Range("at least 0", 0)]
Share: TypeAlias = Annotated[float, Range("in [0, 1]", 0, 1)]
Decay: TypeAlias = Annotated[float, Range("in [0, 1)", 0, 1, open_above=True)]
Fraction: TypeAlias = Annotated[float, Range("in (0, 1]", 0, 1, open_below=True)]
Within: TypeAlias = Annotated[float, Range("in (0, 1)", 0, 1, open_below=True, open_above=True)]
Minority: TypeAlias = Annotated[float, Range("in [0, 0.5)", 0, 0.5, open_above=True)]
Finite: TypeAlias = Annotated[float, Range("at least 0 and finite", 0, open_above=True)]
FinitePositive: TypeAlias = Annotated[
    float, Range("positive and finite", 0, open_below=True, open_above=True)
]

RANGES: Mapping[str, Any] = {
    "Count": Count, "Natural": Natural, "Positive": Positive, "NonNegative": NonNegative,
    "Share": Share, "Decay": Decay, "Fraction": Fraction, "Within": Within, "Minority": Minority,
    "Finite": Finite, "FinitePositive": FinitePositive,
}  # fmt: skip
"""The types by name, as annotations are texts."""

Limits: TypeAlias = Mapping[str, tuple[int, Range]]
"""The position and the range of each setting that has a range, by name."""

_INTEGER = Range("", -LARGEST, LARGEST)
_COUNTED = Range("at least 1", 1)


def limits(annotated: Iterable[tuple[str, Any]]) -> Limits:
    """Returns the settings with a range among names with their annotations, in order.

    >>> [*limits([("local", "LocalUpdate"), ("mu", "NonNegative")]).items()]
    [('mu', (1, Range(words='at least 0', least=0, most=inf, open_below=False, open_above=False)))]
    """
    found = {}
    for i, (name, of) in enumerate(annotated):
        first, _, others = of.partition(" | ") if isinstance(of, str) else ("", "", "")
        if first in RANGES:
            found[name] = i, RANGES[first].__metadata__[0]
        elif first == "int" and others in ("", "None"):
            found[name] = i, _COUNTED if name in COUNTED else _INTEGER
    return types.MappingProxyType(found)


def check(limits: Limits, args: tuple[Any, ...], settings: Mapping[str, Any]) -> None:
    """Raises ValueError if a number is out of its range.

    Traced numbers, and functions or None in place of a number, are not checked.

    >>> check(globals()["limits"]([("mu", "NonNegative")]), (-1,), {})
    Traceback (most recent call last):
    ValueError: mu must be at least 0, got -1
    """
    for name, (i, within) in limits.items():
        value = args[i] if i < len(args) else settings.get(name)
        if value is None or callable(value) or not concrete(value):
            continue
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"{name} must be within ±{LARGEST}, got {str(value)[:20]}")
        if value not in within:
            raise ValueError(f"{name} must be {within.words}, got {value}")
        if name in COUNTED and isinstance(value, int) and value > MOST:
            raise ValueError(f"{name} must be at most {MOST}, got {value}")
