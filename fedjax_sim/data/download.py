"""TFDS data sets, read and downloaded without TensorFlow."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.request import getproxies

import numpy as np

from fedjax_sim.data.folder import (
    DataDir,
    DataNotFoundError,
    given_folder,
    may_download,
    not_ready,
    quiet_logs,
)


@contextmanager
def _without_tensorflow(builder: Any) -> Iterator[None]:
    """Lets the builders of MNIST, CIFAR and similar data sets write files without TensorFlow.

    In TFDS 4.9.10 ``download_and_prepare`` needs TensorFlow for two things only: builders open
    downloads with ``tf.io.gfile.GFile``, replaced here by ``open``; and arrays are encoded as PNG
    by TensorFlow, which Pillow images avoid. PNG is lossless, so the pixels are the same.
    """
    if find_spec("tensorflow") is not None:
        yield
        return
    from PIL import Image

    module: Any = sys.modules[type(builder).__module__]
    generate = builder._generate_examples

    def generate_pillow(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
        for key, example in generate(*args, **kwargs):
            pixels = example.get("image")
            if isinstance(pixels, np.ndarray):
                grey = pixels.shape[-1] == 1
                pillow = Image.fromarray(pixels[..., 0] if grey else pixels)
                example = example | {"image": pillow}
            yield key, example

    files = SimpleNamespace(GFile=open, isdir=os.path.isdir)
    tensorflow = SimpleNamespace(io=SimpleNamespace(gfile=files))
    with ExitStack() as stack:
        if getattr(module, "tf", None) is not None:
            stack.enter_context(mock.patch.object(module, "tf", tensorflow))
        stack.enter_context(mock.patch.object(builder, "_generate_examples", generate_pillow))
        yield


def download_dataset(name: str, data_dir: str | os.PathLike[str] | None = None) -> None:
    """Downloads a TFDS data set as array_record files, unless it is already there.

    Needs internet, but not TensorFlow.

    Args:
        name: a TFDS name, such as "mnist".
        data_dir: the TFDS folder; None for TFDS's default (``~/tensorflow_datasets``).

    Raises:
        Exception: any error of TFDS (no network, a wrong checksum, a full disk).

    Example:
        ``python -c "from fedjax_sim.data import download_dataset as d; d('mnist', 'data')"``
    """
    import tensorflow_datasets as tfds  # type: ignore[import-untyped, unused-ignore]

    if not getproxies():  # fails at once; TFDS retries for 200 s without network
        socket.getaddrinfo("storage.googleapis.com", 443)
    with quiet_logs():
        builder = tfds.builder(name, data_dir=data_dir)
        with _without_tensorflow(builder):
            builder.download_and_prepare(file_format="array_record")


def find_builder(name: str, data_dir: DataDir) -> Any:
    """Returns TFDS's ``DatasetBuilder`` of a name such as "mnist"; its files may be missing."""
    import tensorflow_datasets as tfds  # type: ignore[import-untyped, unused-ignore]

    folder = _tfds_folder(name, data_dir)
    try:
        with _only_tfds_features(tfds.features.FeatureConnector):
            return tfds.builder(name, data_dir=folder)
    except _ForeignClassError as error:
        raise ValueError(f"tfds:{name} in {folder}: {error}") from error
    except Exception as error:
        # An unknown name raises ValueError; an unreadable dataset_info.json raises an error of
        # protobuf, an AssertionError or a UnicodeDecodeError.
        if isinstance(error, UnicodeDecodeError) or not isinstance(error, ValueError):
            folder = folder or Path(tfds.core.constants.DATA_DIR)
            raise _not_downloaded(name, folder, error, folder / name) from error
        raise ValueError(
            f"name must be a data set of TFDS, got 'tfds:{name}' ({_first_line(error)}); its names "
            "are listed at https://www.tensorflow.org/datasets/catalog"
        ) from error


def prepared_builder(name: str, data_dir: DataDir) -> Any:
    """Returns :func:`find_builder` with its files, which are downloaded if no folder is given."""
    builder = find_builder(name, data_dir)
    # Checked first, as as_data_source starts a download for a missing folder and may hang.
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
    """Returns the error for a data set that cannot be read, with the command to download it."""
    path = builder.data_path
    folder = path.parents[builder.info.full_name.count("/")]
    return _not_downloaded(name, folder, reason, path if path.exists() else None)


def _not_downloaded(
    name: str, folder: Path, reason: object, damaged: Path | None
) -> DataNotFoundError:
    """Returns the error; ``damaged`` must be deleted first, as TFDS trusts any existing folder."""
    command = f"from fedjax_sim.data import download_dataset as d; d('{name}', '{folder}')"
    advice = "" if damaged is None else f"delete {damaged} and "
    advice += f'with internet run: python -c "{command}", or point FEDJAX_SIM_DATA_DIR at a TFDS '
    return not_ready(name, folder, _first_line(reason), f"{advice}folder that has it")


def _first_line(reason: object) -> str:
    return next(iter(str(reason).strip().splitlines()), "") or type(reason).__name__


class _ForeignClassError(ValueError):
    """A features.json that names a class outside TFDS."""


def _only_tfds_features(connector: Any) -> AbstractContextManager[Any]:
    """Prevents TFDS from importing modules that a features.json names."""
    before = connector.__dict__["cls_from_name"]

    def class_of_tfds(cls: Any, name: str) -> Any:
        if not name.startswith("tensorflow_datasets.core.features."):
            raise _ForeignClassError(
                f"features.json must name classes of TFDS, got {name!r}: read the data in Python "
                "and pass them to from_arrays"
            )
        return before.__func__(cls, name)

    return mock.patch.object(connector, "cls_from_name", classmethod(class_of_tfds))


def _tfds_folder(name: str, data_dir: DataDir) -> Path | None:
    """Returns the TFDS folder of the argument or environment; None if neither is given."""
    root = given_folder(data_dir)
    if root is None:
        return None
    return root / "tfds" if not (root / name).is_dir() and (root / "tfds").is_dir() else root
