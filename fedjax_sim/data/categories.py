"""Categories of a table: their order, and their columns of 0 and 1."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base.words import shortened

MOST = 1000
"""Categories of a column that is one-hot encoded; a column with more is rather a text or a name."""


def numbers_or_texts(texts: NDArray[np.str_]) -> NDArray[Any]:
    """Returns integers if all texts are written as such, so that 2 comes before 10.

    >>> numbers_or_texts(np.array(["10", "2"])), numbers_or_texts(np.array(["02"])).tolist()
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
    """Returns a column of 0 and 1 for each category.

    Args:
        columns: a text for every row, by the column's name; "" if it is missing.

    Returns:
        ``f64[n, K]``, NaN in the columns of a missing category; the K names; a note for each of the
        given columns.

    Raises:
        ValueError: if a column has more than 1,000 categories.

    >>> one_hot({"zone": np.array(["10", "2", ""])})[:2]
    (array([[ 0.,  1.],
           [ 1.,  0.],
           [nan, nan]]), ['zone=2', 'zone=10'])
    """
    blocks, names, notes = [], [], []
    for column, texts in columns.items():
        found = [str(value) for value in np.unique(numbers_or_texts(texts[texts != ""]))]
        if len(found) > MOST:
            raise ValueError(
                f"column {column!r} must have at most {MOST} categories, as each becomes an input, "
                f"got {len(found)}: remove the column, or give numbers instead"
            )
        block = (texts[:, None] == np.array(found)).astype(np.float64)
        block[texts == ""] = np.nan
        blocks.append(block)
        names += [f"{column}={value}" for value in found]
        notes.append(f"Column {column!r} is one-hot encoded: {shortened(found)}.")
    return np.concatenate(blocks, axis=1), names, notes


def fill_means(
    x: NDArray[np.float64], train: NDArray[np.bool_], names: list[str]
) -> tuple[NDArray[np.float64], list[str]]:
    """Returns inputs whose NaN are replaced by the mean of the training rows, and a note.

    Args:
        x: ``f64[n, F]``.
        train: ``bool[n]``, which rows train.
        names: of the F columns.

    Raises:
        ValueError: if no training row has a value in a column.

    >>> fill_means(np.array([[1.0], [3.0], [np.nan]]), np.array([True, True, False]), ["age"])
    (array([[1.],
           [3.],
           [2.]]), ['1 of 3 rows have the training mean for a missing cell: age.'])
    """
    gaps = np.isnan(x)
    columns = np.flatnonzero(gaps.any(axis=0))
    if not len(columns):
        return x, []
    x = x.copy()
    for c in columns:
        known = x[train & ~gaps[:, c], c]
        if not len(known):
            raise ValueError(
                f"column {names[c]!r} must have a value in a training row, got none: remove the "
                "column"
            )
        x[gaps[:, c], c] = known.mean()
    told = shortened(list(dict.fromkeys(names[c].partition("=")[0] for c in columns)))
    rows = gaps.any(axis=1).sum()
    return x, [f"{rows} of {len(x)} rows have the training mean for a missing cell: {told}."]


def check_labels(column: str, names: Sequence[str], rows: int) -> None:
    """Rejects labels that look like regression targets: fractions that seldom repeat.

    Raises:
        ValueError: names the column, and ``target=``.
    """
    try:
        fractions = [name for name in names if not float(name).is_integer()]
    except (ValueError, OverflowError):  # texts, or inf
        return
    if fractions and 5 * len(names) > rows:
        raise ValueError(
            f"column {column!r} has {len(names)} different numbers in {rows} rows, such as "
            f"{fractions[0]}: give target={column} to predict numbers; classes must repeat"
        )
