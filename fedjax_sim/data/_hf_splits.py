"""The splits of a Hugging Face data set, and their columns as arrays."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Split(NamedTuple):
    """A split of a data set.

    Attributes:
        name: what it is called; "" if it is all.
        rows: a ``datasets.Dataset``.
        kept: the number of each row in the file, if some were left out.
    """

    name: str
    rows: Any
    kept: Sequence[int] | None = None

    @property
    def names(self) -> list[str]:
        """What its rows are called, from 0."""
        of = f" of split {self.name!r}" if self.name else ""
        return [f"row {i}{of}" for i in (self.kept or range(len(self.rows)))]

    def values(self, column: str) -> Array:
        """A column, whatever format the data set was saved with; class labels are their names."""
        rows, feature = self.rows.select_columns([column]), self.rows.features[column]
        if type(feature).__name__ not in ("Value", "ClassLabel"):
            while hasattr(feature, "feature"):  # of lists
                feature = feature.feature
            if hasattr(feature, "decode_example"):  # it would open what rows name
                raise ValueError(
                    f"column {column!r} must be of numbers, texts or images, got "
                    f"{self.rows.features[column]}"
                )
            # The formatter makes int64 of all integers, and float32 of all floats.
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
        """The rows that have a value in each of these columns."""
        gaps = np.zeros(len(self.rows), bool)
        for column in columns:
            gaps |= gaps_of(self.values(column))
        kept = np.flatnonzero(~gaps)
        return self._replace(rows=self.rows.select(kept), kept=kept.tolist())


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
    """Raises ValueError for a split that lacks a column."""
    for part in parts:
        known = part.rows.column_names
        for column in columns:
            if column not in known:
                of = f"split {part.name!r} " if part.name else ""
                raise ValueError(f"{of}has no column {column!r}; its columns: {', '.join(known)}")


def joined(parts: Sequence[Split], column: str) -> Array:
    found = [part.values(column) for part in parts]
    if len({(values.shape[1:], values.dtype.kind) for values in found}) > 1:
        kinds = " and ".join(f"{values.dtype} {list(values.shape)}" for values in found)
        features = " and ".join(str(part.rows.features[column]) for part in parts)
        raise ValueError(
            f"column {column!r} must be alike in both splits, got {kinds}, of {features}"
        )
    return np.concatenate(found)


def gaps_of(values: Array) -> NDArray[np.bool_]:
    """``bool[n]``, which rows lack a value."""
    if values.dtype.kind == "f":
        return _any_in_row(np.isnan(values))
    if values.dtype != object:
        return np.zeros(len(values), bool)
    return np.array([v is None or (np.ndim(v) == 0 and v != v) for v in values])


def _any_in_row(flags: NDArray[np.bool_]) -> NDArray[np.bool_]:
    return np.asarray(flags.reshape(len(flags), -1).any(axis=1))


def check_given(parts: Sequence[Split], column: str, values: Array) -> None:
    """Raises ValueError if values are missing or infinite, or lists of several lengths."""
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
            f"column {column!r} must be of one shape in all rows, got "
            f"{parts[0].rows.features[column]}"
        )


def is_plain(values: Array) -> bool:
    """Whether these are numbers or texts, of which some may be missing."""
    known = [v for v in values if v is not None] if values.dtype == object else []
    return values.dtype.kind in "biufO" and all(isinstance(v, str | bool) for v in known)


def is_textual(values: Array) -> bool:
    return values.dtype.kind == "U" or all(isinstance(value, str) for value in values)


def is_label(part: Split, column: str) -> bool:
    return hasattr(part.rows.features[column], "int2str")
