"""Data sets by name, and the text forms of the command line."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedjax_sim.base import calls
from fedjax_sim.base.binding import arguments
from fedjax_sim.base.files import DamagedError
from fedjax_sim.base.registry import Registry, UnknownNameError
from fedjax_sim.base.signatures import takes
from fedjax_sim.base.spelling import did_you_mean, plain
from fedjax_sim.base.words import shortened
from fedjax_sim.data import _csv, _huggingface
from fedjax_sim.data._covertype import covertype
from fedjax_sim.data._diabetes import diabetes
from fedjax_sim.data._eicu import eicu, eicu_demo
from fedjax_sim.data._folder import image_folder
from fedjax_sim.data._leaf import femnist, leaf
from fedjax_sim.data._npz import npz
from fedjax_sim.data._synthetic import synthetic
from fedjax_sim.data.dataset import Dataset
from fedjax_sim.data.folder import DataDir
from fedjax_sim.data.images import digits, tfds_images
from fedjax_sim.data.options import split_options
from fedjax_sim.data.text import (
    shakespeare,
    shakespeare_tokens,
    tiny_shakespeare,
    tiny_shakespeare_tokens,
)

DATASETS: Registry[Callable[[DataDir], Dataset]] = Registry(
    "data set",
    wanted="a function of the data folder that returns a Dataset",
    fits=lambda value: takes(value, None),
    makes=lambda: (Dataset,),
    group="fedjax_sim.datasets",
    own={
        "digits": digits,
        "mnist": partial(tfds_images, "mnist"),
        "fashion_mnist": partial(tfds_images, "fashion_mnist"),
        "cifar10": partial(tfds_images, "cifar10"),
        "cifar100": partial(tfds_images, "cifar100"),
        "emnist": partial(tfds_images, "emnist/balanced", called="emnist"),
        "svhn": partial(tfds_images, "svhn_cropped", called="svhn"),
        "femnist": femnist,
        "shakespeare": shakespeare,
        "shakespeare_tokens": shakespeare_tokens,
        "tiny_shakespeare": tiny_shakespeare,
        "tiny_shakespeare_tokens": tiny_shakespeare_tokens,
        "covertype": covertype,
        "eicu": eicu,
        "eicu_demo": eicu_demo,
        "diabetes": diabetes,
    },
)
"""Data sets by name; ``register`` adds others, see :class:`fedjax_sim.base.registry.Registry`."""

FILES: Mapping[str, tuple[str, tuple[str, ...], Callable[..., Dataset]]] = {
    "npz": ("FILE.npz[,classes=M][,task=TASK]", ("classes", "task"), npz),
    "folder": (
        "folder:DIR[,test=FRACTION or FOLDER][,size=PIXELS or WIDTHxHEIGHT]",
        ("test", "size"),
        image_folder,
    ),
    "leaf": ("leaf:DIR[,classes=M][,task=TASK]", ("classes", "task"), leaf),
}
"""Kinds of a user's files whose options are all optional: form, options and loader."""


KINDS = ("csv", "hf", "tfds", "folder", "leaf")
"""What stands before the colon of data that are no function of a module."""


def dataset_forms(names: Iterable[str]) -> list[str]:
    """All that :func:`fedjax_sim.data.load_dataset` takes, if ``names`` are the known data sets."""
    others = ["synthetic(alpha, beta)", "synthetic(iid)", "tfds:NAME", "package.module:function"]
    return [*names, *others, *(form for form, *_ in FILES.values()), _csv.FORM, _huggingface.FORM]


