"""Motions of images, which are composed before a single interpolation of the pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Finite, Minority, Part

Change = Callable[[Array, Array], Array]
"""``(key, images f32[B, H, W, C] in 0..1) -> f32[B, H, W, C]``, each image independently."""

Motion = Callable[[Array, Array], Array]
"""``(key, f32[B, 3, 3]) -> f32[B, 3, 3]``: adds a motion to each image, independently.

The matrix maps a point (u, v, 1) of the moved image to its place in the original. The origin is
the middle of the image, u points to the right, v down, and the longer side runs from -1 to 1.
"""


def flip(key: Array, matrices: Array) -> Array:
    """Mirrors each image, left to right: a motion."""
    return matrices * jnp.array([[[-1, 1, 1]]], matrices.dtype)


class rotation(Part):
    """A rotation of each image about its middle, by an angle uniform in -degrees to degrees.

    Args:
        degrees: the largest angle.
    """

    degrees: Finite

    def __call__(self, key: Array, matrices: Array) -> Array:
        most = jnp.deg2rad(jnp.float32(self.degrees))
        angle = jax.random.uniform(key, matrices.shape[:1], jnp.float32, -most, most)
        zero, one = jnp.zeros_like(angle), jnp.ones_like(angle)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return _then(matrices, [[cos, -sin, zero], [sin, cos, zero], [zero, zero, one]])


class perspective(Part):
    """A tilt of each image about both axes, :math:`(u, v) / (1 + g u + h v)`.

    Args:
        tilt: g and h are uniform in -tilt to tilt; must be below 0.5, or the denominator can be 0
          in a corner.
    """

    tilt: Minority

    def __call__(self, key: Array, matrices: Array) -> Array:
        shape = (2, len(matrices))
        g, h = jax.random.uniform(key, shape, jnp.float32, -self.tilt, self.tilt)
        zero, one = jnp.zeros_like(g), jnp.ones_like(g)
        return _then(matrices, [[one, zero, zero], [zero, one, zero], [g, h, one]])


def _then(matrices: Array, rows: Sequence[Sequence[Array]]) -> Array:
    motion = jnp.stack([jnp.stack(row, axis=-1) for row in rows], axis=-2)
    return jnp.matmul(matrices, motion, precision="highest")


class warped(Part):
    """All motions of each image in order, with a single bilinear interpolation.

    Pixels from outside the image are 0.

    Args:
        motions: in order.
    """

    motions: tuple[Motion, ...]

    def __init__(self, *motions: Motion) -> None:
        object.__setattr__(self, "motions", motions)

    def __call__(self, key: Array, images: Array) -> Array:
        matrices = jnp.broadcast_to(jnp.eye(3, dtype=jnp.float32), (len(images), 3, 3))
        for i, motion in enumerate(self.motions):
            matrices = motion(jax.random.fold_in(key, i), matrices)
        return resampled(images, matrices)


def resampled(images: Array, matrices: Array) -> Array:
    """Interpolates each image bilinearly at the points of its matrix (see ``Motion``)."""
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
