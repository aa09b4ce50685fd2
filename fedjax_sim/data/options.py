"""The text forms ``KIND:PLACE,option=value`` of a user's data, and what their options mean."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

IN_TEST = {"0": False, "1": True, "false": False, "true": True, "train": False, "test": True}
FIFTH = "0.2"


def split_options(
    kind: str, text: str, known: Sequence[str], form: str
) -> tuple[str, dict[str, str]]:
    """The place and the options of ``PLACE,option=value``.

    Args:
        kind: what stands before the colon.
        text: what stands behind it; a place or value with a comma in it cannot be given.
        known: the options.
        form: the whole form, for the message.

    Returns:
        The place, and every option's value, "" for those that are not given.

    Raises:
        ValueError: if an option is unknown, empty or given twice.

    >>> split_options("csv", "a.csv,label=b", ("label", "test"), "csv:FILE,label=COLUMN")
    ('a.csv', {'label': 'b', 'test': ''})
    """
    place, *rest = text.split(",")
    given = dict.fromkeys(known, "")
    for option in rest:
        key, _, value = option.partition("=")
        if key not in known or not value.strip() or given[key]:
            wanted = ", ".join(f"{key}=" for key in known)
            raise ValueError(
                f"{kind}: takes {wanted} once each, got {option!r}; its form is {form}"
            )
        given[key] = value.strip()
    return place, given


def share_or_name(kind: str, test: str) -> float | str:
    """What ``test=`` says: a share if it is a number, else a name.

    >>> share_or_name("csv", "0.5"), share_or_name("csv", "held_out")
    (0.5, 'held_out')
    """
    try:
        share = float(test)
    except ValueError:
        return test
    if not 0 < share < 1:
        raise ValueError(f"{kind}: test must be a share between 0 and 1, or a column, got {test}")
    return share


def in_test(column: str, texts: NDArray[np.str_], rows: Sequence[str]) -> NDArray[np.bool_]:
    """``bool[n]``, which rows are of the test set.

    Args:
        column: the name of the column.
        texts: what it says of every row.
        rows: the name of each, for the message.

    Raises:
        ValueError: if it says something else; names row, column and what is allowed.
    """
    for text, row in zip(texts, rows, strict=True):
        if text.lower() not in IN_TEST:
            raise ValueError(
                f"{row}, column {column!r} must be one of {', '.join(IN_TEST)}, got {str(text)!r}"
            )
    return np.array([IN_TEST[text.lower()] for text in texts])


def check_parts(test: NDArray[np.bool_], asked: float | str, classes: str) -> None:
    """Refuses a test set of no row or of all."""
    if test.all() or not test.any():
        raise ValueError(
            f"test={asked} must leave training and test rows, got {test.sum()} of {len(test)} rows "
            f"for the test{classes}"
        )
