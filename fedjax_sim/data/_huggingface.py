"""Hugging Face data sets from a folder, a file, or the Hub."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.data._folder import Size, read_images
from fedjax_sim.data._table import check_columns, from_table
from fedjax_sim.data.dataset import Dataset
from fedjax_sim.data.folder import DataNotFoundError, may_download, quiet_logs
from fedjax_sim.data.options import (
    EVERY_TEXT,
    FIFTH,
    MISSING,
    check_roles,
    one_of,
    share_or_name,
    split_options,
)
from fedjax_sim.data.targets import KINDS

FORM = (
    "hf:NAME[,label=COLUMN or target=COLUMN][,client=COLUMN][,input=COLUMN]"
    "[,test=FRACTION, COLUMN or SPLIT][,config=NAME][,classes=M][,task=TASK]"
    "[,categorical=COLUMN+COLUMN or all][,missing=refuse, drop or mean][,size=WIDTHxHEIGHT]"
)
ROLES = ("label", "target", "client", "input", "test")
OPTIONS = (*ROLES, "config", "classes", "task", "categorical", "missing", "size")


FILES = {".parquet": "parquet", ".arrow": "arrow"}
SAVED = ("dataset_dict.json", "state.json")
"""Files of a folder written by ``save_to_disk``."""


def parse_request(text: str) -> tuple[str, dict[str, Any]]:
    """Parses ``NAME[,label=COLUMN]...`` into the place and the options, or raises ValueError."""
    place, options = split_options("hf", text, OPTIONS, FORM)
    if not place:
        raise ValueError(f"hf: must have a folder, file or name, got {text!r}; its form is {FORM}")
    check_roles("hf", {key: value for key, value in options.items() if key in ROLES})
    return place, options


def huggingface(name: str, at: str, config: str | None = None, **columns: Any) -> Dataset:
    """Loads a folder, a .parquet or .arrow file, or a data set of the Hub, ``config`` of it.

    Files are read again every time; data of the Hub are downloaded into the cache of ``datasets``.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataNotFoundError(
            f"data set {name!r} needs Hugging Face datasets, which is not installed: "
            "pip install datasets"
        ) from error
    place = Path(at).expanduser()
    if place.is_file() and place.suffix not in FILES:
        raise ValueError(f"a file must be .parquet or .arrow, got {place.name}")
    local, saved = place.exists(), any((place / file).is_file() for file in SAVED)
    if config is not None and (saved or place.is_file()):
        raise ValueError(f"config={config} is not for saved data: leave it out")
    with (
        tempfile.TemporaryDirectory() as scratch,
        _quiet(datasets),
        nullcontext() if may_download() and not local else _offline(datasets),
    ):
        try:
            if place.is_file():
                files, kind = str(place), FILES[place.suffix]
                loaded = datasets.load_dataset(kind, data_files=files, cache_dir=scratch)
            elif saved:
                loaded = datasets.load_from_disk(str(place))
            elif local:
                loaded = datasets.load_dataset(str(place), config, cache_dir=scratch)
            else:
                loaded = datasets.load_dataset(at, config)
        except Exception as error:  # pyarrow, fsspec and the builders raise many types
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            if local or not isinstance(error, OSError):
                raise ValueError(f"cannot be read: {reason}") from error
            raise DataNotFoundError(
                f"data set {name!r}: there is no folder or file {at}, and as a name on the Hub it "
                f"cannot be loaded: {reason}"
            ) from error
        return from_huggingface(name, loaded, **columns)


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Hides the progress bars and retry messages of ``datasets``."""
    hidden = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        with quiet_logs():
            yield
    finally:
        if not hidden:
            datasets.enable_progress_bars()


@contextmanager
def _offline(datasets: Any) -> Iterator[None]:
    """Prevents ``datasets`` from connecting to the Hub."""
    from huggingface_hub import constants

    with (
        mock.patch.object(datasets.config, "HF_HUB_OFFLINE", True),
        mock.patch.object(constants, "HF_HUB_OFFLINE", True),
    ):
        yield


def from_huggingface(
    name: str,
    dataset: Any,
    *,
    label: str | None = None,
    target: str | None = None,
    client: str | None = None,
    input: str | None = None,
    test: float | str | None = None,
    classes: int | None = None,
    task: str | None = None,
    categorical: Sequence[str] = (),
    missing: Literal["refuse", "drop", "mean"] = "refuse",
    size: tuple[int, int] | None = None,
) -> Dataset:
    """Converts a data set of Hugging Face ``datasets``.

    Args:
        name: name of the data set.
        dataset: a ``datasets.Dataset``, or a ``DatasetDict``, whose split "train", or only split,
            is the training set.
        label: the class column: class labels, texts, integers or bool; or lists of 0 and 1 of equal
            length, several labels a sample. None for the only column of class labels.
        target: column of numbers (or lists of them) to predict, instead of a label.
        client: column of the natural clients; None for none.
        input: the input column: images, numbers, or lists of numbers of equal length, where
            integers are tokens. None for the only image column, or without one for all columns that
            have no role, as a table of numbers and categories.
        test: name of the split that is the test set; a column with values 0 or 1, false or true,
            train or test; or the share of each class. None for the split "test", or without one for
            a fifth.
        classes: M, if labels are the numbers 0 … M - 1.
        task: "classification" (also for one-hot lists), "regression" on the label, or
            "multi_label" for lists; None to infer it from the label.
        categorical: text or integer columns to one-hot encode, as class labels always are; ("all",)
            for all text columns.
        missing: how to handle rows that lack a number, category, label or client: "refuse" raises,
            "drop" removes the row, "mean" fills inputs with their training mean.
        size: width and height to which images are resized; None if all have the same size.

    Returns:
        Inputs ``f32[n, F]``, images ``uint8[n, H, W, C]``, or tokens ``int32[n, T]``. Texts and
        integers are numbered in sorted order.

    Raises:
        ValueError: if the data set is streamed or empty, lacks a column, or a column does not fit
            its role; the message names column and row.

    Example:
        >>> import datasets
        >>> rows = {"x": [0.5, 1.0, 4.0, 5.0], "kind": ["b", "a", "b", "a"], "who": [7, 7, 9, 9]}
        >>> pets = from_huggingface(
        ...     "pets", datasets.Dataset.from_dict(rows), label="kind", client="who", test=0.5
        ... )
        >>> pets.class_names, pets.client_names, len(pets.train_y)
        (('a', 'b'), ('7', '9'), 2)
    """
    one_of("missing", MISSING)(missing)
    if task is not None:
        one_of("task", KINDS)(task)
    roles = {"label": label, "target": target, "client": client, "input": input, "test": test}
    check_roles("hf", roles)
    rows, held_out, test_set = _split_rows(dataset, test)
    flags = held_out if isinstance(held_out, str) else None
    notes = []
    if label is None and target is None:
        label = _only_label(rows, without=(client, input, flags))
        notes.append(f"Column {label!r} is the label, as it is the only one with class labels.")
    if task == "regression" and label is not None:
        label, target = None, label
    categorical = (categorical,) if isinstance(categorical, str) else categorical
    named = [c for c in categorical if c != EVERY_TEXT]
    others = (label, target, client, flags)
    check_columns(rows.column_names, [*others, input, *named])
    columns = [c for c in rows.column_names if c not in others] if input is None else [input]
    images = [c for c in columns if type(rows.features[c]).__name__ == "Image"]
    x, y = None, None
    if len(images) == 1:
        x, lost = _read_images(rows, images[0], size)
        notes += lost
    elif len(columns) == 1 and _is_list(rows, columns[0]):
        x = _read_lists(rows, columns[0])
        x = x[..., None] if x.dtype == np.uint8 and x.ndim == 3 else x
    lists = label or target
    if lists is not None and _is_list(rows, lists):
        y = _read_lists(rows, lists)
    scalars = [c for c in others if c is not None and (y is None or c != lists)]
    return from_table(
        name,
        _read_frame(rows, [*scalars, *(columns if x is None else [])]),
        label=label,
        target=target,
        client=client,
        test=held_out,
        test_set=test_set,
        classes=classes,
        categorical=categorical,
        missing=missing,
        x=x,
        y=y,
        task=task,
        notes=notes,
    )


def _split_rows(
    dataset: Any, test: float | str | None
) -> tuple[Any, float | str | NDArray[np.bool_], str]:
    """Returns all rows, the test rows and their description if they are a split, else ``test``."""
    import datasets

    if not isinstance(dataset, datasets.Dataset | datasets.DatasetDict):
        raise ValueError(
            "dataset must be a datasets.Dataset or DatasetDict, which streaming=False loads, got "
            f"{type(dataset).__name__}"
        )
    splits = dataset if isinstance(dataset, datasets.DatasetDict) else {"": dataset}
    first = "train" if "train" in splits else next(iter(splits), "")
    if not splits or (first != "train" and len(splits) > 1):
        raise ValueError(f"dataset must have a split 'train', got {', '.join(splits) or 'none'}")
    held_out = "test" if test is None else test
    if held_out not in splits or held_out == first:
        if isinstance(test, str) and test not in splits[first].column_names:
            known = f"splits: {', '.join(splits)}, " if first else ""
            known += f"columns: {', '.join(splits[first].column_names)}"
            raise ValueError(
                f"test must be a share, a column or a split to test on, got {test!r}; {known}"
            )
        return splits[first], FIFTH if test is None else share_or_name(str(test)), ""
    parts = [splits[first], splits[held_out]]
    for column, kind in parts[0].features.items():
        other = parts[1].features.get(column, kind)
        if other != kind:
            raise ValueError(
                f"column {column!r} must be alike in both splits, class names in one order, got "
                f"{kind} and {other}: cast one, or use test= for a share of {first!r}"
            )
    rows = datasets.concatenate_datasets(parts)
    return rows, np.repeat([False, True], [*map(len, parts)]), f"its split {held_out!r}"


def _only_label(rows: Any, without: Sequence[str | None]) -> str:
    """Returns the only column of class labels; raises ValueError if there are none or several."""
    columns = [
        column
        for column, feature in rows.features.items()
        if hasattr(feature, "int2str") and column not in without
    ]
    if len(columns) != 1:
        raise ValueError(
            f"label=COLUMN or target=COLUMN must be given, as {', '.join(columns) or 'no column'} "
            f"{'have' if columns else 'has'} class labels; columns: {', '.join(rows.column_names)}"
        )
    return columns[0]


def _read_frame(rows: Any, columns: Sequence[str]) -> Any:
    """Returns columns as a pandas frame; class labels are categories, in which -1 is missing."""
    import pandas as pd

    for column in columns:
        feature = rows.features[column]
        if type(feature).__name__ not in ("Value", "ClassLabel"):
            raise ValueError(
                f"column {column!r} must be numbers or texts, got {feature}: use input=COLUMN to "
                "select one column of images or numbers as the input"
            )
    index = pd.RangeIndex(len(rows), name="row")  # pandas has no rows without columns
    table = rows.select_columns(list(columns)).with_format("arrow")[:]
    # As floats, integers of a column with gaps would be rounded beyond 2^53.
    frame = pd.DataFrame(table.to_pandas(integer_object_nulls=True), index=index)
    for column in columns:
        if hasattr(rows.features[column], "int2str"):
            codes = pd.to_numeric(frame[column]).fillna(-1).astype(int)
            names = rows.features[column].names
            frame[column] = pd.Categorical.from_codes(codes, categories=names)
    return frame


def _is_list(rows: Any, column: str) -> bool:
    return type(rows.features[column]).__name__ not in ("Value", "ClassLabel", "Image")


def _read_lists(rows: Any, column: str) -> NDArray[Any]:
    """Reads lists of numbers, ``[n, ...]``."""
    feature = rows.features[column]
    while hasattr(feature, "feature"):  # of lists
        feature = feature.feature
    kind = getattr(feature, "dtype", "")
    if not kind.startswith(("int", "uint", "float", "bool")):  # others may name files to open
        raise ValueError(f"column {column!r} must be lists of numbers, got {feature}")
    # The formatter converts all integers to int64, and all floats to float32.
    exact = {"uint8": np.uint8, "float64": np.float64}.get(kind)
    values = np.asarray(rows.select_columns([column]).with_format("numpy", dtype=exact)[:][column])
    if values.dtype == object:
        raise ValueError(
            f"column {column!r} must have lists of one length in all rows, got several lengths or "
            "no list"
        )
    return values


def _read_images(rows: Any, column: str, size: Size) -> tuple[NDArray[np.uint8], list[str]]:
    import datasets
    from PIL import Image, ImageOps

    plain = rows.with_format(None).select_columns([column])
    plain = plain.cast_column(column, datasets.Image(decode=False))

    def open_image(i: int) -> Any:
        stored = plain[i][column]
        file = stored["path"] if stored["bytes"] is None else io.BytesIO(stored["bytes"])
        return ImageOps.exif_transpose(Image.open(file))

    return read_images(
        [(f"row {i}, column {column!r}", i) for i in range(len(plain))], open_image, size
    )