def load_dataset(name: str, data_dir: DataDir = None) -> Dataset:
    """A data set by its name; the first load of a large one decodes it into the cache.

    Args:
        name: a key of ``DATASETS``, or ``synthetic(alpha, beta)``, ``synthetic(iid)``, or
            ``tfds:NAME`` for any image classification data set of TFDS, or
            ``package.module:function``. Or a user's own files, which are read anew every time:

            - ``FILE.npz``: arrays x_train, y_train, x_test, y_test, as in Keras' mnist.npz; their
              natural clients, if any, are client_train, or that and client_test. The task follows
              from y: integers or texts ``[n]`` are classes, floats ``[n]`` or ``[n, D]``
              regression, bool, or integers 0 and 1, ``[n, L]`` multi-label. Options: ``classes=M``;
              ``task=classification``, ``regression`` or ``multi_label``, if y may be of several.
            - ``csv:FILE,label=COLUMN``: a table, also as .gz. The labels' texts are the classes;
              ``target=COLUMN`` in place of ``label`` is a column of numbers, for regression. The
              other columns are inputs: numbers, true or false. Options: ``client=COLUMN``, the
              natural client; ``test=FRACTION``, a share of each class, 0.2 by default, or
              ``test=COLUMN`` of 0 or 1, false or true, train or test; ``classes=M``, if labels are
              numbers 0 … M - 1; ``categorical=COLUMN+COLUMN``, inputs to be one-hot encoded, or
              ``categorical=all`` that have texts; ``missing=refuse``, the default, ``drop`` the
              rows that lack a cell, or fill in the training ``mean``; ``sep=;`` or ``tab``;
              ``encoding=latin-1``.
            - ``folder:DIR``: images DIR/train/CLASS/*.png or .jpg and DIR/test/CLASS/*. Options:
              ``test=FOLDER`` beside train, or ``test=FRACTION`` of each class, 0.2 if there is no
              test folder; the classes may then lie in DIR itself. ``size=32`` or
              ``size=WIDTHxHEIGHT`` resizes all images.
            - ``leaf:DIR``: LEAF's DIR/train/*.json and DIR/test/*.json, whose inputs are numbers,
              or texts that one character follows; its users are the natural clients. Options:
              ``classes=M``, ``task=``, as for ``FILE.npz``.
            - ``hf:NAME``: a data set of Hugging Face ``datasets``: a folder that ``save_to_disk``
              has written, another folder, .parquet or .arrow file that it reads, or a name of the
              Hub, ``config=`` telling which of several. The other options are arguments of
              :func:`fedjax_sim.data.from_huggingface`: ``label=``, ``target=``, ``client=``,
              ``input=``, ``test=``, ``classes=``, ``task=``, ``categorical=``, ``missing=``,
              ``size=``.
        data_dir: a folder of data, itself a TFDS folder or holding one as ``tfds/``; default is the
            environment variable FEDJAX_SIM_DATA_DIR. If neither is given, TFDS's own folder is used
            and a missing data set is downloaded; a folder that was given is never written to.

    Returns:
        The data set, with the statistics of its training inputs.

    Raises:
        ValueError: if the name is unknown, or a user's file is not as it must be.
        DataNotFoundError: if the data set is not in the folder, or cannot be downloaded or read.

    Example:
        >>> data = load_dataset("digits")
        >>> data.train_x.shape, data.train_x.dtype, data.test_y.shape, data.classes
        ((1438, 8, 8, 1), dtype('uint8'), (359,), 10)
    """
    if not isinstance(name, str):
        raise ValueError(f"name must be a data set's name, such as 'digits', got {name!r}")
    return parse_dataset(name)[1](data_dir)


