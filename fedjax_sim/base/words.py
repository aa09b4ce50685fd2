"""Words of messages."""

from __future__ import annotations


def counted(number: int, what: str) -> str:
    """So many of something.

    >>> counted(1, "run"), counted(2, "run")
    ('1 run', '2 runs')
    """
    return f"{number} {what}{'' if number == 1 else 's'}"
