"""Data sets by name, and the text forms of the command line."""

import re
from collections.abc import Callable
from functools import partial

from fedjax_sim.data.covertype import covertype
from fedjax_sim.data.dataset import Dataset
from fedjax_sim.data.eicu import eicu, eicu_demo
from fedjax_sim.data.folder import DataDir
from fedjax_sim.data.images import digits, tfds_images
from fedjax_sim.data.synthetic import synthetic
from fedjax_sim.data.text import shakespeare, tiny_shakespeare

DATASETS: dict[str, Callable[[DataDir], Dataset]] = {
    "digits": digits,
    "mnist": partial(tfds_images, "mnist"),
    "fashion_mnist": partial(tfds_images, "fashion_mnist"),
    "cifar10": partial(tfds_images, "cifar10"),
    "shakespeare": shakespeare,
    "tiny_shakespeare": tiny_shakespeare,
    "covertype": covertype,
    "eicu": eicu,
    "eicu_demo": eicu_demo,
}

# All that `load_dataset` takes.
FORMS = (*DATASETS, "synthetic(alpha, beta)", "synthetic(iid)", "tfds:NAME")


def load_dataset(name: str, data_dir: DataDir = None) -> Dataset:
    """Load a data set by its name; the first load of a large one decodes it into `cache_dir()`.

    Args:
        name: A key of `DATASETS`, or `synthetic(alpha, beta)`, `synthetic(iid)`, or `tfds:NAME` for
            any image classification data set of TFDS.
        data_dir: A folder of data, itself a TFDS folder or holding one as `tfds/`; default is the
            environment variable FEDJAX_SIM_DATA_DIR. Where neither is given, TFDS's own folder is
            used and a missing data set is downloaded; a folder that was given is never written to.

    Returns:
        The data set, with the statistics of its training inputs.

    Raises:
        ValueError: Unknown name.
        DataNotFoundError: The data set is not in the folder, or cannot be downloaded or read.

    >>> data = load_dataset("digits")
    >>> data.train_x.shape, data.train_x.dtype, data.test_y.shape, data.classes
    ((1438, 8, 8, 1), dtype('uint8'), (359,), 10)
    """
    return parse_dataset(name)[1](data_dir)


def parse_dataset(text: str) -> tuple[str, Callable[[DataDir], Dataset]]:
    """Turn a text such as "mnist" or "synthetic(0.5, 0.5)" into a loader.

    Args:
        text: What `load_dataset` takes.

    Returns:
        The key in `DATASETS`, or "synthetic" or "tfds"; and the function data_dir -> Dataset.

    Raises:
        ValueError: None of these; the message has them all.

    >>> key, load = parse_dataset("synthetic(0.5, 0.5)")
    >>> key, load(None).name
    ('synthetic', 'synthetic(0.5, 0.5)')
    """
    if text in DATASETS:
        return text, DATASETS[text]
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
    raise _unknown(text)


def _unknown(text: str) -> ValueError:
    return ValueError(f"name={text!r} is not a data set; known: {', '.join(FORMS)}")
