"""Images in folders named by class, and their reading by Pillow as ``uint8[n, H, W, C]``."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base.files import check_memory, check_regular
from fedjax_sim.data.dataset import Dataset, from_arrays
from fedjax_sim.data.folder import existing
from fedjax_sim.data.options import FIFTH, choose_test
from fedjax_sim.data.targets import integers_or_texts

ENDINGS = (".png", ".jpg", ".jpeg")
Size = tuple[int, int] | None

GREY = ("1", "L", "LA")
COLOUR = ("RGB", "P", "CMYK", "YCbCr", "RGBA", "PA")


def image_folder(
    name: str, folder: Path, *, test: float | str | None = None, size: Size = None
) -> Dataset:
    """Loads images from ``train/CLASS`` and ``test/CLASS`` in a folder, or from ``CLASS``.

    ``test`` is another folder of test images, or the share of each class; None for ``test``, or a
    fifth if there is no such folder. Classes are in the order of their names, or of their numbers;
    inputs are ``uint8[n, H, W, 1 or 3]``, sorted by class and file name.
    """
    existing(name, folder, folder=True)
    split = isinstance(test, str) or (folder / "test").is_dir() or (folder / "train").is_dir()
    train = existing(name, folder / "train", folder=True) if split else folder
    test_folder = test if isinstance(test, str) else "test"
    places = [train]
    if isinstance(test, str) or (test is None and split and (folder / test_folder).is_dir()):
        places.append(existing(name, folder / test_folder, folder=True))
    classes = [_class_names(place) for place in places]
    names = classes[0]
    if len(names) < 2:
        raise ValueError(
            f"{train} must have a folder for each class, got {', '.join(names) or 'none'}"
        )
    unknown = [c for c in classes[-1] if c not in names]
    if unknown or not classes[-1]:
        raise ValueError(
            f"{places[-1]} must have folders of train's classes, {', '.join(names)}, got "
            f"{', '.join(unknown) or 'none'}"
        )
    files = [
        [(file, c) for c in classes_of for file in _image_files(place / c)]
        for place, classes_of in zip(places, classes, strict=True)
    ]
    from PIL import Image

    images = [(str(file), file) for part in files for file, _ in part]
    for _, file in images:
        check_regular(file)
    x, notes = read_images(images, Image.open, size)
    y = np.array([names.index(c) for part in files for _, c in part], np.int32)
    if len(places) == 2:
        in_test, words = np.arange(len(x)) >= len(files[0]), f"the folder {test_folder!r}"
    else:
        hint = f"; {train} has {len(names)} classes"
        in_test, words = choose_test(FIFTH if test is None else test, y, None, (), hint)
    return from_arrays(name, x, y, test=in_test, class_names=names, test_set=words, notes=notes)


def _class_names(folder: Path) -> list[str]:
    names = [p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")]
    return [str(c) for c in np.unique(integers_or_texts(np.array(names, np.str_)))]


def _image_files(folder: Path) -> list[Path]:
    files = sorted(
        file
        for file in folder.iterdir()
        if file.suffix.lower() in ENDINGS and not file.name.startswith(".")
    )
    if not files:
        raise ValueError(f"{folder} must have an image ({', '.join(ENDINGS)}), got none")
    return files


def read_images(
    images: Sequence[tuple[str, Any]],
    open_source: Callable[[Any], Any],
    size: Size = None,
) -> tuple[NDArray[np.uint8], list[str]]:
    """Reads images, given as names and sources, as one array, with a note on lost transparency.

    Grey images get three channels if others have three, transparency is dropped, and all are
    resized to ``size``, width and height, if given.
    """
    arrays: list[NDArray[np.uint8]] = []
    transparent = 0
    for name, source in images:
        with _name_errors(name):
            image = open_source(source)
        with image:
            mode, given = image.mode, image.size
            if mode not in (*GREY, *COLOUR):
                raise ValueError(f"{name} must have 8 bits a channel, got mode {mode}: convert it")
            shape = given if size is None else size
            if not arrays:
                first, common = name, shape
            elif shape != common:
                raise ValueError(
                    f"{name} must be {common[0]} x {common[1]} pixels, as {first} is, got "
                    f"{given[0]} x {given[1]}: use size={common[0]}x{common[1]} or another size to "
                    "resize all images"
                )
            transparent += "A" in mode or "transparency" in image.info
            layers = 1 if mode in GREY else 3
            try:  # as the image declares it: one decoded, all twice
                check_memory(4 * math.prod(given) + 2 * len(images) * layers * math.prod(shape))
            except ValueError as error:
                raise ValueError(f"{len(images)} images such as {name}: {error}") from error
            with _name_errors(name):
                image = image.convert("L" if mode in GREY else "RGB")
                image = image if size is None else image.resize(size)
                arrays.append(np.atleast_3d(np.asarray(image)))
    channels = max(pixels.shape[2] for pixels in arrays)
    out = np.empty((len(arrays), *arrays[0].shape[:2], channels), np.uint8)
    for i, pixels in enumerate(arrays):
        out[i] = pixels
    lost = f"{transparent} of {len(arrays)} images lose their transparency."
    return out, [lost] if transparent else []


@contextmanager
def _name_errors(name: str) -> Iterator[None]:
    """Converts errors of Pillow's decoders, which have many types, to ValueErrors with the name."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name} must be an image that Pillow reads, got: {error}") from error
