"""Data sets by name, and the texts of the command line that name them."""

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fedjax_sim.base import calls
from fedjax_sim.base.binding import arguments
from fedjax_sim.base.files import DamagedError
from fedjax_sim.base.registry import Registry, UnknownNameError
from fedjax_sim.base.signatures import takes
from fedjax_sim.base.spelling import plain
from fedjax_sim.data import _csv, _huggingface
from fedjax_sim.data._eicu import eicu, eicu_demo
from fedjax_sim.data._folder import image_folder
from fedjax_sim.data._leaf import femnist, leaf
from fedjax_sim.data._npz import npz
from fedjax_sim.data._synthetic import synthetic
from fedjax_sim.data._tables import covertype, diabetes
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
"""Kinds of files without required options: form, options and loader."""


def dataset_forms(names: Iterable[str]) -> list[str]:
    """Returns all texts that :func:`fedjax_sim.data.load_dataset` takes, given the known names."""
    others = ["synthetic(alpha, beta)", "synthetic(iid)", "tfds:NAME", "package.module:function"]
    return [*names, *others, *(form for form, *_ in FILES.values()), _csv.FORM, _huggingface.FORM]


def load_dataset(name: str, data_dir: DataDir = None) -> Dataset:
    """Loads a data set by name; the first load of a large one decodes it into the cache.

    Args:
        name: a key of ``DATASETS``, ``synthetic(alpha, beta)``, ``synthetic(iid)``, ``tfds:NAME``
            for any image classification data set of TFDS, or ``package.module:function``. Or your
            own files, which are read again every time:

            - ``FILE.npz``: arrays x_train, y_train, x_test, y_test, as in Keras' mnist.npz; natural
              clients, if any, are in client_train, or also in client_test. y determines the task:
              integers or texts ``[n]`` are classes, floats ``[n]`` or ``[n, D]`` regression
              targets, bool, or integers 0 and 1, ``[n, L]`` multi-label. Options: ``classes=M``;
              ``task=classification``, ``regression`` or ``multi_label``, if y is ambiguous.
            - ``csv:FILE,label=COLUMN``: a table, possibly as .gz, whose labels are the classes; use
              ``target=COLUMN`` instead for a column of numbers to predict. The other columns are
              inputs: numbers, true or false. Options: ``client=COLUMN``, the natural client;
              ``test=FRACTION``, a share of each class, 0.2 by default, or ``test=COLUMN`` with
              values 0 or 1, false or true, train or test; ``classes=M``, if labels are numbers
              0 … M - 1; ``categorical=COLUMN+COLUMN``, columns to one-hot encode, or
              ``categorical=all`` for all text columns; ``missing=refuse``, the default, or ``drop``
              to drop rows with missing cells, or ``mean`` to fill them with the training mean;
              ``sep=;`` or ``tab``; ``encoding=latin-1``.
            - ``folder:DIR``: images DIR/train/CLASS/*.png or .jpg and DIR/test/CLASS/*. Options:
              ``test=FOLDER``, another folder in DIR, or ``test=FRACTION`` of each class, 0.2 if
              there is no test folder; the class folders may then be in DIR itself. ``size=32`` or
              ``size=WIDTHxHEIGHT`` resizes all images.
            - ``leaf:DIR``: LEAF's DIR/train/*.json and DIR/test/*.json, whose inputs are numbers,
              or texts to be continued by one character; users are the natural clients. Options:
              ``classes=M``, ``task=``, as for ``FILE.npz``.
            - ``hf:NAME``: a data set of Hugging Face ``datasets``: a folder written by
              ``save_to_disk``, another folder, .parquet or .arrow file that it can read, or a name
              on the Hub, with ``config=`` to select a configuration. The other options are
              arguments of :func:`fedjax_sim.data.from_huggingface`: ``label=``, ``target=``,
              ``client=``, ``input=``, ``test=``, ``classes=``, ``task=``, ``categorical=``,
              ``missing=``, ``size=``.
        data_dir: the data folder, which is a TFDS folder or contains one as ``tfds/``; defaults to
            the environment variable FEDJAX_SIM_DATA_DIR. If neither is given, TFDS's own folder is
            used and missing data sets are downloaded; a given folder is never written to.

    Returns:
        The data set, with the statistics of its training inputs.

    Raises:
        ValueError: if the name is unknown, or a file is malformed.
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
    """Returns the loader for a text such as "mnist" or "synthetic(0.5, 0.5)".

    Args:
        text: as for :func:`fedjax_sim.data.load_dataset`.

    Returns:
        The key in ``DATASETS``, "synthetic", "tfds", the kind of a user's files, or the text itself
        if it names a function to import; and the function ``data_dir -> Dataset``.

    Raises:
        ValueError: if the text is not understood; the message names the forms.

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
    """Returns the kind of files that a text names, and the function ``name -> Dataset``."""
    kind, _, rest = text.partition(":")
    if text.partition(",")[0].endswith(".npz"):
        kind, rest = "npz", text
    if kind == "csv":
        file, options = _csv.parse_table(rest)
        return "csv", lambda name: _csv.load_table(name, file, **options)
    if kind == "hf":
        at, options = _huggingface.parse_request(rest)
        return "hf", lambda name: _huggingface.huggingface(name, at, **options)
    if kind in FILES and rest:
        form, known, load = FILES[kind]
        place, given = split_options(kind, rest, known, form)
        return kind, lambda name: load(name, Path(place).expanduser(), **given)
    return None


def _from_files(text: str, load: Callable[[str], Dataset], data_dir: DataDir) -> Dataset:
    del data_dir  # the text has the path
    try:
        return load(text)
    except DamagedError:  # its message names the file
        raise
    except ValueError as error:
        raise ValueError(f"{text}: {error}") from error


def _loaded(text: str, load: Callable[[DataDir], Any], data_dir: DataDir) -> Dataset:
    dataset = load(data_dir)
    if not isinstance(dataset, Dataset):
        raise ValueError(f"{text} must return a Dataset, got {type(dataset).__name__}")
    return dataset


def _unknown(text: str, hint: str = "") -> ValueError:
    meant = hint or f"known: {', '.join(dataset_forms(DATASETS))}"
    return ValueError(f"name must be a data set, got {text!r}; {meant}")
