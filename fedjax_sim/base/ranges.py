"""Settings with a range or a choice, which every part and method checks when it is made."""

from __future__ import annotations

import numbers
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

from fedjax_sim.base.arrays import concrete
from fedjax_sim.base.words import array_type, as_given

LARGEST = 2**31 - 1
"""The largest integer that parts and flags accept."""

MOST = 10_000_000
"""The largest number of those that have records of their own: clients of a round, classes."""

COUNTED = ("clients_per_round", "slots", "classes")
"""The settings that are such numbers, from 1; all other integers may be negative."""


class Range(NamedTuple):
    """A range of numbers, which never contains NaN.

    Attributes:
        words: the requirement in words.
        least: lower bound.
        most: upper bound.
        open_below: whether the lower bound itself is out of range.
        open_above: whether the upper bound itself is out of range.
        whole: whether fractions are out of range.
    """

    words: str
    least: float
    most: float = float("inf")
    open_below: bool = False
    open_above: bool = False
    whole: bool = False

    def __repr__(self) -> str:
        return repr(self.words)  # as it stands in signatures on the site

    def __contains__(self, value: Any) -> bool:
        above = value > self.least if self.open_below else value >= self.least
        below = value < self.most if self.open_above else value <= self.most
        return bool(above and below)

    def takes(self, value: Any) -> bool:
        """Whether a value is a single number, and a whole one if required."""
        if hasattr(value, "dtype"):
            return not value.ndim and (not self.whole or value.dtype.kind in "iu")
        if self.whole:
            return isinstance(value, numbers.Integral) and not isinstance(value, bool)
        return isinstance(value, numbers.Real)


Count: TypeAlias = Annotated[int, Range("at least 1", 1, whole=True)]
"""A whole number from 1."""
Clusters: TypeAlias = Annotated[int, Range("in 1..65536", 1, 2**16, whole=True)]
"""A number of values that are held in memory."""
Natural: TypeAlias = Annotated[int, Range("at least 0", 0, whole=True)]
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
Minority: TypeAlias = Annotated[float, Range("in [0, 0.5)", 0, 0.5, open_above=True)]
"""A number in [0, 0.5)."""
Finite: TypeAlias = Annotated[float, Range("at least 0 and finite", 0, open_above=True)]
"""A finite number from 0."""
FinitePositive: TypeAlias = Annotated[
    float, Range("positive and finite", 0, open_below=True, open_above=True)
]
"""A finite number above 0."""

Choice: TypeAlias = tuple[Any, ...]
"""The values of a setting of type ``Literal``."""

Limits: TypeAlias = Mapping[str, Range | Choice]
"""The range or the choice of each setting that has one, by name."""

_INTEGER = Range("", -LARGEST, LARGEST, whole=True)
_COUNTED = Range("at least 1", 1, whole=True)
_BUILTINS = {"int": int, "None": type(None)}
_UNIONS = (typing.Union, types.UnionType)


def limits(annotated: Iterable[tuple[str, Any, Mapping[str, Any]]]) -> Limits:
    """Returns the limited settings among names with annotations and namespaces.

    >>> limits([("local", "LocalUpdate", {}), ("mu", "NonNegative | None", globals())])["mu"]
    'at least 0'
    """
    found: dict[str, Range | Choice] = {}
    for name, of, namespace in annotated:
        members = typing.get_args(of) if typing.get_origin(of) in _UNIONS else (of,)
        if isinstance(of, str):
            words = of.split(" | ")
            members = tuple(_BUILTINS.get(word, namespace.get(word)) for word in words)
        ranges = [r for m in members for r in getattr(m, "__metadata__", ()) if type(r) is Range]
        if not ranges and int in members and {*members} <= {int, type(None)}:
            ranges = [_COUNTED if name in COUNTED else _INTEGER]
        none = (None,) if type(None) in members else ()
        choices = [typing.get_args(m) + none for m in members if typing.get_origin(m) is Literal]
        for limit in (*ranges[:1], *choices):
            found[name] = limit
    return types.MappingProxyType(found)


def check(limits: Limits, settings: Mapping[str, Any]) -> None:
    """Raises ValueError if a number is out of its range, or a value is not one of the choices.

    Traced numbers, and functions or None in place of a number, are not checked.

    >>> check({"mu": Range("at least 0", 0)}, {"mu": -1})
    Traceback (most recent call last):
    ValueError: mu must be at least 0, got -1
    >>> check({"mode": ("slow", "fast", "off")}, {"mode": "on"})
    Traceback (most recent call last):
    ValueError: mode must be 'slow', 'fast' or 'off', got 'on'
    """
    for name, value in settings.items():
        within = limits.get(name)
        if isinstance(within, Range):
            _check_number(name, within, value)
        elif within is not None and value not in within:
            first, last = ", ".join(map(repr, within[:-1])), repr(within[-1])
            raise ValueError(f"{name} must be {first} or {last}, got {value!r}")


def _check_number(name: str, within: Range, value: Any) -> None:
    kind = f"a whole number {within.words}".rstrip() if within.whole else within.words
    if isinstance(value, type):
        raise ValueError(f"{name} must be {kind}, got {as_given(value)}")
    if value is None or callable(value) or not concrete(value):
        return
    if not within.takes(value):
        got = f"an array of {array_type(value)}" if getattr(value, "ndim", 0) else repr(value)
        raise ValueError(f"{name} must be {kind}, got {got}")
    if isinstance(value, numbers.Integral) and abs(int(value)) > LARGEST:
        raise ValueError(f"{name} must be within ±{LARGEST}, got {str(value)[:20]}")
    if value not in within:
        raise ValueError(f"{name} must be {within.words}, got {value}")
    if name in COUNTED and isinstance(value, numbers.Integral) and int(value) > MOST:
        raise ValueError(f"{name} must be at most {MOST}, got {value}")
