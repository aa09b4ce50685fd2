"""3×3 convolutions by Winograd's minimal filtering, with a quarter of the multiplications."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array

Padding = Sequence[tuple[int, int]]
Matrix = tuple[tuple[float, ...], ...]
TILE = 4  # outputs of a tile per axis, computed from 6 inputs

# The polynomials of a tile and of the kernel are multiplied at the points 0, 1, -1, 2, -2 and ∞.
_INPUT: Matrix = (  # Bᵀ
    (4, 0, -5, 0, 1, 0),
    (0, -4, -4, 1, 1, 0),
    (0, 4, -4, -1, 1, 0),
    (0, -2, -1, 2, 1, 0),
    (0, 2, -1, -2, 1, 0),
    (0, 4, 0, -5, 0, 1),
)
_KERNEL: Matrix = (  # G
    (1 / 4, 0, 0),
    (-1 / 6, -1 / 6, -1 / 6),
    (-1 / 6, 1 / 6, -1 / 6),
    (1 / 24, 1 / 12, 1 / 6),
    (1 / 24, -1 / 12, 1 / 6),
    (0, 0, 1),
)
_OUTPUT: Matrix = (  # Aᵀ
    (1, 1, 1, 1, 1, 0),
    (0, 1, -1, 2, -2, 0),
    (0, 1, 1, 4, 4, 0),
    (0, 1, -1, 8, -8, 1),
)


def tiles(length: int) -> int:
    """Returns the number of tiles that cover an axis of outputs."""
    return -(-length // TILE)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def conv3x3(x: Array, kernel: Array, padding: Padding) -> Array:
    r"""Convolves with 3×3 kernels ``f32[3, 3, C, O]`` and stride 1 by F(4×4, 3×3).

    .. math:: Y = A^\top \Bigl[\sum_c (G k_c G^\top) \odot (B^\top d_c B)\Bigr] A

    for each tile d of 6×6 inputs. The sum over channels is a matrix product at each of the 36
    positions, with 36 multiplications for the 16 outputs of a tile instead of 144. The other
    products are additions, one axis after the other. In float32, the error is up to 1e-5 of the
    largest value, and 5e-7 for a direct sum; bfloat16 is not precise enough.

    Example:
        >>> conv3x3(jnp.ones((1, 5, 5, 2)), jnp.ones((3, 3, 2, 4)), ((0, 0), (1, 1))).shape
        (1, 3, 5, 4)

    Source: Lavin and Gray 2016 <https://arxiv.org/abs/1509.09308>.
    """
    return _forward(x, kernel, padding)[0]


def _forward(x: Array, kernel: Array, padding: Padding) -> tuple[Array, tuple[Array, Array, Array]]:
    (batch, *sides, channels), outputs = x.shape, kernel.shape[3]
    shape = [n + low + high - 2 for n, (low, high) in zip(sides, padding, strict=True)]
    down, right = map(tiles, shape)
    pads = [
        (low, TILE * count + 2 - n - low)
        for n, count, (low, _) in zip(sides, (down, right), padding, strict=True)
    ]
    padded = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    of_input = _on_both(_input_tiles, padded).reshape(36, -1, channels)
    of_kernel = (_both_axes(kernel.dtype) @ kernel.reshape(9, -1)).reshape(36, channels, outputs)
    product = _products(of_input, of_kernel, 2, 1).reshape(6, 6, batch, down, right, outputs)
    y = _on_both(_join_outputs, product)[:, : shape[0], : shape[1]]
    return y, (of_input, of_kernel, jnp.zeros((0, *sides), x.dtype))


def _backward(
    padding: Padding, saved: tuple[Array, Array, Array], dy: Array
) -> tuple[Array, Array]:
    """Applies the transposed maps; the transform of dy serves both gradients."""
    of_input, of_kernel, empty = saved
    (batch, *shape, outputs), channels = dy.shape, of_input.shape[2]
    down, right = map(tiles, shape)
    beyond = [(0, TILE * count - n) for n, count in zip(shape, (down, right), strict=True)]
    dy = jnp.pad(dy, ((0, 0), *beyond, (0, 0)))
    of_output = _on_both(_split_outputs, dy).reshape(36, -1, outputs)
    of_both = _products(of_input, of_output, 1, 1).reshape(36, -1)
    dk = (_both_axes(dy.dtype).T @ of_both).reshape(3, 3, channels, outputs)
    back = _products(of_output, of_kernel, 2, 2).reshape(6, 6, batch, down, right, channels)
    dx = _on_both(_add_tiles, back)
    (top, _), (left, _) = padding
    rows, columns = empty.shape[1:]
    return dx[:, top : top + rows, left : left + columns], dk


conv3x3.defvjp(_forward, _backward)


def _both_axes(dtype: jnp.dtype) -> Array:
    """Returns G ⊗ G: kernels are small, so one matrix product is as fast as one per axis."""
    g = jnp.asarray(_KERNEL, dtype)
    return jnp.kron(g, g)


def _products(a: Array, b: Array, of_a: int, of_b: int) -> Array:
    """Multiplies matrices at each of the 36 positions, over an axis of a and one of b."""
    return jax.lax.dot_general(a, b, (((of_a,), (of_b,)), ((0,), (0,))))


def _combine(matrix: Matrix, parts: Sequence[Array]) -> list[Array]:
    """Multiplies a matrix by parts term by term, since a third of its entries are 0."""
    rows = ([c * part for c, part in zip(row, parts, strict=True) if c] for row in matrix)
    return [functools.reduce(jnp.add, terms) for terms in rows]


def _transposed(matrix: Matrix) -> Matrix:
    return tuple(zip(*matrix, strict=True))


# The four maps below work on axis 2: first the width of images [B, H, W, C], whose positions in a
# tile then become the leading axis, [6, B, H, t, C]; then the height.


def _on_both(axis_2: Callable[[Array], Array], x: Array) -> Array:
    """Applies a map to the width, then to the height.

    The barrier keeps XLA from recomputing the first for each entry of the second.
    """
    return axis_2(jax.lax.optimization_barrier(axis_2(x)))


def _input_tiles(x: Array) -> Array:
    """Applies Bᵀ to overlapping tiles: ``[., ., 4t + 2, ...]`` -> ``[6, ., ., t, ...]``."""
    last = x.shape[2] - 5
    return jnp.stack(_combine(_INPUT, [x[:, :, i : i + last : TILE] for i in range(6)]))


def _add_tiles(d: Array) -> Array:
    """Applies its transpose, plus 2 zeros: ``[6, ., ., t, ...]`` -> ``[., ., 4t + 4, ...]``.

    The last two inputs of a tile are the first two of the next. JAX's transpose, six scatters, is
    three times as slow.
    """
    parts = _combine(_transposed(_INPUT), list(d))
    first = [_pad_tiles(part, (0, 1)) for part in parts[:TILE]]
    following = [_pad_tiles(part, (1, 0)) for part in parts[TILE:]]
    return _merged([first[0] + following[0], first[1] + following[1], *first[2:]])


def _pad_tiles(part: Array, count: tuple[int, int]) -> Array:
    return jnp.pad(part, [count if axis == 2 else (0, 0) for axis in range(part.ndim)])


def _join_outputs(m: Array) -> Array:
    """Applies Aᵀ and joins the tiles: ``[6, ., ., t, ...]`` -> ``[., ., 4t, ...]``."""
    return _merged(_combine(_OUTPUT, list(m)))


def _split_outputs(dy: Array) -> Array:
    """Applies its transpose: ``[., ., 4t, ...]`` -> ``[6, ., ., t, ...]``."""
    tiled = dy.reshape(*dy.shape[:2], -1, TILE, *dy.shape[3:])
    return jnp.stack(_combine(_transposed(_OUTPUT), [tiled[:, :, :, i] for i in range(TILE)]))


def _merged(parts: Sequence[Array]) -> Array:
    """Interleaves four parts of every tile on the tile axis."""
    y = jnp.stack(parts, 3)
    return y.reshape(*y.shape[:2], -1, *y.shape[4:])
