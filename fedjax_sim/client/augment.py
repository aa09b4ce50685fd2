"""Augmentations: they alter the copies in a minibatch of images at random, in every step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Batch, ClientView, Transform, part
from fedjax_sim.client.motions import (
    Change,
    Motion,
    flip,
    perspective,
    resampled,
    rotation,
    warped,
)
from fedjax_sim.engine import tree

__all__ = [
    "Change",
    "Motion",
    "altered",
    "altered_copies",
    "colour_jitter",
    "crop",
    "fedaug_augmentations",
    "flip",
    "greyscale",
    "noise",
    "perspective",
    "resampled",
    "rotation",
    "sometimes",
    "warped",
]


@part
def altered_copies(changes: Sequence[Change], white: float = 255.0) -> Transform:
    """Alters the rows of a minibatch that are copies (see ``Batch.copy``), and no others.

    Args:
        changes: applied in order.
        white: the largest value of a pixel.

    Returns:
        A transform of ``uint8[B, H, W, C]``; it keeps the dtype. A minibatch without copies stays
        as it is.

    Raises:
        ValueError: if white is not positive; in the first step, if the inputs are of another kind.

    Example:
        >>> x = jnp.array([[[[1], [9]]], [[[1], [9]]]], jnp.uint8)
        >>> batch = Batch(x, jnp.zeros(2, jnp.int32), jnp.ones(2, bool), jnp.array([False, True]))
        >>> flipped = altered_copies([warped(flip)])(jax.random.key(0), batch, None)
        >>> flipped.x[..., 0].tolist()
        [[[1, 9]], [[9, 1]]]
    """
    every = altered(changes, white)

    def transform(key: Array, batch: Batch, client: ClientView) -> Batch:
        if batch.copy is None:
            return batch
        new = every(key, batch, client)
        return batch._replace(x=jnp.where(tree.expand(batch.copy, batch.x), new.x, batch.x))

    return transform


@part
def altered(changes: Sequence[Change], white: float = 255.0) -> Transform:
    """Alters all rows of a minibatch.

    Args:
        changes: applied in order.
        white: the largest value of a pixel.

    Returns:
        A transform of ``uint8[B, H, W, C]``; it keeps the dtype.

    Raises:
        ValueError: if white is not positive; in the first step, if the inputs are of another kind.

    Example:
        Random crops and mirror images, as is usual for CIFAR-10.

        >>> x = jnp.zeros((2, 32, 32, 3), jnp.uint8)
        >>> batch = Batch(x, jnp.zeros(2, jnp.int32), jnp.ones(2, bool), None)
        >>> transform = altered([warped(sometimes(0.5, flip)), crop(4)])
        >>> transform(jax.random.key(0), batch, None).x.shape
        (2, 32, 32, 3)
    """
    if not 0 < white < math.inf:
        raise ValueError(f"white must be positive and finite, got {white}")

    def transform(key: Array, batch: Batch, client: ClientView) -> Batch:
        del client
        x = batch.x
        if x.dtype != jnp.uint8 or x.ndim != 4:
            raise ValueError(
                f"augmentations are for images, uint8 [B, H, W, C], got {x.dtype} {list(x.shape)}"
            )
        images = x.astype(jnp.float32) / white
        for i, change in enumerate(changes):
            images = change(jax.random.fold_in(key, i), images)
        return batch._replace(x=jnp.round(jnp.clip(images, 0, 1) * white).astype(jnp.uint8))

    return transform


@part
def fedaug_augmentations(
    shape: Sequence[int], white: float = 255.0, *, mirror: bool = True
) -> Transform:
    """The augmentations of FedAug.

    Grey images: horizontal flip, rotation by -20 to 20 degrees, perspective, noise. Colour images
    also: colour jitter and grey-scale. The thesis leaves open how likely and how strong they are:
    here each is applied with probability 1/2 (grey-scale 1/10), and the strengths are those in the
    code.

    Args:
        shape: (H, W, C) of an image, C 1 or 3.
        white: the largest value of a pixel.
        mirror: whether to flip, as in the thesis, though few digits and letters have a mirror image
          of the same class.

    Returns:
        A transform, see :func:`altered_copies`.

    Raises:
        ValueError: if shape is not that of such an image.

    Source: Cornelis 2022 <cornelis2022federated>, section 5.3.
    """
    if len(shape) != 3 or shape[-1] not in (1, 3):
        raise ValueError(f"augmentations are for images [H, W, 1] or [H, W, 3], got {list(shape)}")
    motions = [*([flip] if mirror else []), rotation(20.0), perspective(0.2)]
    moved = warped(*(sometimes(0.5, motion) for motion in motions))
    colours = [sometimes(0.5, colour_jitter()), sometimes(0.1, greyscale)]
    changes = [moved, *(colours if shape[-1] == 3 else []), sometimes(0.5, noise(0.05))]
    return altered_copies(changes, white)


def sometimes(chance: float, change: Change) -> Change:
    """Applies a change, or a motion, to each image with a probability.

    Args:
        chance: the probability.
        change: what is applied.

    Returns:
        A change, or a motion.

    Raises:
        ValueError: if it is no probability.
    """
    if not 0 <= chance <= 1:
        raise ValueError(f"chance must be in [0, 1], got {chance}")

    def maybe(key: Array, images: Array) -> Array:
        changed = change(jax.random.fold_in(key, 0), images)
        drawn = jax.random.uniform(jax.random.fold_in(key, 1), images.shape[:1], jnp.float32)
        return jnp.where(tree.expand(drawn < chance, images), changed, images)

    return maybe


def crop(padding: int) -> Change:
    """Cuts each image out of itself with a black edge, at a random place; its size stays.

    Args:
        padding: width of the edge in pixels.

    Returns:
        A change.

    Raises:
        ValueError: if it is negative.
    """
    if padding < 0:
        raise ValueError(f"padding must be at least 0 pixels, got {padding}")

    def cropped(key: Array, images: Array) -> Array:
        edge = (padding, padding)
        wide = jnp.pad(images, ((0, 0), edge, edge, (0, 0)))
        places = jax.random.randint(key, (len(images), 2), 0, 2 * padding + 1, jnp.int32)

        def cut(image: Array, place: Array) -> Array:
            return jax.lax.dynamic_slice(image, (*place, jnp.int32(0)), images.shape[1:])

        return jax.vmap(cut)(wide, places)

    return cropped


def noise(std: float) -> Change:
    """Adds Gaussian noise.

    Args:
        std: its standard deviation, where white is 1.

    Returns:
        A change.

    Raises:
        ValueError: if it is negative or not finite.
    """
    if not 0 <= std < math.inf:
        raise ValueError(f"std must be at least 0 and finite, got {std}")

    def noisy(key: Array, images: Array) -> Array:
        return images + std * jax.random.normal(key, images.shape, images.dtype)

    return noisy


def colour_jitter(
    brightness: float = 0.2, contrast: float = 0.2, saturation: float = 0.2, hue: float = 0.05
) -> Change:
    """Changes brightness, contrast, saturation and hue at random, by functions of dm-pix.

    Args:
        brightness: the most that is added or subtracted.
        contrast: the most by which its factor differs from 1.
        saturation: the most by which its factor differs from 1.
        hue: the most by which the hue turns, as a share of the colour circle.

    Returns:
        A change.

    Raises:
        ValueError: if one is not in [0, 1], or hue not in [0, 0.5].

    Source: DeepMind 2020 <https://github.com/google-deepmind>, dm-pix.
    """
    for name, value, most in (
        ("brightness", brightness, 1),
        ("contrast", contrast, 1),
        ("saturation", saturation, 1),
        ("hue", hue, 0.5),
    ):
        if not 0 <= value <= most:
            raise ValueError(f"{name} must be in [0, {most}], got {value}")
    import dm_pix

    def jitter(key: Array, image: Array) -> Array:
        keys = jax.random.split(key, 4)

        def drawn(i: int, least: float, most: float) -> Array:  # as dm-pix does, but for its dtype
            return jax.random.uniform(keys[i], (), jnp.float32, least, most)

        with jax.numpy_dtype_promotion("standard"):  # dm-pix adds bool to float
            image = dm_pix.adjust_brightness(image, drawn(0, -brightness, brightness))
            image = dm_pix.adjust_contrast(image, drawn(1, 1 - contrast, 1 + contrast))
            image = jnp.clip(image, 0, 1)  # the next two take no other colours
            image = dm_pix.adjust_saturation(image, drawn(2, 1 - saturation, 1 + saturation))
            return dm_pix.adjust_hue(image, drawn(3, -hue, hue))

    return lambda key, images: jax.vmap(jitter)(jax.random.split(key, len(images)), images)


def greyscale(key: Array, images: Array) -> Array:
    """Puts the luma (ITU-R BT.601) into all three channels: a change."""
    import dm_pix

    del key
    return dm_pix.rgb_to_grayscale(images, keep_dims=True)
