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


def array_type(values: Any) -> str:
    """Returns dtype and shape of an array.

    >>> import numpy as np
    >>> array_type(np.zeros((2, 3)))
    'float64 [2, 3]'
    """
    return f"{values.dtype} {list(values.shape)}"
