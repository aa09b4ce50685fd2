"""Download a data set with TFDS, without TensorFlow."""

import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from urllib.request import getproxies


@contextmanager
def quiet_logs() -> Iterator[None]:
    """Keep TFDS's advice ("OpenCV is not installed") and urllib3's retries off the screen."""
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
    """Let the builders of MNIST and CIFAR write their files where TensorFlow is missing.

    Two things only make `download_and_prepare` fail there (TFDS 4.9.10): the builders open what
    they downloaded by `tf.io.gfile.GFile`, here Python's own `open`; and arrays are encoded as PNG
    by TensorFlow, where Pillow images are not. PNG is lossless: the pixels are the same.
    """
    module: Any = sys.modules[type(builder).__module__]
    if find_spec("tensorflow") is not None or not hasattr(module, "tf"):
        yield
        return
    from PIL import Image

    tensorflow, generate = module.tf, builder._generate_examples

    def generate_pillow(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
        for key, example in generate(*args, **kwargs):
            pixels = example["image"]
            grey = pixels.shape[-1] == 1
            yield key, example | {"image": Image.fromarray(pixels[..., 0] if grey else pixels)}

    module.tf = SimpleNamespace(io=SimpleNamespace(gfile=SimpleNamespace(GFile=open)))
    builder._generate_examples = generate_pillow
    try:
        yield
    finally:
        module.tf, builder._generate_examples = tensorflow, generate


def download_dataset(name: str, data_dir: str | os.PathLike[str] | None = None) -> None:
    """Download a TFDS data set and write it as array_record files, if not there already.

    Needs internet, but not TensorFlow.

    Args:
        name: A TFDS name, such as "mnist".
        data_dir: The TFDS folder; None is TFDS's default (`~/tensorflow_datasets`).

    Raises:
        Exception: Whatever TFDS raises (no network, a wrong checksum, a full disk).

    Example:
        `python -c "from fedjax_sim.data import download_dataset as d; d('mnist', 'data')"`
    """
    import tensorflow_datasets as tfds  # type: ignore[import-untyped, unused-ignore]

    if not getproxies():  # fails at once where TFDS retries for 200 s without network
        socket.getaddrinfo("storage.googleapis.com", 443)
    with quiet_logs():
        builder = tfds.builder(name, data_dir=data_dir)
        with _without_tensorflow(builder):
            builder.download_and_prepare(file_format="array_record")
