"""Convolutions with implementations that are fast on CPUs and on accelerators."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from fedjax_sim.base import Array
from fedjax_sim.models import winograd
from fedjax_sim.models.winograd import Padding

Lowering = Literal["lax", "direct", "winograd", "im2col"]
LOWERINGS: tuple[Lowering, ...] = get_args(Lowering)
_NHWC = ("NHWC", "HWIO", "NHWC")


def conv(
    x: Array,
    kernel: Array,
    padding: Padding,
    lowering: Lowering | None = None,
    *,
    stride: int = 1,
) -> Array:
    r"""Convolves, :math:`y_{bijo} = \sum_{uvc} x_{b,si+u,sj+v,c}\, k_{uvco}` with stride s.

    The lowerings are:

    - ``lax``: XLA's convolution with JAX's own gradients. Under vmap over kernels it becomes a
      grouped convolution, which XLA's TPU compiler handles well (``benchmarks/results/aot.md``).
    - ``direct``: XLA's convolution with gradients written as convolutions in the same NHWC/HWIO
      layout, the only one for which XLA's CPU backend uses its fast kernel inside a loop.
    - ``winograd``: 3×3 kernels with a quarter of the multiplications, in tiles of 4×4 outputs; for
      float32 and wider, accurate to 1e-5 of the largest value
      (:func:`fedjax_sim.models.winograd.conv3x3`).
    - ``im2col``: shifted slices and one matrix product, which vmap batches.

    Args:
        x: ``f32[B, H, W, C]``; if its dtype differs from the kernel's, the wider one is used, as in
            flax: for weights in bfloat16 or float64.
        kernel: ``f32[h, w, C, O]``.
        padding: (low, high) for H and W.
        lowering: a name from the list above. None: on CPUs "winograd" if it is faster, else
            "direct"; on other devices "lax".
        stride: s, for H and W.

    Returns:
        ``f32[B, H', W', O]``.

    Raises:
        ValueError: if the lowering is unknown, or "winograd" with a kernel that is not 3×3, a
            stride above 1 or a 16-bit dtype.

    Example:
        >>> conv(jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 5)), ((0, 0), (0, 0))).shape
        (1, 2, 2, 5)
    """
    if lowering not in (None, *LOWERINGS):
        raise ValueError(f"lowering must be one of {', '.join(LOWERINGS)}, got {lowering!r}")
    pads = tuple((int(a), int(b)) for a, b in padding)
    x, kernel = promote_dtype(x, kernel)
    lowerings: dict[Lowering, Callable[[Array, Array], Array]] = {
        "lax": lambda x, k: _nhwc(x, k, pads, stride),
        "direct": lambda x, k: _direct(x, k, pads, stride),
        "winograd": lambda x, k: winograd.conv3x3(x, k, pads),
        "im2col": lambda x, k: _im2col(x, k, pads, stride),
    }
    if lowering == "winograd" and not _winograd_applies(kernel, stride):
        given = "×".join(map(str, kernel.shape[:2]))
        raise ValueError(
            "lowering 'winograd' requires 3×3 kernels in float32 or float64 and stride 1, got "
            f"{given} in {kernel.dtype} and stride {stride}"
        )
    if lowering is not None:
        return lowerings[lowering](x, kernel)
    on_cpu: Lowering = "direct"
    if _winograd_applies(kernel, stride) and _winograd_is_faster(x, kernel, pads):
        on_cpu = "winograd"
    computed: Array = jax.lax.platform_dependent(
        x, kernel, cpu=lowerings[on_cpu], default=lowerings["lax"]
    )
    return computed


def _winograd_applies(kernel: Array, stride: int) -> bool:
    return kernel.shape[:2] == (3, 3) and stride == 1 and kernel.dtype.itemsize >= 4


def _winograd_is_faster(x: Array, kernel: Array, padding: Padding) -> bool:
    """Returns whether Winograd's savings outweigh its transforms.

    On a core of an AMD EPYC it is 1.0 to 1.15 times as fast as "direct" with 16 channels, 1.5 with
    32, and 2.1 to 2.7 from 64 on; 0.9 for 5×5 outputs, which fill 39 % of their four tiles.
    """
    outputs = [n + low + high - 2 for n, (low, high) in zip(x.shape[1:3], padding, strict=True)]
    covered = math.prod(winograd.TILE * winograd.tiles(n) for n in outputs)
    return min(kernel.shape[2:]) >= 16 and 2 * math.prod(outputs) >= covered


def _nhwc(
    x: Array,
    kernel: Array,
    padding: Padding,
    stride: int = 1,
    x_dilation: int = 1,
    kernel_dilation: int = 1,
) -> Array:
    strides, spread, holes = (stride,) * 2, (x_dilation,) * 2, (kernel_dilation,) * 2
    return jax.lax.conv_general_dilated(
        x, kernel, strides, padding, spread, holes, dimension_numbers=_NHWC
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _direct(x: Array, kernel: Array, padding: Padding, stride: int) -> Array:
    return _direct_fwd(x, kernel, padding, stride)[0]


def _direct_fwd(
    x: Array, kernel: Array, padding: Padding, stride: int
) -> tuple[Array, tuple[Array, Array]]:
    saved = x, kernel
    if kernel.shape[2] == 1:  # XLA's kernel is slow for a single channel
        return _by_patches(x, kernel, padding, stride), saved
    if kernel.shape[2:] == (3, 32):
        # RGB to 32 channels, the usual first layer: a fourth channel of zeros makes XLA's CPU
        # backend three times as fast; other widths gain nothing.
        x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, 1)))
        kernel = jnp.pad(kernel, ((0, 0), (0, 0), (0, 1), (0, 0)))
    return _nhwc(x, kernel, padding, stride), saved


def _direct_bwd(
    padding: Padding, stride: int, saved: tuple[Array, Array], dy: Array
) -> tuple[Array, Array]:
    x, kernel = saved
    back = []
    for n, outputs, k, (low, _) in zip(
        x.shape[1:3], dy.shape[1:3], kernel.shape, padding, strict=False
    ):
        last = (outputs - 1) * stride - low  # start of the last window
        back.append((k - 1 - low, n - 1 - last))
    # The stride of y becomes a dilation of dy in both gradients.
    turned = jnp.flip(kernel, (0, 1)).swapaxes(2, 3)
    dx = _nhwc(dy, turned, back, x_dilation=stride)
    return dx, _kernel_gradient(x, dy, kernel.shape, padding, stride)


def _kernel_gradient(
    x: Array, dy: Array, shape: Sequence[int], padding: Padding, stride: int
) -> Array:
    """Correlates x with dy: one convolution in which the batch is the channel axis.

    From 64 output channels on, the width is merged with the batch, which makes sums longer and
    contiguous: 1.1 to 1.4 times as fast, but up to 3 times as slow with fewer channels.
    """
    (_, rows, cols, o), (h, w, c, _) = dy.shape, shape
    sizes = zip(x.shape[1:3], dy.shape[1:3], (h, w), padding, strict=True)
    # Padding after the last window; negative if no window covers the edge.
    pads = [(low, k + stride * (m - 1) - low - n) for n, m, k, (low, _) in sizes]
    if o < 64:
        dy = dy.transpose(1, 2, 0, 3)
        dk = _nhwc(x.transpose(3, 1, 2, 0), dy, pads, kernel_dilation=stride)
        return dk.transpose(1, 2, 0, 3)
    x = jnp.pad(x, ((0, 0), (0, 0), padding[1], (0, 0))).transpose(1, 3, 0, 2)
    reach = stride * (cols - 1) + 1
    columns = jnp.stack([x[..., v : v + reach : stride] for v in range(w)], axis=1)
    dk = _nhwc(
        columns.reshape(1, x.shape[0], w * c, -1),
        dy.swapaxes(0, 1).reshape(rows, 1, -1, o),
        (pads[0], (0, 0)),
        kernel_dilation=stride,
    )
    return dk.reshape(h, w, c, o)


_direct.defvjp(_direct_fwd, _direct_bwd)


def _shifts(x: Array, size: Sequence[int], padding: Padding, stride: int) -> list[Array]:
    """Returns the inputs of each kernel entry, row by row: ``[B, H', W', C]`` each."""
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    rows, cols = (n - k + 1 for n, k in zip(x.shape[1:3], size, strict=True))
    return [
        x[:, i : i + rows : stride, j : j + cols : stride]
        for i in range(size[0])
        for j in range(size[1])
    ]


def _by_patches(x: Array, kernel: Array, padding: Padding, stride: int) -> Array:
    """Convolves by one matrix product whose long axis, all positions of a batch, is contiguous.

    Patches are gathered by columns first, then by rows, which copies contiguous blocks: on grey
    images, a fifth of the time of XLA's kernel; with more channels it gains nothing.
    """
    (h, w, c, o), batch = kernel.shape, len(x)
    x = jnp.pad(x, ((0, 0), *padding, (0, 0))).transpose(3, 1, 0, 2)
    rows, cols = ((n - k) // stride + 1 for n, k in ((x.shape[1], h), (x.shape[3], w)))
    down, right = (stride * (m - 1) + 1 for m in (rows, cols))
    wide = jnp.stack([x[..., j : j + right : stride] for j in range(w)])
    patches = jnp.stack([wide[:, :, i : i + down : stride] for i in range(h)])
    taps = kernel.transpose(3, 0, 1, 2)
    y = taps.reshape(o, -1) @ patches.reshape(h * w * c, -1)
    return y.reshape(o, rows, batch, cols).transpose(2, 1, 3, 0)


def _im2col(x: Array, kernel: Array, padding: Padding, stride: int) -> Array:
    h, w, c, o = kernel.shape
    patches = jnp.concatenate(_shifts(x, (h, w), padding, stride), axis=-1)
    return patches @ kernel.reshape(h * w * c, o)


def depthwise(x: Array, kernel: Array, padding: Padding, *, stride: int = 1) -> Array:
    r"""Convolves each channel separately, :math:`y_{bijc} = \sum_{uv} x_{b,si+u,sj+v,c}\,k_{uvc}`.

    x is ``f32[B, H, W, C]``, the kernel ``f32[h, w, C]``, and the padding (low, high) for H and W.
    It uses shifted multiply-adds, which XLA fuses into one loop, also under vmap over clients. On
    CPU, the grouped convolution of ``lax`` takes 340 times as long with gradients.

    Example:
        >>> x, kernel = jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2))
        >>> depthwise(x, kernel, ((1, 1), (1, 1)), stride=2)[0, :, :, 0].tolist()
        [[4.0, 6.0], [6.0, 9.0]]
    """
    x, kernel = promote_dtype(x, kernel)
    h, w, c = kernel.shape
    taps = kernel.reshape(h * w, 1, 1, 1, c)
    inputs = _shifts(x, (h, w), padding, stride)
    return functools.reduce(jnp.add, [a * k for a, k in zip(inputs, taps, strict=True)])
