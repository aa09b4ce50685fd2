"""Data sets of TFDS: found, or downloaded, without TensorFlow."""

import logging
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import getproxies

import numpy as np

from fedjax_sim.data.folder import (
    DataDir,
    DataNotFoundError,
    check_inside,
    given_folder,
    may_download,
)


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Keeps TFDS's advice ("OpenCV is not installed") and urllib3's retries off the screen."""
    loggers = [logging.getLogger(name) for name in ("absl", "urllib3")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _without_tensorflow(builder: Any) -> Iterator[None]:
    """Lets the builders of MNIST, CIFAR and the like write their files without TensorFlow.

    Only two things make ``download_and_prepare`` fail then (TFDS 4.9.10). The builders open what
    they downloaded with ``tf.io.gfile.GFile``, here Python's own ``open``. And TensorFlow encodes
    arrays as PNG, but Pillow images do not need it. PNG is lossless: the pixels are the same.
    """
    if find_spec("tensorflow") is not None:
        yield
        return
    from PIL import Image

    module: Any = sys.modules[type(builder).__module__]
    tensorflow, generate = getattr(module, "tf", None), builder._generate_examples

    def generate_pillow(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
        for key, example in generate(*args, **kwargs):
            pixels = example.get("image")
            if isinstance(pixels, np.ndarray):
                grey = pixels.shape[-1] == 1
                pillow = Image.fromarray(pixels[..., 0] if grey else pixels)
                example = example | {"image": pillow}
            yield key, example

    if tensorflow is not None:
        files = SimpleNamespace(GFile=open, isdir=os.path.isdir)
        module.tf = SimpleNamespace(io=SimpleNamespace(gfile=files))
    builder._generate_examples = generate_pillow
    try:
        yield
    finally:
        builder._generate_examples = generate
        if tensorflow is not None:
            module.tf = tensorflow


def download_dataset(name: str, data_dir: str | os.PathLike[str] | None = None) -> None:
    """Downloads a TFDS data set and writes it as array_record files, if it is not there already.

    It needs internet, but not TensorFlow.

    Args:
        name: a TFDS name, such as "mnist".
        data_dir: the TFDS folder; None is TFDS's default (``~/tensorflow_datasets``).

    Raises:
        Exception: as TFDS raises it (no network, a wrong checksum, a full disk).

    Example:
        ``python -c "from fedjax_sim.data import download_dataset as d; d('mnist', 'data')"``
    """
    import tensorflow_datasets as tfds  # type: ignore[import-untyped, unused-ignore]

    if not getproxies():  # fails at once; TFDS retries for 200 s without network
        socket.getaddrinfo("storage.googleapis.com", 443)
    with quiet_logs():
        with _no_folder_left():
            builder = tfds.builder(name, data_dir=data_dir)
        with _without_tensorflow(builder):
            builder.download_and_prepare(file_format="array_record")


def find_builder(name: str, data_dir: DataDir) -> Any:
    """TFDS's builder of a data set, whose files need not be there.

    Args:
        name: a TFDS name, such as "mnist" or "emnist/balanced".
        data_dir: a TFDS folder, or one that holds it as ``tfds/``; default is the environment
            variable FEDJAX_SIM_DATA_DIR, and without it TFDS's own folder.

    Returns:
        A ``tensorflow_datasets.core.DatasetBuilder``.

    Raises:
        ValueError: if TFDS knows no such data set.
        DataNotFoundError: if the files that describe it are damaged.
    """
    import tensorflow_datasets as tfds  # type: ignore[import-untyped, unused-ignore]

    folder = _tfds_folder(name, data_dir)
    check_inside((folder or Path(tfds.core.constants.DATA_DIR)) / name.partition("/")[0])
    try:
        with _no_folder_left(), _own_features(tfds.features.FeatureConnector):
            return tfds.builder(name, data_dir=folder)
    except _ForeignClassError as error:
        raise ValueError(f"tfds:{name} in {folder}: {error}") from error
    except Exception as error:
        # A name that TFDS does not know is a ValueError; a dataset_info.json that it cannot read is
        # one of protobuf's errors, a failed assertion, or a text that is no UTF-8.
        if isinstance(error, UnicodeDecodeError) or not isinstance(error, ValueError):
            folder = folder or Path(tfds.core.constants.DATA_DIR)
            raise _not_ready(name, folder, error, folder / name) from error
        raise ValueError(
            f"name must be a data set of TFDS, got 'tfds:{name}' ({_first_line(error)}); its names "
            "are listed at https://www.tensorflow.org/datasets/catalog"
        ) from error


def prepared_builder(name: str, data_dir: DataDir) -> Any:
    """TFDS's builder of a data set whose files are there, downloaded if no folder is given.

    Args:
        name: as for :func:`find_builder`.
        data_dir: as for :func:`find_builder`; a folder that is given is never written to.

    Raises:
        ValueError: if TFDS knows no such data set.
        DataNotFoundError: if it is not in the folder, or cannot be downloaded.
    """
    builder = find_builder(name, data_dir)
    # Asked first: as_data_source on a missing folder starts a download and hangs without network.
    if builder.is_prepared():
        return builder
    if given_folder(data_dir) is not None or not may_download():
        raise tfds_not_ready(builder, name, "no such data set there")
    try:
        download_dataset(name)
    except Exception as error:
        raise tfds_not_ready(builder, name, error) from error
    return find_builder(name, None)


def tfds_not_ready(builder: Any, name: str, reason: object) -> DataNotFoundError:
    """The error for a data set that cannot be read, with the command that downloads it."""
    path = builder.data_path
    folder = path.parents[builder.info.full_name.count("/")]
    return _not_ready(name, folder, reason, path if path.exists() else None)


def _not_ready(name: str, folder: Path, reason: object, damaged: Path | None) -> DataNotFoundError:
    """``damaged``: what must go first, as TFDS takes any folder that exists for the data set."""
    command = f"from fedjax_sim.data import download_dataset as d; d('{name}', '{folder}')"
    first = "" if damaged is None else f"delete {damaged} and "
    return DataNotFoundError(
        f"data set {name!r} is not ready in {folder} ({_first_line(reason)}); {first}with internet "
        f'run: python -c "{command}", or point FEDJAX_SIM_DATA_DIR at a TFDS folder that has it'
    )


def _first_line(reason: object) -> str:
    return next(iter(str(reason).strip().splitlines()), "") or type(reason).__name__


@contextmanager
def _no_folder_left() -> Iterator[None]:
    """Takes away the temporary folder that TFDS makes for every data set that is not there."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before


class _ForeignClassError(ValueError):
    """A features.json that names a class which is not of TFDS."""


@contextmanager
def _own_features(connector: Any) -> Iterator[None]:
    """Keeps TFDS from importing the modules of classes that a features.json names."""
    before = connector.__dict__["cls_from_name"]

    def of_tfds(cls: Any, name: str) -> Any:
        if not name.startswith("tensorflow_datasets.core.features."):
            raise _ForeignClassError(
                f"features.json must name classes of TFDS, got {name!r}: read the data in Python "
                "and hand them to from_arrays"
            )
        return before.__func__(cls, name)

    connector.cls_from_name = classmethod(of_tfds)
    try:
        yield
    finally:
        connector.cls_from_name = before


def _tfds_folder(name: str, data_dir: DataDir) -> Path | None:
    """The TFDS folder that argument or environment mean; None if neither is given."""
    root = given_folder(data_dir)
    if root is None:
        return None
    return root / "tfds" if not (root / name).is_dir() and (root / "tfds").is_dir() else root
