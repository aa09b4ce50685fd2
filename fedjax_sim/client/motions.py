"""Motions of images, which are composed before a single interpolation moves the pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array

Change = Callable[[Array, Array], Array]
"""``(key, images f32[B, H, W, C] in 0..1) -> f32[B, H, W, C]``, each image independently."""

Motion = Callable[[Array, Array], Array]
"""``(key, f32[B, 3, 3]) -> f32[B, 3, 3]``: one more motion for each image, independently.

The matrix takes a point (u, v, 1) of the moved image to where it came from. The origin is the
middle of the image, u points to the right, v down, and the longer side runs from -1 to 1.
"""


def flip(key: Array, matrices: Array) -> Array:
    """Mirrors each image, left to right: a motion."""
    del key
    return matrices * jnp.array([[[-1, 1, 1]]], matrices.dtype)


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
        angle = jax.random.uniform(key, matrices.shape[:1], jnp.float32, -most, most)
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
        g, h = jax.random.uniform(key, (2, len(matrices)), jnp.float32, -tilt, tilt)
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
        matrices = jnp.broadcast_to(jnp.eye(3, dtype=jnp.float32), (size, 3, 3))
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
