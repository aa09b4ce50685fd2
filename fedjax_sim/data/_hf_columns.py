"""Splits and columns of a Hugging Face data set."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base.words import array_type
from fedjax_sim.data.cells import integers_or_texts
from fedjax_sim.data.targets import class_codes

Array = NDArray[Any]


class Split(NamedTuple):
    """A split of a data set."""

    name: str  # "" for a data set without splits
    rows: Any
    kept: Sequence[int] | None = None  # original number of each row, if rows were dropped

    @property
    def names(self) -> list[str]:
        """Names of the rows for messages, counted from 0."""
        of = f" of split {self.name!r}" if self.name else ""
        return [f"row {i}{of}" for i in (self.kept or range(len(self.rows)))]

    def values(self, column: str) -> Array:
        """Returns a column, whatever its saved format; class labels as their names."""
        rows, feature = self.rows.select_columns([column]), self.rows.features[column]
        if type(feature).__name__ not in ("Value", "ClassLabel"):
            while hasattr(feature, "feature"):  # of lists
                feature = feature.feature
            if hasattr(feature, "decode_example"):  # decoding would open files that rows name
                raise ValueError(
                    f"column {column!r} must be of numbers, texts or images, got "
                    f"{self.rows.features[column]}"
                )
            # The formatter converts all integers to int64, and all floats to float32.
            exact = {"uint8": np.uint8, "float64": np.float64}.get(feature.dtype)
            return np.asarray(rows.with_format("numpy", dtype=exact)[:][column])
        values = rows.with_format("arrow")[:].column(column).to_numpy()
        if hasattr(feature, "int2str"):
            names = np.array([*feature.names, None], object)  # None is the name of -1 and of NaN
            return names[[-1 if k != k else int(k) for k in values]]
        if values.dtype != np.uint8 and values.dtype.kind in "iu":
            return values.astype(np.int64) if np.can_cast(values.dtype, np.int64) else values
        return values

    def without_gaps(self, columns: Collection[str]) -> Split:
        """Returns the split without rows that lack a value in one of the columns."""
        gaps = np.zeros(len(self.rows), bool)
        for column in columns:
            gaps |= gaps_of(self.values(column))
        kept = np.flatnonzero(~gaps)
        return self._replace(rows=self.rows.select(kept), kept=kept.tolist())


def find_splits(dataset: Any, test: float | str | None) -> tuple[Split, Split | None]:
    """Returns the training split, and the test split if the test set is a split."""
    import datasets

    if isinstance(dataset, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise ValueError(
            "dataset must be in memory or on disk, got a stream: load it with streaming=False"
        )
    if not isinstance(dataset, datasets.Dataset | datasets.DatasetDict):
        raise ValueError(
            f"dataset must be a datasets.Dataset or DatasetDict, got {type(dataset).__name__}"
        )
    splits = dataset if isinstance(dataset, datasets.DatasetDict) else {"": dataset}
    known = ", ".join(splits)
    first = "train" if "train" in splits else next(iter(splits), "")
    if not splits or (first != "train" and len(splits) > 1):
        raise ValueError(f"dataset must have a split 'train', got {known or 'none'}")
    train, held_out = Split(first, splits[first]), None
    if test is None and "test" in splits and first != "test":
        held_out = Split("test", splits["test"])
    elif isinstance(test, str) and test != first and test in splits:
        held_out = Split(test, splits[test])
    elif isinstance(test, str) and test not in train.rows.column_names:
        raise ValueError(
            f"test must be a share, a column or a split other than {first or 'the only one'!r}, "
            f"got {test!r}; splits: {known or 'one without a name'}, columns: "
            f"{', '.join(train.rows.column_names)}"
        )
    for part in (train, held_out):
        if part is not None and not len(part.rows):
            of = f"split {part.name!r}" if part.name else "dataset"
            raise ValueError(f"{of} must have rows, got none")
    return train, held_out


def check_columns(parts: Sequence[Split], columns: Sequence[str]) -> None:
    """Raises ValueError if a split lacks a column."""
    for part in parts:
        known = part.rows.column_names
        for column in columns:
            if column not in known:
                of = f"split {part.name!r} " if part.name else ""
                raise ValueError(f"{of}has no column {column!r}; columns: {', '.join(known)}")


def join_values(parts: Sequence[Split], column: str) -> Array:
    """Concatenates a column over splits, which must agree in shape and kind."""
    values = [part.values(column) for part in parts]
    if len({(v.shape[1:], v.dtype.kind) for v in values}) > 1:
        kinds = " and ".join(map(array_type, values))
        features = " and ".join(str(part.rows.features[column]) for part in parts)
        raise ValueError(
            f"column {column!r} must be alike in both splits, got {kinds}, of {features}"
        )
    return np.concatenate(values)


def gaps_of(values: Array) -> NDArray[np.bool_]:
    """Returns which rows lack a value, ``bool[n]``."""
    if values.dtype.kind == "f":
        return _any_in_row(np.isnan(values))
    if values.dtype != object:
        return np.zeros(len(values), bool)
    return np.array([v is None or (np.ndim(v) == 0 and v != v) for v in values])


def _any_in_row(flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return np.asarray(flags.reshape(len(flags), -1).any(axis=1))


def check_values(parts: Sequence[Split], column: str, values: Array) -> None:
    """Raises ValueError if values are missing or infinite, or lists differ in length."""
    names = [name for part in parts for name in part.names]
    gaps = gaps_of(values)
    if gaps.any():
        label = any(is_label(part, column) for part in parts)
        raise ValueError(
            f"{names[int(np.argmax(gaps))]}, column {column!r} must have a value, got none"
            + " or the label -1" * label
            + ": missing=drop leaves such rows out"
            + ", test= names another split" * label
        )
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        row = int(np.argmax(_any_in_row(np.isinf(values))))
        raise ValueError(f"{names[row]}, column {column!r} must be finite, got inf")
    if values.dtype == object and not is_plain(values):
        raise ValueError(
            f"column {column!r} must have one shape in all rows, got "
            f"{parts[0].rows.features[column]}"
        )


def is_plain(values: Array) -> bool:
    """Returns whether values are numbers, booleans or texts, possibly with gaps."""
    known = [v for v in values if v is not None] if values.dtype == object else []
    return values.dtype.kind in "biufO" and all(isinstance(v, str | bool) for v in known)


def is_label(part: Split, column: str) -> bool:
    """Returns whether a column has class labels."""
    return hasattr(part.rows.features[column], "int2str")


def check_roles(roles: Mapping[str, Any]) -> None:
    """Raises ValueError for a column with two roles, or for both a label and a target."""
    if roles.get("label") and roles.get("target"):
        raise ValueError(
            f"hf: must have label or target, got label={roles['label']} and "
            f"target={roles['target']}"
        )
    seen: dict[str, str] = {}
    for role, column in roles.items():
        if column in seen:
            raise ValueError(
                f"hf: each role must have its own column, got {column!r} for {seen[column]} and "
                f"{role}"
            )
        if isinstance(column, str):
            seen[column] = role


def only_label(train: Split, without: Collection[str | None]) -> str:
    """Returns the only column of class labels; raises ValueError if there are none or several."""
    columns = [
        column
        for column, feature in train.rows.features.items()
        if hasattr(feature, "int2str") and column not in without
    ]
    if len(columns) != 1:
        raise ValueError(
            f"label=COLUMN or target=COLUMN must be given, as {', '.join(columns) or 'no column'} "
            f"{'have' if columns else 'has'} class labels; columns: "
            f"{', '.join(train.rows.column_names)}"
        )
    return columns[0]


def label_values(parts: Sequence[Split], column: str, numbered: bool) -> tuple[Array, list[str]]:
    """Reads class labels ``int[n]`` and their names, or multi-labels ``[n, L]`` without names.

    Class labels of several splits are matched by name. If ``numbered``, numbers are kept.
    """
    values = join_values(parts, column)
    if values.ndim == 2 and values.dtype.kind in "biu" and np.isin(values, (0, 1)).all():
        return values, []
    check_values(parts, column, values)
    if numbered and values.ndim == 1 and values.dtype.kind in "biuf":
        return values, []
    if values.ndim != 1 or values.dtype.kind not in "biuUO":
        raise ValueError(
            f"column {column!r} must be class labels, texts or integers, as it is the label, got "
            f"{parts[0].rows.features[column]}: use target={column} for numbers, or "
            "task=classification for classes as whole floats"
        )
    declared = [part.rows.features[column].names for part in parts if is_label(part, column)]
    plain = integers_or_texts(values.astype(np.str_)) if _is_textual(values) else values
    names = [*chain.from_iterable(declared), *map(str, np.unique(plain))]
    names = list(dict.fromkeys(names))
    if len(names) < 2:
        raise ValueError(f"column {column!r} must have two classes or more, got {names[0]} alone")
    return class_codes(values.astype(np.str_), names).astype(np.int32), names


def target_values(parts: Sequence[Split], column: str) -> NDArray[np.float64]:
    """Reads regression targets, ``f64[n]`` or ``f64[n, D]``."""
    values = join_values(parts, column)
    check_values(parts, column, values)
    if values.ndim > 2 or values.dtype.kind not in "biuf":
        raise ValueError(
            f"column {column!r} must be numbers, or lists of them of one length, as it is the "
            f"target, got {parts[0].rows.features[column]}: use label={column} for classes"
        )
    return values.astype(np.float64)


def key_values(parts: Sequence[Split], column: str) -> Array:
    """Reads a column of identifiers: integers or texts, ``[n]``."""
    values = join_values(parts, column)
    check_values(parts, column, values)
    if values.ndim != 1 or values.dtype.kind not in "biuUO":
        raise ValueError(
            f"column {column!r} must be texts or integers, got {parts[0].rows.features[column]}"
        )
    return values.astype(np.str_) if _is_textual(values) else values


def _is_textual(values: Array) -> bool:
    return values.dtype.kind == "U" or all(isinstance(value, str) for value in values)
