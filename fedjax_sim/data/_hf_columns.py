"""The columns of a Hugging Face data set that have a role."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.data._hf_splits import Split, check_given, is_label, is_textual, joined
from fedjax_sim.data.categories import numbers_or_texts
from fedjax_sim.data.targets import codes_of

Array = NDArray[Any]


def check_roles(given: Mapping[str, Any]) -> None:
    """Raises ValueError for a column with two roles, and for a label beside a target.

    >>> check_roles({"label": "a", "client": "a"})
    Traceback (most recent call last):
    ValueError: hf: must have another column for each of its roles, got 'a' for label and client
    """
    if given.get("label") and given.get("target"):
        raise ValueError(
            f"hf: must have label or target, got label={given['label']} and "
            f"target={given['target']}"
        )
    seen: dict[str, str] = {}
    for role, column in given.items():
        if column in seen:
            raise ValueError(
                "hf: must have another column for each of its roles, got "
                f"{column!r} for {seen[column]} and {role}"
            )
        if isinstance(column, str):
            seen[column] = role


def only_label(train: Split, without: Collection[str | None]) -> str:
    """The only column of class labels.

    Raises:
        ValueError: if there is none, or there are several.
    """
    found = [
        column
        for column, feature in train.rows.features.items()
        if hasattr(feature, "int2str") and column not in without
    ]
    if len(found) != 1:
        raise ValueError(
            f"label=COLUMN or target=COLUMN must be given, as {', '.join(found) or 'no column'} "
            f"{'are' if found else 'is of'} class labels; columns: "
            f"{', '.join(train.rows.column_names)}"
        )
    return found[0]


def labels(parts: Sequence[Split], column: str, numbered: bool) -> tuple[Array, list[str]]:
    """Returns the classes ``int[n]`` and their names; of several labels ``[n, L]``, and no names.

    Args:
        parts: the splits, whose class labels are joined by their names.
        column: of the labels.
        numbered: whether numbers are class labels as they are, so that no names are returned.
    """
    given = joined(parts, column)
    if given.ndim == 2 and given.dtype.kind in "biu" and np.isin(given, (0, 1)).all():
        return given, []
    check_given(parts, column, given)
    if numbered and given.ndim == 1 and given.dtype.kind in "biuf":
        return given, []
    if given.ndim != 1 or given.dtype.kind not in "biuUO":
        raise ValueError(
            f"column {column!r} must be class labels, texts or integers, as it is the label, got "
            f"{parts[0].rows.features[column]}: numbers are given by target={column}, classes as "
            "whole floats by task=classification"
        )
    declared = [part.rows.features[column].names for part in parts if is_label(part, column)]
    plain = numbers_or_texts(given.astype(np.str_)) if is_textual(given) else given
    names = [*chain.from_iterable(declared), *map(str, np.unique(plain))]
    names = list(dict.fromkeys(names))
    if len(names) < 2:
        raise ValueError(f"column {column!r} must have two classes or more, got {names[0]} alone")
    return codes_of(given.astype(np.str_), names).astype(np.int32), names


def numbers(parts: Sequence[Split], column: str) -> NDArray[np.float64]:
    """Returns numbers that are learnt, ``f64[n]`` or ``f64[n, D]``."""
    given = joined(parts, column)
    check_given(parts, column, given)
    if given.ndim > 2 or given.dtype.kind not in "biuf":
        raise ValueError(
            f"column {column!r} must be numbers, or lists of them of one length, as it is the "
            f"target, got {parts[0].rows.features[column]}: classes are given by label={column}"
        )
    return given.astype(np.float64)


def texts(parts: Sequence[Split], column: str) -> Array:
    """Returns a value for every row, by which rows are told apart: integers, or texts ``[n]``."""
    given = joined(parts, column)
    check_given(parts, column, given)
    if given.ndim != 1 or given.dtype.kind not in "biuUO":
        raise ValueError(
            f"column {column!r} must be texts or integers, got {parts[0].rows.features[column]}"
        )
    return given.astype(np.str_) if is_textual(given) else given
