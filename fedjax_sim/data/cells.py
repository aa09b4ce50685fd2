"""Cells of text tables: numbers, categories and missing values."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base.words import shortened

GAPS = ("", "?", "na", "n/a", "<na>", "nan", "null", "none")
"""Markers of a missing number, in lower case."""

BOOLEANS = {"false": 0.0, "true": 1.0}

MAX_CATEGORIES = 1000
"""Largest number of categories of a one-hot column; more suggest free text or names."""


def read_numbers(row: Sequence[str], places: Sequence[int], booleans: set[int]) -> list[float]:
    """Reads numbers from a row by :func:`read_number`; adds places of booleans to ``booleans``."""
    cells = [row[i] for i in places]
    if "_" not in "".join(cells):  # Python reads 1_0 as 10
        try:
            return [*map(float, cells)]
        except ValueError:
            pass
    booleans.update(i for i in places if row[i].strip().lower() in BOOLEANS)
    return [read_number(cell) for cell in cells]


def read_number(cell: str) -> float:
    """Reads a number or a boolean, NaN if it is missing; raises ValueError for anything else.

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
    """Returns whether :func:`read_number` can read the cell."""
    try:
        read_number(cell)
    except ValueError:
        return False
    return True


def integers_or_texts(texts: NDArray[np.str_]) -> NDArray[Any]:
    """Converts texts to integers if all are integers, so that 2 sorts before 10.

    >>> integers_or_texts(np.array(["10", "2"])), integers_or_texts(np.array(["02"])).tolist()
    (array([10,  2]), ['02'])
    """
    try:
        numbers = texts.astype(np.int64)
    except (ValueError, OverflowError):
        return texts
    return numbers if np.array_equal(numbers.astype(np.str_), texts) else texts


def one_hot(
    columns: Mapping[str, NDArray[np.str_]],
) -> tuple[NDArray[np.float64], list[str], list[str]]:
    """Encodes columns of texts ("" if missing) as columns of 0 and 1, one for each category.

    Returns ``f64[n, K]``, NaN for missing categories; the K column names; a note on each column.
    """
    blocks, names, notes = [], [], []
    for column, texts in columns.items():
        categories = [str(value) for value in np.unique(integers_or_texts(texts[texts != ""]))]
        if not categories:
            raise ValueError(f"column {column!r} must have a value, got none: remove the column")
        if len(categories) > MAX_CATEGORIES:
            raise ValueError(
                f"column {column!r} must have at most {MAX_CATEGORIES} categories, as each becomes "
                f"an input, got {len(categories)}: remove the column, or give numbers instead"
            )
        block = (texts[:, None] == np.array(categories)).astype(np.float64)
        block[texts == ""] = np.nan
        blocks.append(block)
        names += [f"{column}={value}" for value in categories]
        notes.append(f"Column {column!r} is one-hot encoded: {shortened(categories)}.")
    return np.concatenate(blocks, axis=1), names, notes


def fill_means(
    x: NDArray[np.float64], train: NDArray[np.bool_], names: Sequence[str]
) -> tuple[NDArray[np.float64], NDArray[np.bool_], list[str]]:
    """Replaces NaN in ``f64[n, F]`` by the column's mean over the training rows.

    Returns the columns; which of them have values other than 0 and 1, ``bool[F]``; a note.
    """
    gaps = np.isnan(x)
    numeric = np.asarray(~(np.isin(x, (0, 1)) | gaps).all(axis=0))
    columns = np.flatnonzero(gaps.any(axis=0)).tolist()
    if not columns:
        return x, numeric, []
    x = x.copy()
    for c in columns:
        known = x[train & ~gaps[:, c], c]
        if not len(known):
            raise ValueError(
                f"column {names[c]!r} must have a value in a training row, got none: remove the "
                "column"
            )
        x[gaps[:, c], c] = known.mean()
    filled = shortened(list(dict.fromkeys(names[c].partition("=")[0] for c in columns)))
    rows = gaps.any(axis=1).sum()
    note = f"{rows} of {len(x)} rows have missing cells filled with the training mean: {filled}."
    return x, numeric, [note]


def check_labels(column: str, names: Sequence[str], rows: int) -> None:
    """Raises ValueError if labels look like regression targets: fractions that rarely repeat."""
    try:
        fractions = [name for name in names if not float(name).is_integer()]
    except (ValueError, OverflowError):  # texts, or inf
        return
    if fractions and 5 * len(names) > rows:
        raise ValueError(
            f"column {column!r} has {len(names)} distinct numbers in {rows} rows, such as "
            f"{fractions[0]}: give target={column} to predict numbers; classes must repeat"
        )
