"""A user's images in folders named by class."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_sim.data.dataset import Dataset
from fedjax_sim.data.folder import existing
from fedjax_sim.data.parts import Part, from_parts
from fedjax_sim.data.pixels import alike, read_pixels

ENDINGS = (".png", ".jpg", ".jpeg")


def image_folder(name: str, folder: Path) -> Dataset:
    """The images of ``train/CLASS`` and ``test/CLASS`` in a folder.

    Args:
        name: of the data set.
        folder: has these; .png, .jpg and .jpeg in them are read, of one size, grey or RGB. The
            classes are the folders of ``train``, in the order of their names.

    Returns:
        Inputs ``uint8[n, H, W, 1]``, or ``uint8[n, H, W, 3]`` if an image has colours; samples are
        in the order of class and file name. Nothing is cached.

    Raises:
        DataNotFoundError: if a folder is missing.
        ValueError: if a class has no image, or an image cannot be read or is of another size; names
            the folder or file.
    """
    places = [existing(name, folder / which, folder=True) for which in ("train", "test")]
    names = [_classes(place) for place in places]
    if len(names[0]) < 2:
        raise ValueError(f"{places[0]} must have a folder for each class, got {names[0] or 'none'}")
    unknown = sorted({*names[1]} - {*names[0]})
    if unknown:
        raise ValueError(f"{places[1]} must have folders of train's classes, got {unknown[0]!r}")
    files = [_files(place, found) for place, found in zip(places, names, strict=True)]
    from PIL import Image

    images = alike((str(f), read_pixels(str(f), Image.open, f)) for each in files for f, _ in each)
    n = len(files[0])
    labels = [np.array([names[0].index(c) for _, c in listed], np.int32) for listed in files]
    train, test = Part(images[:n], labels[0]), Part(images[n:], labels[1])
    return from_parts(name, train, test, class_names=names[0])


def _classes(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _files(folder: Path, classes: Sequence[str]) -> list[tuple[Path, str]]:
    """All images with their classes."""
    found = []
    for name in classes:
        files = sorted(
            file
            for file in (folder / name).iterdir()
            if file.suffix.lower() in ENDINGS and not file.name.startswith(".")
        )
        if not files:
            raise ValueError(f"{folder / name} must have an image ({', '.join(ENDINGS)}), got none")
        found += [(file, name) for file in files]
    if not found:
        raise ValueError(f"{folder} must have a folder of images for a class, got none")
    return found
