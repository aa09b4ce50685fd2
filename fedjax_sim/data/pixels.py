"""Images of a user's: what Pillow opens as ``uint8[n, H, W, C]``."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

MODES = {"1": "L", "L": "L", "P": "RGB", "RGB": "RGB"}


def read_pixels(
    name: str, opened: Callable[[Any], AbstractContextManager[Any]], source: Any
) -> NDArray[np.uint8]:
    """The pixels of one image, ``uint8[H, W, 1 or 3]``.

    Args:
        name: of the image, for the message.
        opened: makes a Pillow image of the source.
        source: a file, say.

    Raises:
        ValueError: if it cannot be read, or is neither grey nor RGB.

    >>> from PIL import Image
    >>> read_pixels("a dot", lambda size: Image.new("L", size, 7), (1, 1)).tolist()
    [[[7]]]
    """
    try:
        with opened(source) as image:
            mode = MODES.get(image.mode)
            pixels = None if mode is None else np.asarray(image.convert(mode))
            given = image.mode
    except Exception as error:  # Pillow's decoders raise of many kinds on a damaged file
        raise ValueError(f"{name} must be an image that Pillow reads, got: {error}") from error
    if pixels is None:
        raise ValueError(f"{name} must be grey or RGB of 8 bits a channel, got mode {given}")
    return np.atleast_3d(pixels)


def alike(images: Iterable[tuple[str, NDArray[np.uint8]]]) -> NDArray[np.uint8]:
    """Images by name as one array; grey ones get three channels if others have them.

    Raises:
        ValueError: if they are not of one size; names two of them.

    >>> grey, red = np.zeros((1, 1, 1), np.uint8), np.array([[[9, 0, 0]]], np.uint8)
    >>> alike([("grey", grey), ("red", red)]).tolist()
    [[[[0, 0, 0]]], [[[9, 0, 0]]]]
    """
    found: list[NDArray[np.uint8]] = []
    for name, image in images:
        if not found:
            first = name
        elif image.shape[:2] != found[0].shape[:2]:
            (h, w), (first_h, first_w) = image.shape[:2], found[0].shape[:2]
            raise ValueError(
                f"{name} must be {first_w} x {first_h} pixels, as {first} is, got {w} x {h}: "
                "resize the images to one size"
            )
        found.append(image)
    channels = max(image.shape[2] for image in found)
    out = np.empty((len(found), *found[0].shape[:2], channels), np.uint8)
    for i, image in enumerate(found):
        out[i] = image
    return out
