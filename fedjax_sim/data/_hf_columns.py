"""The columns of a Hugging Face data set as arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.data.pixels import alike, read_pixels

Array = NDArray[Any]


class Split(NamedTuple):
    """A split of a data set.

    Attributes:
        name: what it is called; "" if it is all.
        rows: a ``datasets.Dataset``.
    """

    name: str
    rows: Any

    @property
    def names(self) -> list[str]:
        """What its rows are called, from 0."""
        of = f" of split {self.name!r}" if self.name else ""
        return [f"row {i}{of}" for i in range(len(self.rows))]

    def values(self, column: str) -> Array:
        """A column, whatever format the data set was saved with."""
        rows = self.rows.with_format("numpy").select_columns([column])
        values, feature = np.asarray(rows[:][column]), rows.features[column]
        while hasattr(feature, "feature"):  # of lists
            feature = feature.feature
        # The formatter makes int64 of all integers.
        return values.astype(np.uint8) if feature.dtype == "uint8" else values


def check_roles(given: Mapping[str, Any]) -> None:
    """Refuses a column with two roles, and a label beside a target.

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


def splits_of(dataset: Any, test: float | str | None) -> tuple[Split, Split | None]:
    """The training split, and the test split if the test set is one.

    Raises:
        ValueError: if it is no data set with rows and such splits.
    """
    import datasets

    if isinstance(dataset, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise ValueError(
            "dataset must be in memory or on disk, got a stream: load it with streaming=False"
        )
    if not isinstance(dataset, datasets.Dataset | datasets.DatasetDict):
        raise ValueError(
            f"dataset must be a datasets.Dataset or DatasetDict, got {type(dataset).__name__}"
        )
    found = dataset if isinstance(dataset, datasets.DatasetDict) else {"": dataset}
    known = ", ".join(found)
    first = "train" if "train" in found else next(iter(found), "")
    if not found or (first != "train" and len(found) > 1):
        raise ValueError(f"dataset must have a split 'train', got {known or 'none'}")
    train, held = Split(first, found[first]), None
    if test is None and "test" in found and first != "test":
        held = Split("test", found["test"])
    elif isinstance(test, str) and test != first and test in found:
        held = Split(test, found[test])
    elif isinstance(test, str) and test not in train.rows.column_names:
        raise ValueError(
            f"test must be a share, a column or a split other than {first or 'the only one'!r}, "
            f"got {test!r}; splits: {known or 'one without a name'}, columns: "
            f"{', '.join(train.rows.column_names)}"
        )
    for part in (train, held):
        if part is not None and not len(part.rows):
            of = f"split {part.name!r}" if part.name else "dataset"
            raise ValueError(f"{of} must have rows, got none")
    return train, held


def check_columns(parts: Sequence[Split], columns: Sequence[str]) -> None:
    """Refuses a split that lacks a column."""
    for part in parts:
        known = part.rows.column_names
        for column in columns:
            if column not in known:
                of = f"split {part.name!r} " if part.name else ""
                raise ValueError(f"{of}has no column {column!r}; its columns: {', '.join(known)}")


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


def labels(parts: Sequence[Split], column: str) -> tuple[Array, list[str]]:
    """The classes as ``int[n]`` and their names; of several labels ``[n, L]``, and no names."""
    given = _joined(parts, column)
    feature = parts[0].rows.features[column]
    if given.ndim == 2 and given.dtype.kind in "biu" and np.isin(given, (0, 1)).all():
        return given, []
    _check_given(parts, column, given)
    if given.ndim != 1 or given.dtype.kind not in "biuUO":
        raise ValueError(
            f"column {column!r} must be class labels, texts or integers, as it is the label, got "
            f"{feature}: numbers are given by target={column}"
        )
    if hasattr(feature, "int2str"):
        if given.min() < 0:
            i = int(np.argmax(given < 0))
            raise ValueError(
                f"{_names(parts)[i]}, column {column!r} must have a label, got {given[i]}: leave "
                "it out, or say by test= what else is scored"
            )
        y, names = given, list(feature.names)
    else:
        plain = given.astype(np.str_) if _textual(given) else given
        different, y = np.unique(plain, return_inverse=True)
        names = [str(value) for value in different]
    if len(names) < 2:
        raise ValueError(f"column {column!r} must have two classes or more, got {names[0]} alone")
    return y.astype(np.int32), names


def numbers(parts: Sequence[Split], column: str) -> NDArray[np.float64]:
    """Numbers that are learnt, ``f64[n]`` or ``f64[n, D]``."""
    given = _joined(parts, column)
    _check_given(parts, column, given)
    if given.ndim > 2 or given.dtype.kind not in "biuf" or _is_label(parts, column):
        raise ValueError(
            f"column {column!r} must be numbers, or lists of them of one length, as it is the "
            f"target, got {parts[0].rows.features[column]}: classes are given by label={column}"
        )
    return given.astype(np.float64)


def texts(parts: Sequence[Split], column: str) -> Array:
    """A value for every row, by which rows are told apart: integers, or texts ``[n]``."""
    given = _joined(parts, column)
    _check_given(parts, column, given)
    if given.ndim != 1 or given.dtype.kind not in "biuUO":
        raise ValueError(
            f"column {column!r} must be texts or integers, got {parts[0].rows.features[column]}"
        )
    if _is_label(parts, column):
        return np.array(parts[0].rows.features[column].int2str(given.tolist()))
    return given.astype(np.str_) if _textual(given) else given


def inputs(
    parts: Sequence[Split], column: str | None, taken: Sequence[str]
) -> tuple[Array, Array | None, bool]:
    """What models see.

    Args:
        parts: the splits.
        column: it alone; None for the only images, else all columns but those taken.
        taken: columns that have a role.

    Returns:
        The inputs, ``bool[F]`` which columns of a table are scaled or None for all, and whether the
        inputs are tokens.
    """
    features = parts[0].rows.features
    columns = [c for c in features if c not in taken] if column is None else [column]
    images = [c for c in columns if type(features[c]).__name__ == "Image"]
    if len(images) == 1:
        return _images(parts, images[0]), None, False
    if not columns:
        raise ValueError(f"must have a column of inputs too, got only {', '.join(features)}")
    found = {c: _joined(parts, c) for c in columns if c not in images}
    for c, values in found.items():
        _check_given(parts, c, values)
    one = len(columns) == 1
    unfit = [
        c
        for c in columns
        if c in images or found[c].dtype.kind not in "biuf" or (found[c].ndim > 1 and not one)
    ]
    if unfit:
        raise ValueError(
            f"column {unfit[0]!r} must be a number, as all columns without a role are inputs, got "
            f"{features[unfit[0]]}: input=COLUMN names one column of images or of numbers"
        )
    if one and found[columns[0]].ndim > 1:
        (x,) = found.values()
        grey = x.dtype == np.uint8 and x.ndim == 3
        return x[..., None] if grey else x, None, x.ndim == 2 and x.dtype.kind in "iu"
    x = np.stack([values.astype(np.float64) for values in found.values()], axis=1)
    return x, np.array([not np.isin(values, (0, 1)).all() for values in x.T]), False


def _images(parts: Sequence[Split], column: str) -> NDArray[np.uint8]:
    import datasets

    return alike(
        (name, read_pixels(f"{name}, column {column!r}", _decoded, (rows, i, column)))
        for part in parts
        for rows in [
            part.rows.with_format(None)
            .select_columns([column])
            .cast_column(column, datasets.Image())
        ]
        for i, name in enumerate(part.names)
    )


def _decoded(place: tuple[Any, int, str]) -> Any:
    rows, i, column = place
    return rows[i][column]


def _joined(parts: Sequence[Split], column: str) -> Array:
    found = [part.values(column) for part in parts]
    if len({(values.shape[1:], values.dtype.kind) for values in found}) > 1:
        kinds = " and ".join(f"{values.dtype} {list(values.shape)}" for values in found)
        raise ValueError(f"column {column!r} must be alike in both splits, got {kinds}")
    return np.concatenate(found)


def _check_given(parts: Sequence[Split], column: str, values: Array) -> None:
    """Refuses empty values and lists of several lengths."""
    if values.dtype.kind == "f":
        empty = ~np.isfinite(values)
    elif values.dtype == object:
        empty = np.array(
            [value is None or (np.ndim(value) == 0 and value != value) for value in values]
        )
        if not empty.any() and not _textual(values):
            raise ValueError(
                f"column {column!r} must be of one shape in all rows, got "
                f"{parts[0].rows.features[column]}"
            )
    else:
        return
    if empty.any():
        i = int(np.argmax(empty.reshape(len(values), -1).any(axis=1)))
        got = "a number that is not finite" if values.dtype.kind == "f" else "none"
        raise ValueError(
            f"{_names(parts)[i]}, column {column!r} must have a value, got {got}: fill it in or "
            "leave the row out"
        )


def _textual(values: Array) -> bool:
    return values.dtype.kind == "U" or all(isinstance(value, str) for value in values)


def _is_label(parts: Sequence[Split], column: str) -> bool:
    return hasattr(parts[0].rows.features[column], "int2str")


def _names(parts: Sequence[Split]) -> list[str]:
    return [name for part in parts for name in part.names]
