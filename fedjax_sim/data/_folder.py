"""A user's images in folders named by class."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedjax_sim.base.files import check_regular
from fedjax_sim.data.cells import integers_or_texts
from fedjax_sim.data.dataset import Dataset, from_arrays, random_share
from fedjax_sim.data.folder import existing
from fedjax_sim.data.options import FIFTH, check_parts
from fedjax_sim.data.pixels import Size, read_images

ENDINGS = (".png", ".jpg", ".jpeg")


def image_folder(
    name: str, folder: Path, *, test: float | str | None = None, size: Size = None
) -> Dataset:
    """Reads the images of ``train/CLASS`` and ``test/CLASS`` in a folder, or of ``CLASS``.

    Args:
        name: of the data set.
        folder: has these; .png, .jpg and .jpeg in them are read. The classes are the folders of
            ``train``, or of ``folder`` if it has no ``train``, in the order of their names, or of
            their numbers.
        test: the folder of the test images beside ``train``, or the share of each class that is the
            test set; None for ``test``, and without that folder for a fifth.
        size: width and height to which all images are resized; None if they have one size.

    Returns:
        Inputs ``uint8[n, H, W, 1]``, or ``uint8[n, H, W, 3]`` if an image has colours; samples are
        in the order of class and file name. Nothing is cached.

    Raises:
        DataNotFoundError: if a folder is missing.
        ValueError: if a class has no image, or an image cannot be read or is of another size; names
            the folder or file.
    """
    existing(name, folder, folder=True)
    apart = isinstance(test, str) or (folder / "test").is_dir() or (folder / "train").is_dir()
    train = existing(name, folder / "train", folder=True) if apart else folder
    held = test if isinstance(test, str) else "test"
    places = [train]
    if isinstance(test, str) or (test is None and apart and (folder / held).is_dir()):
        places.append(existing(name, folder / held, folder=True))
    found = [_classes(place) for place in places]
    names = found[0]
    if len(names) < 2:
        raise ValueError(
            f"{train} must have a folder for each class, got {', '.join(names) or 'none'}"
        )
    unknown = [c for c in found[-1] if c not in names]
    if unknown:
        raise ValueError(
            f"{places[-1]} must have folders of train's classes, {', '.join(names)}, got "
            f"{unknown[0]!r}"
        )
    files = [_files(place, of) for place, of in zip(places, found, strict=True)]
    from PIL import Image

    images = [(str(file), file) for each in files for file, _ in each]
    for _, file in images:
        check_regular(file)
    x, notes = read_images(images, Image.open, size)
    y = np.array([names.index(c) for each in files for _, c in each], np.int32)
    if len(places) == 2:
        of_test, words = np.arange(len(x)) >= len(files[0]), f"the folder {held!r}"
    else:
        share = FIFTH if test is None else float(test)
        of_test, words = random_share(y, share), f"a fixed random {100 * share:g} % of each class"
        check_parts(of_test, share, f"; {train} has {len(names)} classes")
    return from_arrays(name, x, y, test=of_test, class_names=names, test_set=words, notes=notes)


def _classes(folder: Path) -> list[str]:
    found = [p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith(".")]
    return [str(c) for c in np.unique(integers_or_texts(np.array(found, np.str_)))]


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
