"""Inputs of a Hugging Face data set: a table, images, or lists."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.data._folder import Size, read_images
from fedjax_sim.data._hf_columns import (
    Split,
    check_values,
    gaps_of,
    is_label,
    is_plain,
    join_values,
)
from fedjax_sim.data.cells import one_hot
from fedjax_sim.data.options import EVERY_TEXT

Array = NDArray[Any]


def read_inputs(
    parts: Sequence[Split],
    columns: Sequence[str],
    categorical: Sequence[str],
    fill: bool,
    size: Size,
) -> tuple[Array, list[str], list[str]]:
    """Reads the inputs from the columns; if exactly one has images, the others are ignored.

    With ``fill``, missing cells of a table stay NaN. Returns the inputs; the names of a table's
    columns, none for images and lists; notes.
    """
    images = images_of(parts[0], columns)
    if len(images) == 1:
        x, notes = _images(parts, images[0], size)
        return x, [], notes
    if not columns:
        known = ", ".join(parts[0].rows.features)
        raise ValueError(f"must have an input column too, got only {known}")
    if len(columns) == 1 and not images:
        x = join_values(parts, columns[0])
        if x.ndim > 1 or not is_plain(x):
            check_values(parts, columns[0], x)
        if x.ndim > 1:
            grey = x.dtype == np.uint8 and x.ndim == 3
            return x[..., None] if grey else x, [], []
    return _table(parts, columns, categorical, fill)


def _table(
    parts: Sequence[Split], columns: Sequence[str], categorical: Sequence[str], fill: bool
) -> tuple[Array, list[str], list[str]]:
    plain: dict[str, Array] = {}
    encoded: dict[str, Array] = {}
    for column in columns:
        values = [part.values(column) for part in parts if not images_of(part, [column])]
        texts = {v.dtype == object and not _is_flags(v) for v in values}
        if len(texts) > 1:
            join_values(parts, column)  # raises, as one split has numbers and the other texts
        every = np.concatenate(values) if values else np.zeros((0, 0))
        if every.ndim > 1 or not is_plain(every):
            raise _not_numeric(parts, column)
        if not fill:
            check_values(parts, column, every)
        coded = column in categorical or any(is_label(part, column) for part in parts)
        if coded or (True in texts and EVERY_TEXT in categorical):
            absent = gaps_of(every)
            pairs = zip(absent, every, strict=True)
            encoded[column] = np.array(["" if gap else str(value) for gap, value in pairs])
        elif True in texts:
            raise _not_numeric(parts, column, f"use categorical={column} to encode it, or ")
        else:
            plain[column] = every.astype(np.float64)
    x = np.stack([*plain.values()], axis=1) if plain else np.zeros((len(every), 0))
    if not encoded:
        return x, [*plain], []
    block, names, notes = one_hot(encoded)
    return np.concatenate([x, block], axis=1), [*plain, *names], notes


def images_of(part: Split, columns: Sequence[str]) -> list[str]:
    """Returns the image columns."""
    return [c for c in columns if type(part.rows.features[c]).__name__ == "Image"]


def _not_numeric(parts: Sequence[Split], column: str, advice: str = "use ") -> ValueError:
    return ValueError(
        f"column {column!r} must be a number, as all columns without a role are inputs, got "
        f"{parts[0].rows.features[column]}: {advice}input=COLUMN to select one column of "
        "images or numbers"
    )


def _is_flags(values: Array) -> bool:
    """Returns whether all values are booleans or missing."""
    return all(v is None or isinstance(v, bool) for v in values)


def _images(parts: Sequence[Split], column: str, size: Size) -> tuple[NDArray[np.uint8], list[str]]:
    import datasets

    sources = [
        (f"{name}, column {column!r}", (rows, i, column))
        for part in parts
        for rows in [
            part.rows.with_format(None)
            .select_columns([column])
            .cast_column(column, datasets.Image(decode=False))
        ]
        for i, name in enumerate(part.names)
    ]
    return read_images(sources, _open_image, size)


def _open_image(source: tuple[Any, int, str]) -> Any:
    """Opens an image as ``datasets`` does, except for network addresses."""
    from PIL import ExifTags, Image, ImageOps

    rows, i, column = source
    stored = rows[i][column]
    inside = stored["bytes"]
    image = Image.open(stored["path"] if inside is None else io.BytesIO(inside))
    rotated = image.getexif().get(ExifTags.Base.Orientation) is not None
    return ImageOps.exif_transpose(image) if rotated else image
