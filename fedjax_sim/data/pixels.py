"""Reading of images by Pillow as ``uint8[n, H, W, C]``."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base.files import check_memory

Size = tuple[int, int] | None

MODES = {"1": "L", "L": "L", "RGB": "RGB", "P": "RGB", "CMYK": "RGB", "YCbCr": "RGB"}
TRANSPARENT = {"LA": "L", "PA": "RGB", "RGBA": "RGB"}


def read_images(
    images: Sequence[tuple[str, Any]],
    open_source: Callable[[Any], Any],
    size: Size = None,
) -> tuple[NDArray[np.uint8], list[str]]:
    """Reads images, given as names and sources, as one array, with notes on conversions.

    Grey images get three channels if others have three, transparent images are drawn on white, and
    all are resized to ``size``, width and height, if given.
    """
    arrays: list[NDArray[np.uint8]] = []
    resized = transparent = 0
    for name, source in images:
        with _name_errors(name):
            image = open_source(source)
        with image:
            mode, clear, given = image.mode, "transparency" in image.info, image.size
            shape = given if size is None else size
            if not arrays:
                first, common = name, shape
            elif shape != common:
                raise ValueError(
                    f"{name} must be {common[0]} x {common[1]} pixels, as {first} is, got "
                    f"{given[0]} x {given[1]}: use size={common[0]}x{common[1]} or another size to "
                    "resize all images"
                )
            layers = 1 if "L" in (MODES.get(mode), TRANSPARENT.get(mode)) else 3
            try:  # as the image declares it: one decoded, all twice
                check_memory(4 * math.prod(given) + 2 * len(images) * layers * math.prod(shape))
            except ValueError as error:
                raise ValueError(f"{len(images)} images such as {name}: {error}") from error
            with _name_errors(name):
                pixels = _pixels(image, mode, clear, size)
        if pixels is None:
            raise ValueError(f"{name} must have 8 bits a channel, got mode {mode}: convert it")
        transparent += clear or mode in TRANSPARENT
        resized += size not in (None, given)
        arrays.append(pixels)
    channels = max(pixels.shape[2] for pixels in arrays)
    out = np.empty((len(arrays), *arrays[0].shape[:2], channels), np.uint8)
    for i, pixels in enumerate(arrays):
        out[i] = pixels
    grey = sum(pixels.shape[2] < channels for pixels in arrays)
    return out, [
        f"{count} of {len(arrays)} images {'is' if count == 1 else 'are'} {what}."
        for count, what in (
            (resized, f"resized to {out.shape[2]} x {out.shape[1]} pixels"),
            (transparent, "transparent and drawn on white"),
            (grey, "grey and made RGB"),
        )
        if count
    ]


@contextmanager
def _name_errors(name: str) -> Iterator[None]:
    """Converts errors of Pillow's decoders, which have many types, to ValueErrors with the name."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name} must be an image that Pillow reads, got: {error}") from error


def _pixels(image: Any, mode: str, clear: bool, size: Size) -> NDArray[np.uint8] | None:
    """Returns ``uint8[H, W, 1 or 3]``; None if the mode does not have 8 bits a channel."""
    if clear or mode in TRANSPARENT:
        from PIL import Image

        grey = TRANSPARENT.get(mode, MODES.get(mode)) == "L"
        layers = image.convert("RGBA")
        white = Image.new("RGBA", layers.size, "white")
        image, wanted = Image.alpha_composite(white, layers), "L" if grey else "RGB"
    elif mode in MODES:
        wanted = MODES[mode]
    else:
        return None
    image = image.convert(wanted)
    if size is not None and image.size != size:
        image = image.resize(size)
    return np.atleast_3d(np.asarray(image))
