"""Words of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def counted(number: int, what: str) -> str:
    """Returns a number with its noun, in the plural unless it is 1.

    >>> counted(1, "run"), counted(2, "run")
    ('1 run', '2 runs')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def shortened(words: Sequence[str], most: int = 10) -> str:
    """Returns the words with commas, at most ten of them.

    >>> shortened(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more


def percent(share: float) -> str:
    """Returns a share in percent, with two digits at least unless it is 0.

    >>> percent(0.5), percent(0.0012), percent(0)
    ('50 %', '0.12 %', '0 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def duration(seconds: float) -> str:
    """Writes a time in words.

    >>> duration(42.4), duration(200), duration(7300), duration(200_000)
    ('42 s', '3 min', '2 h 2 min', '2 d 7 h')
    """
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    if hours < 24:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"


def as_given(value: Any) -> str:
    """Returns a value's repr, or the call to write instead of a class."""
    if isinstance(value, type):
        return f"the class {value.__name__}: use {value.__name__}(...)"
    return repr(value)


def array_type(values: Any) -> str:
    """Returns dtype and shape of an array.

    >>> import numpy as np
    >>> array_type(np.zeros((2, 3)))
    'float64 [2, 3]'
    """
    return f"{values.dtype} {list(values.shape)}"