def parse_dataset(text: str) -> tuple[str, Callable[[DataDir], Dataset]]:
    """The loader that a text such as "mnist" or "synthetic(0.5, 0.5)" means.

    Args:
        text: as :func:`fedjax_sim.data.load_dataset` takes it.

    Returns:
        The key in ``DATASETS``, or "synthetic", "tfds" or the kind of a user's files, or the text
        if it names a function to import; and the function ``data_dir -> Dataset``.

    Raises:
        ValueError: if it is none of these; the message has them all.

    Example:
        >>> key, load = parse_dataset("synthetic(0.5, 0.5)")
        >>> key, load(None).name
        ('synthetic', 'synthetic(0.5, 0.5)')
    """
    tfds = re.fullmatch(r"tfds:(\w+(?:/[\w.+-]+)?)", text)
    if tfds:
        return "tfds", lambda data_dir: tfds_images(tfds[1], data_dir)._replace(name=text)
    own = _own_files(text)
    if own:
        return own[0], partial(_from_files, text, own[1])
    if plain(text.partition("(")[0].strip()) == "synthetic":
        return "synthetic", _synthetic(text)
    try:
        name, load = DATASETS.resolve(text)
    except UnknownNameError as error:
        raise _unknown(text, str(error).partition("; ")[2]) from error
    except ValueError as error:
        kind, _, rest = text.partition(":")
        absent = getattr(error.__cause__, "name", None) == kind  # there is no such module
        if not absent or not (kinds := did_you_mean(kind, KINDS)):
            raise
        meant = " or ".join(f"{kind}:{rest}" for kind in kinds)
        raise _unknown(text, f"did you mean {meant}?") from error
    return name, partial(_loaded, text, load) if DATASETS.is_foreign(name) else load


def _synthetic(text: str) -> Callable[[DataDir], Dataset]:
    try:
        call = calls.as_call(calls.parse(text), text)
        if call.args == ("iid",) and not call.named:
            return lambda data_dir: synthetic(iid=True)
        given = arguments(call, {"alpha": True, "beta": True})
        alpha, beta = (float(calls.word(given[name])) for name in ("alpha", "beta"))
    except ValueError as error:
        raise _unknown(text) from error
    return lambda data_dir: synthetic(alpha, beta)


def _own_files(text: str) -> tuple[str, Callable[[str], Dataset]] | None:
    """The kind of a user's files that a text means, and the function ``name -> Dataset``."""
    kind, _, rest = text.partition(":")
    if text.partition(",")[0].endswith(".npz"):
        kind, rest = "npz", text
    if kind == "csv":
        request = _csv.parse_table(rest)
        return "csv", lambda name: _csv.table(name, request)
    if kind == "hf":
        wanted = _huggingface.parse_request(rest)
        return "hf", lambda name: _huggingface.huggingface(name, wanted)
    if kind in FILES and rest:
        form, options, load = FILES[kind]
        place, given = split_options(kind, rest, options, form)
        return kind, lambda name: load(name, Path(place).expanduser(), **given)
    return None


def _from_files(text: str, load: Callable[[str], Dataset], data_dir: DataDir) -> Dataset:
    del data_dir  # what a user names is where the name says
    try:
        dataset = load(text)
        _check_common(dataset)
        return dataset
    except DamagedError:  # it names the file
        raise
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error


def _check_common(dataset: Dataset) -> None:
    """Raises ValueError if no class of the test set is in the training set."""
    if dataset.task.classes is None:
        return
    train, test = (np.unique(y) for y in (dataset.train_y, dataset.test_y))
    if not np.isin(test, train).any():
        named = dataset.class_names or list(map(str, range(dataset.task.classes)))
        of_train, of_test = (shortened([named[k] for k in found]) for found in (train, test))
        raise ValueError(
            f"the test set must have classes of the training set, {of_train}, got {of_test}: name "
            "the classes alike in both"
        )


def _loaded(text: str, load: Callable[[DataDir], Any], data_dir: DataDir) -> Dataset:
    dataset = load(data_dir)
    if not isinstance(dataset, Dataset):
        raise ValueError(f"{text} must return a Dataset, got {type(dataset).__name__}")
    return dataset


def _unknown(text: str, hint: str = "") -> ValueError:
    known = ", ".join(dataset_forms(DATASETS))
    return ValueError(
        f"name must be a data set, got {text!r}; {hint}{' ' * bool(hint)}known: {known}"
    )
