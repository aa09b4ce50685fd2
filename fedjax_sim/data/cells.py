"""Numbers in the cells of a text file."""

import math
from collections.abc import Sequence

GAPS = ("", "?", "na", "n/a", "<na>", "nan", "null", "none")
"""What stands for a missing number, in lower case."""

BOOLEANS = {"false": 0.0, "true": 1.0}


def read_numbers(row: Sequence[str], places: Sequence[int], booleans: set[int]) -> list[float]:
    """Returns the numbers in a row, NaN if missing; adds the places of true and false.

    Raises:
        ValueError: if a cell is nothing of these.

    >>> found = set[int]()
    >>> read_numbers(["1.5", "cat", "?", "True"], (0, 2, 3), found), found
    ([1.5, nan, 1.0], {3})
    """
    cells = [row[i] for i in places]
    if "_" not in "".join(cells):  # Python reads 1_0 as 10
        try:
            return [*map(float, cells)]
        except ValueError:
            pass
    booleans.update(i for i in places if row[i].strip().lower() in BOOLEANS)
    return [read_number(cell) for cell in cells]


def read_number(cell: str) -> float:
    """Returns the number in a cell, NaN if it is missing.

    Raises:
        ValueError: if it is no number.

    >>> read_number(" NA "), read_number("false")
    (nan, 0.0)
    """
    text = cell.strip().lower()
    if text in GAPS:
        return math.nan
    if "_" in text:
        raise ValueError(f"could not convert string to float: {cell!r}")
    return BOOLEANS[text] if text in BOOLEANS else float(text)


def is_number(cell: str) -> bool:
    """Whether :func:`read_number` reads the cell.

    >>> is_number("1e3"), is_number("1_0")
    (True, False)
    """
    try:
        read_number(cell)
    except ValueError:
        return False
    return True
