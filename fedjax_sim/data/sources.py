"""Data sets by name, and the text forms of the command line."""

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from fedjax_sim.base.registry import Registry, UnknownNameError
from fedjax_sim.base.signatures import takes
from fedjax_sim.data._covertype import covertype
from fedjax_sim.data._eicu import eicu, eicu_demo
from fedjax_sim.data._synthetic import synthetic
from fedjax_sim.data.dataset import Dataset
from fedjax_sim.data.folder import DataDir
from fedjax_sim.data.images import digits, tfds_images
from fedjax_sim.data.text import shakespeare, tiny_shakespeare

DATASETS: Registry[Callable[[DataDir], Dataset]] = Registry(
    "data set",
    wanted="a function of the data folder that returns a Dataset",
    fits=lambda value: takes(value, None),
    group="fedjax_sim.datasets",
    own={
        "digits": digits,
        "mnist": partial(tfds_images, "mnist"),
        "fashion_mnist": partial(tfds_images, "fashion_mnist"),
        "cifar10": partial(tfds_images, "cifar10"),
        "shakespeare": shakespeare,
        "tiny_shakespeare": tiny_shakespeare,
        "covertype": covertype,
        "eicu": eicu,
        "eicu_demo": eicu_demo,
    },
)
"""Data sets by name; ``register`` adds others, see :class:`fedjax_sim.base.registry.Registry`."""


def dataset_forms(names: Iterable[str]) -> list[str]:
    """All that :func:`fedjax_sim.data.load_dataset` takes, if ``names`` are the known data sets."""
    others = ("synthetic(alpha, beta)", "synthetic(iid)", "tfds:NAME", "package.module:function")
    return [*names, *others]


def load_dataset(name: str, data_dir: DataDir = None) -> Dataset:
    """A data set by its name; the first load of a large one decodes it into the cache.

    Args:
        name: a key of ``DATASETS``, or ``synthetic(alpha, beta)``, ``synthetic(iid)``, or
            ``tfds:NAME`` for any image classification data set of TFDS, or
            ``package.module:function``.
        data_dir: a folder of data, itself a TFDS folder or holding one as ``tfds/``; default is the
            environment variable FEDJAX_SIM_DATA_DIR. If neither is given, TFDS's own folder is used
            and a missing data set is downloaded; a folder that was given is never written to.

    Returns:
        The data set, with the statistics of its training inputs.

    Raises:
        ValueError: if the name is unknown.
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
        The key in ``DATASETS``, or "synthetic" or "tfds", or the text if it names a function to
        import; and the function ``data_dir -> Dataset``.

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
    numbers = re.fullmatch(r"synthetic\(\s*([^\s,]+)\s*,\s*([^\s,]+)\s*\)", text)
    iid = text == "synthetic(iid)"
    try:
        alpha, beta = map(float, numbers.groups()) if numbers else (0.0, 0.0)
    except ValueError as error:
        raise _unknown(text) from error
    if numbers or iid:
        return "synthetic", lambda data_dir: synthetic(alpha, beta, iid=iid)
    try:
        name, load = DATASETS.resolve(text)
    except UnknownNameError as error:
        raise _unknown(text, str(error).partition("; ")[2]) from error
    return name, partial(_loaded, text, load) if DATASETS.is_foreign(name) else load


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
