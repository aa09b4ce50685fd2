"""Augmentations: they alter the copies in a minibatch of images at random, in every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import dm_pix
import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Batch, ClientView, Transform, part
from fedjax_sim.engine import tree

Change = Callable[[Array, Array], Array]
"""``(key, images f32[B, H, W, C] in 0..1) -> f32[B, H, W, C]``, each image independently."""

Motion = Callable[[Array, Array], Array]
"""``(key, f32[B, 3, 3]) -> f32[B, 3, 3]``: one more motion for each image, independently.

The matrix takes a point (u, v, 1) of the moved image to where it came from. The origin is the
middle of the image, u points to the right, v down, and the longer side runs from -1 to 1.
"""


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
    if not 0 < white < math.inf:
        raise ValueError(f"white must be positive and finite, got {white}")

    def transform(key: Array, batch: Batch, client: ClientView) -> Batch:
        del client
        x, copy = batch.x, batch.copy
        if copy is None:
            return batch
        if x.dtype != jnp.uint8 or x.ndim != 4:
            raise ValueError(
                f"augmentations are for images, uint8 [B, H, W, C], got {x.dtype} {list(x.shape)}"
            )
        images = x.astype(jnp.float32) / white
        for i, change in enumerate(changes):
            images = change(jax.random.fold_in(key, i), images)
        new = jnp.round(jnp.clip(images, 0, 1) * white).astype(jnp.uint8)
        return batch._replace(x=jnp.where(tree.expand(copy, x), new, x))

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
        drawn = jax.random.bernoulli(jax.random.fold_in(key, 1), chance, images.shape[:1])
        return jnp.where(tree.expand(drawn, images), changed, images)

    return maybe


def flip(key: Array, matrices: Array) -> Array:
    """Mirrors each image, left to right: a motion."""
    del key
    return matrices * jnp.array([[[-1.0, 1.0, 1.0]]])


def rotation(degrees: float) -> Motion:
    """Rotates each image about its middle, by an angle uniform in -degrees to degrees.

    Args:
        degrees: the largest angle.

    Returns:
        A motion.

    Raises:
        ValueError: if it is negative or not finite.
    """
    if not 0 <= degrees < math.inf:
        raise ValueError(f"degrees must be at least 0 and finite, got {degrees}")

    def rotate(key: Array, matrices: Array) -> Array:
        most = jnp.deg2rad(jnp.float32(degrees))
        angle = jax.random.uniform(key, matrices.shape[:1], minval=-most, maxval=most)
        zero, one = jnp.zeros_like(angle), jnp.ones_like(angle)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return _then(matrices, [[cos, -sin, zero], [sin, cos, zero], [zero, zero, one]])

    return rotate


def perspective(tilt: float) -> Motion:
    """Tilts each image about both axes, :math:`(u, v) / (1 + g u + h v)`.

    Args:
        tilt: g and h are uniform in -tilt to tilt; must be below 0.5, or the denominator can be 0
          in a corner.

    Returns:
        A motion.

    Raises:
        ValueError: if it is not so.
    """
    if not 0 <= tilt < 0.5:
        raise ValueError(f"tilt must be in [0, 0.5), got {tilt}")

    def tilted(key: Array, matrices: Array) -> Array:
        g, h = jax.random.uniform(key, (2, len(matrices)), minval=-tilt, maxval=tilt)
        zero, one = jnp.zeros_like(g), jnp.ones_like(g)
        return _then(matrices, [[one, zero, zero], [zero, one, zero], [g, h, one]])

    return tilted


def _then(matrices: Array, rows: Sequence[Sequence[Array]]) -> Array:
    motion = jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)
    return jnp.matmul(matrices, motion, precision="highest")


def warped(*motions: Motion) -> Change:
    """Moves each image by all motions in order, with a single bilinear interpolation.

    What comes from outside the image is 0.

    Args:
        motions: in order.

    Returns:
        A change.
    """

    def warp(key: Array, images: Array) -> Array:
        size = len(images)
        matrices = jnp.broadcast_to(jnp.eye(3), (size, 3, 3))
        for i, motion in enumerate(motions):
            matrices = motion(jax.random.fold_in(key, i), matrices)
        return resampled(images, matrices)

    return warp


def resampled(images: Array, matrices: Array) -> Array:
    """Each image at the points that its matrix gives (see :data:`Motion`), interpolated bilinearly.

    Args:
        images: ``f32[B, H, W, C]``.
        matrices: ``f32[B, 3, 3]``.

    Returns:
        ``f32[B, H, W, C]``.
    """
    batch, height, width, channels = images.shape
    unit = max(height, width, 2) / 2 - 0.5
    v, u = jnp.meshgrid(
        (jnp.arange(height, dtype=jnp.float32) - (height - 1) / 2) / unit,
        (jnp.arange(width, dtype=jnp.float32) - (width - 1) / 2) / unit,
        indexing="ij",
    )
    points = jnp.stack([u, v, jnp.ones_like(u)]).reshape(3, -1)
    left, down, scale = jnp.moveaxis(jnp.matmul(matrices, points, precision="highest"), 1, 0)
    column = left / scale * unit + (width - 1) / 2
    row = down / scale * unit + (height - 1) / 2
    pixels = images.reshape(batch, height * width, channels)
    first_row, first_column = jnp.floor(row), jnp.floor(column)

    def tap(i: Array, j: Array, share: Array) -> Array:
        inside = (i >= 0) & (i < height) & (j >= 0) & (j < width)
        pixel = jnp.where(inside, i * width + j, 0).astype(jnp.int32)
        found = jnp.take_along_axis(pixels, pixel[:, :, None], axis=1)
        return jnp.where(inside, share, 0)[:, :, None] * found

    below, right = row - first_row, column - first_column
    taps = [
        tap(first_row + i, first_column + j, down_share * right_share)
        for i, down_share in enumerate((1 - below, below))
        for j, right_share in enumerate((1 - right, right))
    ]
    return sum(taps[1:], taps[0]).reshape(images.shape)


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
        return images + std * jax.random.normal(key, images.shape)

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

    def jitter(key: Array, image: Array) -> Array:
        keys = jax.random.split(key, 4)
        with jax.numpy_dtype_promotion("standard"):  # dm-pix adds bool to float
            image = dm_pix.random_brightness(keys[0], image, brightness)
            image = dm_pix.random_contrast(keys[1], image, 1 - contrast, 1 + contrast)
            image = jnp.clip(image, 0, 1)  # the next two take no other colours
            image = dm_pix.random_saturation(keys[2], image, 1 - saturation, 1 + saturation)
            return dm_pix.random_hue(keys[3], image, hue)

    return lambda key, images: jax.vmap(jitter)(jax.random.split(key, len(images)), images)


def greyscale(key: Array, images: Array) -> Array:
    """Puts the luma (ITU-R BT.601) into all three channels: a change."""
    del key
    return dm_pix.rgb_to_grayscale(images, keep_dims=True)
