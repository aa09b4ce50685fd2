"""Data sets by name: images as uint8, labels as int32, official train and test splits."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.data.cache import cache_dir, cached_arrays
from fedjax_sim.data.download import download_dataset, quiet_logs

DataDir = str | os.PathLike[str] | None


class DataNotFoundError(FileNotFoundError):
    """A data set is not where it was looked for; the message says what to run."""


class Dataset(NamedTuple):
    """A labelled data set in host memory.

    Attributes:
        name: Its name in `DATASETS`.
        train_x: Training inputs; images uint8 [n, H, W, C] in their raw units.
        train_y: Training labels, int32 [n] in 0 … classes - 1.
        test_x: Test inputs, like train_x.
        test_y: Test labels, like train_y.
        classes: Number of classes M.
        mean: Per-channel mean of train_x, float32 [C], in the raw units of x.
        std: Per-channel standard deviation of train_x, float32 [C], raw units; 1 where it is 0.
    """

    name: str
    train_x: NDArray[Any]
    train_y: NDArray[np.int32]
    test_x: NDArray[Any]
    test_y: NDArray[np.int32]
    classes: int
    mean: NDArray[np.float32]
    std: NDArray[np.float32]


def load_dataset(name: str, data_dir: DataDir = None) -> Dataset:
    """Load a data set by its name; the first load decodes it into `cache_dir()`.

    Args:
        name: A key of `DATASETS`.
        data_dir: A TFDS folder, or one that holds it as `tfds/`; default is the environment
            variable FEDJAX_SIM_DATA_DIR. Where neither is given, TFDS's own folder is used and a
            missing data set is downloaded; a folder that was given is never written to.

    Returns:
        The data set, with the statistics of its training inputs.

    Raises:
        ValueError: Unknown name.
        DataNotFoundError: The data set is not in the folder, or cannot be downloaded or read.

    >>> digits = load_dataset("digits")
    >>> digits.train_x.shape, digits.train_x.dtype, digits.test_y.shape, digits.classes
    ((1438, 8, 8, 1), dtype('uint8'), (359,), 10)
    """
    if name not in DATASETS:
        raise ValueError(f"name={name!r} is not a data set; known: {', '.join(DATASETS)}")
    return DATASETS[name](data_dir)


def channel_statistics(
    x: NDArray[np.uint8],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Mean and standard deviation of every channel.

    Args:
        x: Images, uint8 [n, H, W, C].

    Returns:
        Mean and std, float32 [C] each, in the units of x; a std of 0 is given as 1.

    >>> channel_statistics(np.array([[[[0, 7]]], [[[4, 7]]]], np.uint8))
    (array([2., 7.], dtype=float32), array([2., 1.], dtype=float32))
    """
    values = np.arange(256, dtype=np.float64)
    # Counts of the 256 values are exact and need no floating-point copy of the images.
    counts = np.stack([np.bincount(x[..., c].ravel(), minlength=256) for c in range(x.shape[-1])])
    share = counts / counts.sum(axis=1, keepdims=True)
    mean = share @ values
    std = np.sqrt(np.sum(share * (values - mean[:, None]) ** 2, axis=1))
    return mean.astype(np.float32), np.where(std == 0, 1, std).astype(np.float32)


def _digits(data_dir: DataDir = None) -> Dataset:
    """scikit-learn's digits: 1,797 images 8 x 8 x 1 of values 0 … 16; needs no file.

    It has no official split: of each class a fixed random fifth (rounded; seed 0) is the test set,
    both parts in the original order.
    """
    del data_dir
    from sklearn.datasets import load_digits  # type: ignore[import-untyped, unused-ignore]

    raw = load_digits()
    x, y = raw.images.astype(np.uint8)[..., None], raw.target.astype(np.int32)
    rng = np.random.default_rng(0)
    test = np.zeros(len(y), bool)
    for label in range(10):
        members = rng.permutation(np.flatnonzero(y == label))
        test[members[: round(len(members) / 5)]] = True
    return Dataset(
        "digits", x[~test], y[~test], x[test], y[test], 10, *channel_statistics(x[~test])
    )


def _tfds_folder(name: str, data_dir: DataDir) -> Path | None:
    """The TFDS folder that argument or environment mean; None where neither is given."""
    given = data_dir or os.environ.get("FEDJAX_SIM_DATA_DIR")
    if not given:
        return None
    root = Path(given).expanduser()
    return root / "tfds" if not (root / name).is_dir() and (root / "tfds").is_dir() else root


def _not_found(name: str, folder: object, reason: object) -> DataNotFoundError:
    first_line = next(iter(str(reason).strip().splitlines()), "") or type(reason).__name__
    command = f"from fedjax_sim.data import download_dataset as d; d('{name}', '{folder}')"
    return DataNotFoundError(
        f"data set {name!r} is not ready in {folder} ({first_line}); with internet run:"
        f' python -c "{command}", or point FEDJAX_SIM_DATA_DIR at a TFDS folder that has it'
    )


def _prepared_builder(name: str, data_dir: DataDir) -> Any:
    """A TFDS builder whose files are there."""
    import tensorflow_datasets as tfds  # type: ignore[import-untyped, unused-ignore]

    folder = _tfds_folder(name, data_dir)
    builder = tfds.builder(name, data_dir=folder)
    # Asked first: as_data_source on a missing folder starts a download and hangs without network.
    if builder.is_prepared():
        return builder
    if folder is not None:
        raise _not_found(name, folder, "no such data set there")
    try:
        download_dataset(name)
    except Exception as error:
        raise _not_found(name, builder.data_path.parent.parent, error) from error
    return tfds.builder(name)


def _decode(builder: Any, split: str) -> dict[str, NDArray[Any]]:
    """Images uint8 [n, H, W, C] and labels int32 [n] of one split; 5 to 10 s per 50,000 images."""
    source = builder.as_data_source(split=split)
    examples = source.__getitems__(range(len(source)))  # iterating takes 2 to 3 times as long
    x = np.stack([example["image"] for example in examples])
    return {"x": x, "y": np.array([example["label"] for example in examples], np.int32)}


def _tfds_images(name: str, data_dir: DataDir = None) -> Dataset:
    """An image data set of TFDS, decoded once into the cache."""
    arrays = {}
    with quiet_logs():
        builder = _prepared_builder(name, data_dir)
        for split in ("train", "test"):
            info = builder.info.splits[split]
            stem = f"{name}-{builder.info.version}-{split}-{info.num_examples}"
            path = cache_dir() / "datasets" / f"{stem}-{int(info.num_bytes)}.npz"
            try:
                arrays[split] = cached_arrays(path, partial(_decode, builder, split))
            except Exception as error:  # a file missing or cut, or records of another format
                raise _not_found(name, builder.data_path, error) from error
    (x, y), (test_x, test_y) = [(arrays[s]["x"], arrays[s]["y"]) for s in ("train", "test")]
    classes = builder.info.features["label"].num_classes
    return Dataset(name, x, y, test_x, test_y, classes, *channel_statistics(x))


DATASETS: dict[str, Callable[[DataDir], Dataset]] = {
    "digits": _digits,
    "mnist": partial(_tfds_images, "mnist"),
    "fashion_mnist": partial(_tfds_images, "fashion_mnist"),
    "cifar10": partial(_tfds_images, "cifar10"),
}
