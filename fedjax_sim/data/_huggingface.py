"""Hugging Face data sets from a folder, a file, or the Hub."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal
from unittest import mock
from urllib.parse import urlparse
from urllib.request import getproxies

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.data._hf_columns import (
    check_columns,
    check_roles,
    find_splits,
    key_values,
    label_values,
    only_label,
    target_values,
)
from fedjax_sim.data._hf_folder import check_images, one_line, read_local
from fedjax_sim.data._hf_inputs import images_of, read_inputs
from fedjax_sim.data.cells import fill_means
from fedjax_sim.data.dataset import Dataset, from_arrays
from fedjax_sim.data.folder import DataNotFoundError, may_download, quiet_logs
from fedjax_sim.data.options import (
    EVERY_TEXT,
    FIFTH,
    MISSING,
    check_parts,
    choose_test,
    one_of,
    share_or_name,
    split_options,
)
from fedjax_sim.data.targets import KINDS
from fedjax_sim.tasks import regression

FORM = (
    "hf:NAME[,label=COLUMN or target=COLUMN][,client=COLUMN][,input=COLUMN]"
    "[,test=FRACTION, COLUMN or SPLIT][,config=NAME][,classes=M][,task=TASK]"
    "[,categorical=COLUMN+COLUMN or all][,missing=refuse, drop or mean][,size=WIDTHxHEIGHT]"
)
ROLES = ("label", "target", "client", "input", "test")
OPTIONS = (*ROLES, "config", "classes", "task", "categorical", "missing", "size")


def parse_request(text: str) -> tuple[str, dict[str, Any]]:
    """Parses ``NAME[,label=COLUMN]...`` into the place and the options, or raises ValueError."""
    place, options = split_options("hf", text, OPTIONS, FORM)
    if not place:
        raise ValueError(f"hf: must have a folder, file or name, got {text!r}; its form is {FORM}")
    check_roles({key: value for key, value in options.items() if key in ROLES})
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
    with tempfile.TemporaryDirectory() as scratch, _quiet(datasets):
        if place.exists():
            with _offline(datasets):
                loaded = read_local(datasets, place, config, scratch)
        else:
            loaded = _load_from_hub(datasets, name, at, config)
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


def _reachable() -> bool:
    """Returns whether the Hub's address resolves; without network ``datasets`` retries for 23 s."""
    from huggingface_hub import constants

    try:
        return bool(getproxies() or socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443))
    except OSError:
        return False


def _load_from_hub(datasets: Any, name: str, at: str, config: str | None) -> Any:
    with nullcontext() if may_download() and _reachable() else _offline(datasets):
        try:
            loaded = datasets.load_dataset(at, config)
        except OSError as error:  # also if there is no such name
            raise DataNotFoundError(
                f"data set {name!r}: there is no folder or file {at}, and as a "
                f"name on the Hub it cannot be loaded: {one_line(error)}"
            ) from error
        except Exception as error:
            raise ValueError(f"cannot be read: {one_line(error)}") from error
    caches = datasets.config.HF_CACHE_HOME, datasets.config.HF_DATASETS_CACHE
    check_images(datasets, loaded, [Path(cache).resolve() for cache in caches])
    return loaded


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
        task: "classification" (also for integral floats and one-hot lists), "regression" on the
            label, or "multi_label" for lists; None to infer it from the label.
        categorical: text or integer columns to one-hot encode, as class labels always are; ("all",)
            for all text columns.
        missing: how to handle rows that lack a number, category, label or client: "refuse" raises,
            "drop" removes the row, "mean" fills inputs with their training mean.
        size: width and height to which images are resized; None if all have the same size.

    Returns:
        Inputs ``f32[n, F]``, images ``uint8[n, H, W, C]``, or tokens ``int32[n, T]``. Class labels
        are matched by name, as their numbers may differ between splits; texts and integers are
        numbered in sorted order.

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
    check_roles({"label": label, "target": target, "client": client, "input": input, "test": test})
    train, held_out = find_splits(dataset, test)
    parts = [train] if held_out is None else [train, held_out]
    flags = test if held_out is None and isinstance(test, str) else None
    notes = []
    if label is None and target is None:
        label = only_label(train, without=(client, input, flags))
        notes.append(f"Column {label!r} is the label, as it is the only one with class labels.")
    if task == "regression" and label is not None:
        label, target = None, label
    roles = [column for column in (label, target, client, flags) if column is not None]
    categorical = (categorical,) if isinstance(categorical, str) else categorical
    named = [c for c in categorical if c != EVERY_TEXT]
    check_columns(parts, [*roles, *named, *([] if input is None else [input])])
    columns = [c for c in train.rows.features if c not in roles] if input is None else [input]
    if missing == "drop":
        whole = [*roles, *([] if images_of(train, columns) else columns)]
        before = sum(len(part.rows) for part in parts)
        parts = [part.without_gaps(whole) for part in parts]
        dropped = before - sum(len(part.rows) for part in parts)
        if dropped:
            notes.append(f"{dropped} of {before} rows lack a value and were dropped.")
    names: list[str] = []
    y: NDArray[Any]
    if target is None:
        y, names = label_values(parts, str(label), classes is not None or task == "classification")
    else:
        y = target_values(parts, target)
    x, column_names, converted = read_inputs(parts, columns, categorical, missing == "mean", size)
    hint = f"; column {label!r} has {len(names)} classes" if names else ""
    if held_out is not None:
        in_test = np.repeat([False, True], [len(part.rows) for part in parts])
        check_parts(in_test, held_out.name, hint)
        words = f"its split {held_out.name!r}"
    else:
        column = None if flags is None else key_values(parts, flags).astype(np.str_)
        option = flags or share_or_name(str(FIFTH if test is None else test))
        strata = y if target is None and y.ndim == 1 else np.zeros(len(y))
        in_test, words = choose_test(option, strata, column, parts[0].names, hint)
    numeric, tokens = None, x.ndim == 2 and x.dtype.kind in "iu"
    if column_names:
        x, numeric, fill_notes = fill_means(x, ~in_test, column_names)
        notes += fill_notes
    width = 1 if y.ndim == 1 else y.shape[1]
    return from_arrays(
        name,
        x,
        y,
        test=in_test,
        client=None if client is None else key_values(parts, client),
        numeric=numeric,
        scale=not tokens,
        classes=classes,
        class_names=names,
        column_names=column_names,
        task=task if target is None else regression(width),
        test_set=words,
        notes=[*notes, *converted],
    )
