"""A user's data set of Hugging Face ``datasets``: a folder, a file, or a name of the Hub."""

from __future__ import annotations

import logging
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlparse
from urllib.request import getproxies

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.data._hf_columns import check_roles, labels, numbers, only_label, texts
from fedjax_sim.data._hf_folder import check_images, in_a_line, read_local
from fedjax_sim.data._hf_inputs import images_of, inputs
from fedjax_sim.data._hf_splits import check_columns, splits_of
from fedjax_sim.data.categories import fill_means
from fedjax_sim.data.dataset import Dataset, from_arrays, random_share
from fedjax_sim.data.folder import DataNotFoundError, may_download
from fedjax_sim.data.options import (
    EVERY_TEXT,
    FIFTH,
    MISSING,
    check_parts,
    in_test,
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


class Request(NamedTuple):
    """What a user says of a data set.

    Attributes:
        place: a folder, a file, or a name of the Hub.
        config: which of its configurations; None for the only one.
        columns: arguments of :func:`from_huggingface`.
    """

    place: str
    config: str | None
    columns: Mapping[str, Any]


def parse_request(text: str) -> Request:
    """Returns what ``NAME[,label=COLUMN][,client=COLUMN]...`` means.

    Raises:
        ValueError: if the text is none of this form.

    Example:
        >>> parse_request("patients,client=hospital,test=0.5").columns
        {'client': 'hospital', 'test': 0.5}
    """
    place, given = split_options("hf", text, OPTIONS, FORM)
    if not place:
        raise ValueError(f"hf: must have a folder, file or name, got {text!r}; its form is {FORM}")
    config = given.pop("config", None)
    check_roles({key: value for key, value in given.items() if key in ROLES})
    return Request(place, config, given)


def huggingface(name: str, of: Request) -> Dataset:
    """Reads a data set that ``datasets`` reads, see :func:`from_huggingface`.

    Args:
        name: of the data set.
        of: what ``save_to_disk`` has written; another folder, .parquet or .arrow file that
            ``datasets`` reads, which is read anew every time; or a name of the Hub, which is
            downloaded into the cache of ``datasets`` if it is not there.

    Raises:
        DataNotFoundError: if it is not there, or ``datasets`` is not installed.
        ValueError: if it cannot be read, or :func:`from_huggingface` refuses it.
    """
    datasets = _library(name)
    place = Path(of.place).expanduser()
    with tempfile.TemporaryDirectory() as scratch, _quiet(datasets):
        if place.exists():
            with _offline(datasets):
                loaded = read_local(datasets, place, of.config, scratch)
        else:
            loaded = _of_the_hub(datasets, name, of)
        return from_huggingface(name, loaded, **of.columns)


def _library(name: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataNotFoundError(
            f"data set {name!r} needs Hugging Face datasets, which is not installed: "
            "pip install datasets"
        ) from error
    return datasets


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Keeps the progress bars and the retries of ``datasets`` off the screen."""
    logger, shown = logging.getLogger("huggingface_hub"), datasets.are_progress_bars_disabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not shown:
            datasets.enable_progress_bars()


@contextmanager
def _offline(datasets: Any) -> Iterator[None]:
    """Keeps ``datasets`` from asking the Hub."""
    from huggingface_hub import constants

    switches: tuple[Any, ...] = (datasets.config, constants)
    before = [module.HF_HUB_OFFLINE for module in switches]
    for module in switches:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, offline in zip(switches, before, strict=True):
            module.HF_HUB_OFFLINE = offline


def _reachable() -> bool:
    """Whether the Hub's address is known: without network ``datasets`` asks for it for 23 s."""
    from huggingface_hub import constants

    try:
        return bool(getproxies() or socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443))
    except OSError:
        return False


def _of_the_hub(datasets: Any, name: str, of: Request) -> Any:
    with nullcontext() if may_download() and _reachable() else _offline(datasets):
        try:
            loaded = datasets.load_dataset(of.place, of.config)
        except OSError as error:  # none of that name too
            raise DataNotFoundError(
                f"data set {name!r}: there is no folder or file {of.place}, and as a name of the "
                f"Hub it cannot be had: {in_a_line(error)}"
            ) from error
        except Exception as error:
            raise ValueError(f"cannot be read: {in_a_line(error)}") from error
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
    """Returns a data set of Hugging Face ``datasets``.

    Args:
        name: its name.
        dataset: a ``datasets.Dataset``, or a ``DatasetDict``, of which the split "train" is the
            training set, or the only one.
        label: the column of the classes: class labels, texts, integers or bool; or of equally long
            lists of 0 and 1, several labels a sample. None for the only column of class labels.
        target: in place of a label, the column of numbers (or lists of them) that are learnt.
        client: the column of the natural clients; None for none.
        input: the column of the inputs: images, numbers, or equally long lists of them, of which
            integers are tokens. None for the only column of images, and if there is none for all
            columns without a role, which then are numbers or categories.
        test: the name of the split that is the test set, a column that says 0 or 1, false or true,
            train or test, or the share of each class; None for the split "test", and without one
            for a fifth.
        classes: M, if labels are the numbers 0 … M - 1.
        task: "classification", also of whole floats and one-hot lists; "regression" of the label;
            or "multi_label" of lists; None: what the label says.
        categorical: inputs of texts or integers that are one-hot encoded, as class labels are;
            ("all",) for each that has texts.
        missing: what is done about a row that lacks a number, category, label or client: "refuse"
            raises, "drop" leaves it out, "mean" fills in the training mean of inputs.
        size: width and height to which images are resized; None if they have one size.

    Returns:
        Inputs ``f32[n, F]``, ``uint8[n, H, W, C]`` of images, or ``int32[n, T]`` of tokens. Class
        labels are joined by their names, which may have other numbers in another split; texts and
        integers are numbered in their order.

    Raises:
        ValueError: if it is no such data set, is streamed, has no rows, lacks a column, or a column
            does not fit its role; names column and row.

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
    train, held = splits_of(dataset, test)
    parts = [train] if held is None else [train, held]
    flags = test if held is None and isinstance(test, str) else None
    notes = []
    if label is None and target is None:
        label = only_label(train, without=(client, input, flags))
        notes.append(f"Column {label!r} is the label, the only one of class labels.")
    if task == "regression" and label is not None:
        label, target = None, label
    roles = [column for column in (label, target, client, flags) if column is not None]
    named = [c for c in categorical if c != EVERY_TEXT]
    check_columns(parts, [*roles, *named, *([] if input is None else [input])])
    columns = [c for c in train.rows.features if c not in roles] if input is None else [input]
    if missing == "drop":
        whole = [*roles, *([] if images_of(train, columns) else columns)]
        before = sum(len(part.rows) for part in parts)
        parts = [part.without_gaps(whole) for part in parts]
        dropped = before - sum(len(part.rows) for part in parts)
        if dropped:
            notes.append(f"{dropped} of {before} rows lack a value and are left out.")
    names: list[str] = []
    y: NDArray[Any]
    if target is None:
        y, names = labels(parts, str(label), classes is not None or task == "classification")
    else:
        y = numbers(parts, target)
    found = inputs(parts, columns, categorical, missing == "mean", size)
    strata = np.zeros(len(y), np.int32)
    if target is None and y.ndim == 1:
        strata = np.unique(y, return_inverse=True)[1].astype(np.int32)
    if held is not None:
        of_test = np.repeat([False, True], [len(part.rows) for part in parts])
        words = f"its split {held.name!r}"
    elif flags is not None:
        of_test = in_test(flags, texts(parts, flags).astype(np.str_), parts[0].names)
        words = f"the test rows of {flags!r}"
    else:
        share = share_or_name(str(FIFTH if test is None else test))
        of_test = random_share(strata, float(share))
        words = f"a fixed random {100 * float(share):g} %" + " of each class" * bool(strata.any())
    has = f"; column {label!r} has {len(names)} classes" if names else ""
    check_parts(of_test, test or FIFTH, has)
    x, numeric = found.x, None
    if found.names:
        numeric = ~(np.isin(x, (0, 1)) | np.isnan(x)).all(axis=0)
        x, filled = fill_means(x, ~of_test, list(found.names))
        notes += filled
    width = 1 if y.ndim == 1 else y.shape[1]
    return from_arrays(
        name,
        x,
        y,
        test=of_test,
        client=None if client is None else texts(parts, client),
        numeric=numeric,
        scale=not found.tokens,
        classes=classes,
        class_names=names,
        column_names=found.names,
        task=task if target is None else regression(width),
        test_set=words,
        notes=[*notes, *found.notes],
    )
