"""Types of settings with a range, which every part and method checks when it is made."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple, TypeAlias

from fedjax_sim.base.arrays import concrete

LARGEST = 2**31 - 1
"""The largest integer that parts and flags accept."""

MOST = 10_000_000
"""The largest number of those that have records of their own: clients of a round, classes."""

COUNTED = ("clients_per_round", "slots", "at_work", "classes")
"""The settings that are such numbers."""


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
"""A whole number from 1."""
Natural: TypeAlias = Annotated[int, Range("at least 0", 0)]
"""A whole number from 0."""
Positive: TypeAlias = Annotated[float, Range("positive", 0, open_below=True)]
"""A number above 0."""
NonNegative: TypeAlias = Annotated[float, Range("at least 0", 0)]
"""A number from 0."""
Share: TypeAlias = Annotated[float, Range("in [0, 1]", 0, 1)]
"""A number in [0, 1]."""
Decay: TypeAlias = Annotated[float, Range("in [0, 1)", 0, 1, open_above=True)]
"""A number in [0, 1)."""
Fraction: TypeAlias = Annotated[float, Range("in (0, 1]", 0, 1, open_below=True)]
"""A number in (0, 1]."""
Within: TypeAlias = Annotated[float, Range("in (0, 1)", 0, 1, open_below=True, open_above=True)]
"""A number in (0, 1)."""

Limits: TypeAlias = Mapping[str, tuple[int, Range]]
"""The position and the range of each setting that has a range, by name."""

_INTEGER = Range("", -LARGEST, LARGEST)
_UNIONS = (typing.Union, types.UnionType)


def limits(annotated: Iterable[tuple[str, Any, Mapping[str, Any]]]) -> Limits:
    """Returns the settings with a range among names in order, with annotations and namespaces.

    >>> limits([("local", "LocalUpdate", {}), ("mu", "NonNegative | None", globals())])["mu"][1]
    Range(words='at least 0', least=0, most=inf, open_below=False, open_above=False)
    """
    found = {}
    for i, (name, of, namespace) in enumerate(annotated):
        if isinstance(of, str):
            plain = of.removesuffix(" | None")
            of = int if plain == "int" else namespace.get(plain)
        for member in typing.get_args(of) if typing.get_origin(of) in _UNIONS else (of,):
            ranges = [r for r in getattr(member, "__metadata__", ()) if isinstance(r, Range)]
            if ranges or member is int:
                found[name] = i, (ranges or [_INTEGER])[0]
    return types.MappingProxyType(found)


def check(limits: Limits, args: tuple[Any, ...], settings: Mapping[str, Any]) -> None:
    """Raises ValueError if a number is out of its range; traced numbers are not checked.

    >>> check({"mu": (0, Range("at least 0", 0))}, (-1,), {})
    Traceback (most recent call last):
    ValueError: mu must be at least 0, got -1
    """
    for name, (i, within) in limits.items():
        value = args[i] if i < len(args) else settings.get(name)
        if value is None or not concrete(value):
            continue
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"{name} must be within ±{LARGEST}, got {str(value)[:20]}")
        if value not in within:
            raise ValueError(f"{name} must be {within.words}, got {value}")
        if name in COUNTED and isinstance(value, int) and value > MOST:
            raise ValueError(f"{name} must be at most {MOST}, got {value}")
