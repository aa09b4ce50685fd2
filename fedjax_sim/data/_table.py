"""Data sets from tables, as pandas frames whose columns are labels, clients, test rows, inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base.words import shortened
from fedjax_sim.data.dataset import Dataset, from_arrays
from fedjax_sim.data.options import EVERY_TEXT, check_parts, choose_test
from fedjax_sim.data.targets import integers_or_texts
from fedjax_sim.tasks import regression

Array = NDArray[Any]

MAX_CATEGORIES = 1000
"""Largest number of categories of a one-hot column; more suggest free text or names."""


def from_table(
    name: str,
    frame: Any,
    *,
    label: str | None = None,
    target: str | None = None,
    client: str | None = None,
    test: float | str | NDArray[np.bool_],
    test_set: str = "",
    classes: int | None = None,
    categorical: Sequence[str] = (),
    missing: str = "refuse",
    x: Array | None = None,
    y: Array | None = None,
    task: str | None = None,
    notes: Sequence[str] = (),
) -> Dataset:
    """Makes a data set from a ``pandas.DataFrame``, whose index names its rows in messages.

    ``label`` and so on are as for :func:`fedjax_sim.data.from_huggingface`, but ``test`` may also
    be flags ``bool[n]`` with a description ``test_set``. ``x`` and ``y`` replace columns that a
    frame cannot hold, such as images.
    """
    flags = test if isinstance(test, str) else None
    roles = [c for c in (label, target, client, flags) if c is not None and c in frame]
    columns = [] if x is not None else [c for c in frame.columns if c not in roles]
    both = [c for c in categorical if c in roles]
    if both:
        raise ValueError(f"categorical must be inputs, got {both[0]!r}, which has another role")
    notes = [*notes]
    gaps = frame[[*roles, *columns]].isna()
    if missing == "drop":
        kept = ~gaps.any(axis=1).to_numpy()
        x, y = (values if values is None else values[kept] for values in (x, y))
        test = test[kept] if isinstance(test, np.ndarray) else test
        if not kept.all():
            notes.append(f"{sum(~kept)} of {len(kept)} rows lack a value and were dropped.")
        frame = frame[kept]
    else:
        _check_gaps(frame, gaps[roles] if missing == "mean" else gaps, roles)
    if not len(frame):
        raise ValueError("must have rows, got none" + "; all lack a value" * bool(len(gaps)))
    names: list[str] = []
    if y is None and target is not None:
        y = _read_numbers(frame[target], f"label={target}")
    elif y is None and classes is not None and not _has_classes(frame[label]):
        y = _read_numbers(frame[label], f"label={label} without classes=")
    elif y is None:
        y, names = _read_labels(frame[label])
    if x is None:
        x, columns, more = _read_inputs(frame[columns], categorical)
        notes += more
    assert y is not None
    hint = f"; column {label!r} has {len(names)} classes" if names else ""
    if isinstance(test, np.ndarray):
        check_parts(test, test_set, hint)
    else:
        strata = np.zeros(len(y)) if target is not None or y.ndim > 1 else y
        marks = None if flags is None else _read_keys(frame[flags]).astype(np.str_)
        test, test_set = choose_test(test, strata, marks, _rows(frame), hint)
    numeric, tokens = None, not columns and x.ndim == 2 and x.dtype.kind in "iu"
    if columns:
        x, numeric, more = _fill_means(x, ~test, columns)
        notes += more
    return from_arrays(
        name,
        x,
        y,
        test=test,
        client=None if client is None else _read_keys(frame[client]),
        numeric=numeric,
        scale=not tokens,
        classes=classes,
        class_names=names,
        column_names=columns,
        task=task if target is None else regression(1 if y.ndim == 1 else y.shape[1]),
        test_set=test_set,
        notes=notes,
    )


def check_columns(known: Sequence[str], columns: Sequence[str | None], hint: str = "") -> None:
    """Raises ValueError if a column is not among the known ones."""
    for column in columns:
        if column is not None and column not in known:
            there = shortened(known, 20) or "none"
            raise ValueError(f"has no column {column!r}; columns: {there}{hint}")


def _rows(frame: Any) -> list[str]:
    return [f"{frame.index.name} {i}" for i in frame.index]


def _check_gaps(frame: Any, gaps: Any, roles: Sequence[str]) -> None:
    if not gaps.any(axis=None):
        return
    i, j = np.argwhere(gaps.to_numpy())[0]
    column = gaps.columns[j]
    classes = _has_classes(frame[column])
    other = ", or missing=mean to fill in the training mean"
    if column in roles:
        other = ", or test= for a split that has labels" * classes
    raise ValueError(
        f"{_rows(frame)[i]}, column {column!r} must have a value, got none"
        f"{' or the label -1' * classes}: use missing=drop to drop such rows{other}"
    )


def _has_classes(values: Any) -> bool:
    """Returns whether a column has classes with names in an order, as in Hugging Face data."""
    return str(values.dtype) == "category"


def _read_inputs(frame: Any, categorical: Sequence[str]) -> tuple[Array, list[str], list[str]]:
    """Reads numbers, NaN if missing, and then one-hot categories; their names; notes."""
    if not len(frame.columns):
        raise ValueError("must have an input column too, besides those with a role")
    plain: dict[str, Array] = {}
    encoded: dict[str, Array] = {}
    for column in frame.columns:
        values = frame[column]
        numbers = _as_numbers(values)
        every = EVERY_TEXT in categorical and numbers is None
        if column in categorical or _has_classes(values) or every:
            known = values.notna().to_numpy()
            encoded[column] = np.full(len(values), "", object)
            encoded[column][known] = _read_keys(values[known]).astype(np.str_)
        elif numbers is None:
            texts = values.dropna()
            first = _first(texts, np.isnan(_parse_numbers(texts)), "a number")
            raise ValueError(
                f"{first}: use categorical={column} to encode its categories, or categorical=all "
                "for all text columns"
            )
        elif _infinite(numbers).any():
            first = _first(values, _infinite(numbers), "a finite number in float32")
            raise ValueError(f"{first}: correct it or leave the row out")
        else:
            plain[column] = numbers
    x = np.stack([*plain.values()], axis=1) if plain else np.zeros((len(frame), 0))
    if not encoded:
        return x, [*plain], []
    block, names, notes = _one_hot(encoded)
    return np.concatenate([x, block], axis=1), [*plain, *names], notes


def _as_numbers(values: Any) -> NDArray[np.float64] | None:
    """Returns numbers and booleans, NaN if missing; None for other values."""
    from pandas.api.types import is_numeric_dtype

    # Booleans and integers with gaps are objects.
    plain = values.dtype == object and all(isinstance(v, int) for v in values.dropna())
    numbers = plain or is_numeric_dtype(values.dtype)
    return values.to_numpy(np.float64, na_value=np.nan) if numbers else None


def _parse_numbers(values: Any) -> NDArray[np.float64]:
    """Returns the numbers that texts stand for, NaN for other texts."""
    from pandas import to_numeric

    return np.asarray(to_numeric(values.astype(str), errors="coerce"), np.float64)


def _infinite(numbers: NDArray[np.float64]) -> NDArray[np.bool_]:
    with np.errstate(over="ignore"):
        return np.isinf(numbers.astype(np.float32))


def _first(values: Any, wrong: Any, wanted: str) -> str:
    """Returns the start of an error about the first wrong value."""
    i = int(np.argmax(wrong))
    got = str(values.iloc[i])
    return f"{_rows(values)[i]}, column {values.name!r} must be {wanted}, got {got!r}"


def _read_numbers(values: Any, other: str) -> NDArray[np.float64]:
    """Reads a target, or labels that are numbers; ``other`` is the option for named classes."""
    numbers = _as_numbers(values)
    numbers = _parse_numbers(values) if numbers is None else numbers
    wrong = np.isnan(numbers) | _infinite(numbers)
    if wrong.any():
        first = _first(values, wrong, "a finite number")
        raise ValueError(f"{first}: use {other} for named classes")
    return numbers


def _read_labels(values: Any) -> tuple[NDArray[np.int64], list[str]]:
    """Reads classes and their names: declared ones in order, or sorted texts or integers."""
    if _has_classes(values):
        names, y = [*map(str, values.cat.categories)], values.cat.codes.to_numpy(np.int64)
    else:
        labels, y = np.unique(_read_keys(values), return_inverse=True)
        names = [str(label) for label in labels]
    if len(names) < 2:
        raise ValueError(
            f"column {values.name!r} must have two classes or more, got {names[0]} alone"
        )
    _check_classes(values.name, names, len(y))
    return y, names


def _check_classes(column: str, names: Sequence[str], rows: int) -> None:
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


def _read_keys(values: Any) -> Array:
    """Reads labels or identifiers as numbers, or as texts if they are not numbers."""
    found = np.asarray(values)
    return found if found.dtype.kind in "iuf" else integers_or_texts(found.astype(np.str_))


def _one_hot(
    columns: dict[str, Array],
) -> tuple[NDArray[np.float64], list[str], list[str]]:
    """Encodes columns of texts, "" if missing, as 0 and 1 for each category, NaN if missing.

    Returns ``f64[n, K]``, the K column names, and a note on each column.
    """
    blocks, names, notes = [], [], []
    for column, texts in columns.items():
        known = texts[texts != ""].astype(np.str_)
        categories = [str(value) for value in np.unique(integers_or_texts(known))]
        if not categories:
            raise ValueError(f"column {column!r} must have a value, got none: remove the column")
        if len(categories) > MAX_CATEGORIES:
            raise ValueError(
                f"column {column!r} must have at most {MAX_CATEGORIES} categories, as each becomes "
                f"an input, got {len(categories)}: remove the column, or give numbers instead"
            )
        block = (texts[:, None] == np.array(categories, object)).astype(np.float64)
        block[texts == ""] = np.nan
        blocks.append(block)
        names += [f"{column}={value}" for value in categories]
        notes.append(f"Column {column!r} is one-hot encoded: {shortened(categories)}.")
    return np.concatenate(blocks, axis=1), names, notes


def _fill_means(
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
