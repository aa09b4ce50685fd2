"""Ranges of settings, which parts and methods check when they are made."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

import jax
import numpy as np
import pytest

import fedjax_sim as fs
from fedjax_sim.base import Count, Natural, NonNegative, Part, Positive, ranges
from fedjax_sim.base import Decay as DecayRange

Decay = Literal["slow", "fast"]  # a user's own type that has the name of one of ours


class own(Part):
    """A user's part."""

    count: Count | None
    natural: Natural = 0
    decay: Decay = "slow"
    most: int = 5


class later(own):
    """Inherits the ranges, whatever comes before the setting."""

    positive: Positive = 1.0


@pytest.mark.parametrize(
    ("of", "inside", "outside"),
    [
        (ranges.Count, (1, 7), (0, -1)),
        (ranges.Natural, (0, 7), (-1,)),
        (ranges.Positive, (1e-30, math.inf), (0.0, -1.0, math.nan)),
        (ranges.NonNegative, (0.0, math.inf), (-1e-30, math.nan)),
        (ranges.Share, (0, 1), (-0.01, 1.01, math.nan)),
        (DecayRange, (0, 0.99), (-0.01, 1, math.nan)),
        (ranges.Minority, (0, 0.49), (-0.01, 0.5, math.nan)),
        (ranges.Finite, (0, 1e30), (-0.01, math.inf, math.nan)),
        (ranges.FinitePositive, (1e-30, 1e30), (0, math.inf, math.nan)),
        (ranges.Fraction, (0.01, 1), (0, 1.01, math.nan)),
        (ranges.Within, (0.01, 0.99), (0, 1, math.nan)),
    ],
)
def test_ranges(of: Annotated[float, ...], inside: tuple[float], outside: tuple[float]) -> None:
    (within,) = of.__metadata__  # type: ignore[attr-defined]
    assert all(value in within for value in inside)
    assert not any(value in within for value in outside)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"count": None, "natural": -1}, "natural must be at least 0, got -1"),
        ({"count": 2**31}, "count must be within ±2147483647, got 2147483648"),
        ({"count": 1, "most": -(2**31)}, "most must be within ±2147483647, got -2147483648"),
        ({"count": 1, "positive": 0.0}, "positive must be positive, got 0.0"),
        ({"count": 2.5}, "count must be a whole number at least 1, got 2.5"),
        ({"count": 1, "most": "3"}, "most must be a whole number, got '3'"),
        ({"count": 1, "positive": [1]}, "positive must be positive, got [1]"),
        ({"count": 1, "decay": None}, "decay must be 'slow' or 'fast', got None"),
        ({"count": True}, "count must be a whole number at least 1, got True"),
        ({"count": np.float64(2)}, "count must be a whole number at least 1, got np.float64(2.0)"),
        ({"count": np.int64(2**31)}, "count must be within ±2147483647, got 2147483648"),
        (
            {"count": 1, "positive": np.ones(2)},
            "positive must be positive, got an array of float64 [2]",
        ),
    ],
)
def test_a_part_checks_its_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        later(**settings)


def test_settings_by_position_are_checked() -> None:
    with pytest.raises(ValueError, match="natural must be at least 0, got -3"):
        own(1, -3)
    with pytest.raises(ValueError, match="count must be at least 1"):
        own(1).replace(count=0)


def test_numbers_of_numpy_are_those_of_python() -> None:
    """A loop over ``np.arange`` or ``np.linspace`` makes the same parts."""
    three: Any = np.int64(3)
    given = later(three, positive=np.float64(0.5))
    assert given == later(3, positive=0.5)
    assert hash(given) == hash(later(3, positive=0.5))
    assert repr(given) == "later(3, positive=0.5)"


def test_a_type_that_has_the_name_of_a_range_is_not_one() -> None:
    assert own(None, decay="fast").decay == "fast"


class listed(Part):
    """A part of any number of values."""

    values: tuple[float, ...]

    def __init__(self, *values: float) -> None:
        object.__setattr__(self, "values", values)


class scaled(listed):
    """Another one, with a setting of its own that has a default."""

    times: Count = 2


def test_subclasses_inherit_an_init_that_is_written_by_hand() -> None:
    made: Any = scaled  # type checkers expect an init of its own
    given = made(0.5, 1.5)
    assert (given.values, given.times) == ((0.5, 1.5), 2)
    assert given == made(0.5, 1.5)
    with pytest.raises(TypeError, match=r"listed\.__init__\(\) got an unexpected keyword .*times"):
        made(0.5, times=3)


def test_functions_check_and_traced_numbers_pass() -> None:
    @fs.part
    def made(mu: NonNegative) -> own:
        del mu
        return own(1)

    with pytest.raises(ValueError, match="mu must be at least 0, got -1"):
        made(-1)
    assert jax.jit(lambda mu: made(mu).natural)(-1.0) == 0


def test_a_function_of_any_number_of_values_checks_the_setting_that_has_the_name() -> None:
    @fs.part
    def made(*values: float, mu: NonNegative = 0.0) -> own:
        del values, mu
        return own(1)

    made(1, -2)
    with pytest.raises(ValueError, match="mu must be at least 0, got -2"):
        made(1, mu=-2)
