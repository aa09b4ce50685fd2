"""Convolutions, each computed in the way that is fast where it runs."""

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
    r"""Convolution, :math:`y_{bijo} = \sum_{uvc} x_{b,si+u,sj+v,c}\, k_{uvco}` with stride s.

    How it is computed:

    - ``lax``: XLA's convolution with JAX's own gradients. A vmap over kernels makes it a grouped
      one, which XLA's TPU compiler handles well: compiled for a v5e, a step of 40 clients of the
      thesis' CIFAR network takes 27.7 ms by XLA's own estimate and the program 2.2 GB, with
      ``im2col`` 81.7 ms and 5.3 GB (``benchmarks/results/aot.md``).
    - ``direct``: XLA's convolution with gradients that are written as convolutions in the same
      NHWC/HWIO numbering: inside a loop XLA's CPU backend has its fast kernel only for that one.
      (``lax`` in a scan: 57 samples/s on that network; this one 1,400 to 2,250, ``im2col`` about
      half.)
    - ``winograd``: 3×3 kernels with a quarter of the multiplications, 1.5 times as fast as
      ``direct`` with 32 channels and 2 to 2.7 times from 64 on, on images that its tiles of 4×4
      outputs fill; float32 and wider, to 1e-5 of the largest value
      (:func:`fedjax_sim.models.winograd.conv3x3`).
    - ``im2col``: shifted slices and one matrix product, which vmap batches.

    Args:
        x: ``f32[B, H, W, C]``; of another type than the kernel's, the wider of the two is taken, as
            flax does: weights in bfloat16 or float64.
        kernel: ``f32[h, w, C, O]``.
        padding: (low, high) for H and W.
        lowering: one of those above; None for "winograd", if it is faster, or "direct" in what is
            compiled for CPUs, and "lax" in what is compiled for others.
        stride: s, for H and W.

    Returns:
        ``f32[B, H', W', O]``.

    Raises:
        ValueError: if there is no such lowering, or it is "winograd" for a kernel that is not 3×3,
            a stride above 1 or numbers of 16 bits.

    Example:
        >>> conv(jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 5)), ((0, 0), (0, 0))).shape
        (1, 2, 2, 5)
    """
    if lowering not in (None, *LOWERINGS):
        raise ValueError(f"lowering must be one of {', '.join(LOWERINGS)}, got {lowering!r}")
    pads = tuple((int(a), int(b)) for a, b in padding)
    x, kernel = promote_dtype(x, kernel)
    ways: dict[Lowering, Callable[[Array, Array], Array]] = {
        "lax": lambda x, k: _nhwc(x, k, pads, stride),
        "direct": lambda x, k: _direct(x, k, pads, stride),
        "winograd": lambda x, k: winograd.conv3x3(x, k, pads),
        "im2col": lambda x, k: _im2col(x, k, pads, stride),
    }
    if lowering == "winograd" and not _may_be_winograd(kernel, stride):
        given = "×".join(map(str, kernel.shape[:2]))
        raise ValueError(
            "lowering 'winograd' is of 3×3 kernels in float32 or float64 and stride 1, got "
            f"{given} in {kernel.dtype} and stride {stride}"
        )
    if lowering is not None:
        return ways[lowering](x, kernel)
    on_cpu: Lowering = "direct"
    if _may_be_winograd(kernel, stride) and _pays(x, kernel, pads):
        on_cpu = "winograd"
    computed: Array = jax.lax.platform_dependent(x, kernel, cpu=ways[on_cpu], default=ways["lax"])
    return computed


def _may_be_winograd(kernel: Array, stride: int) -> bool:
    return kernel.shape[:2] == (3, 3) and stride == 1 and kernel.dtype.itemsize >= 4


def _pays(x: Array, kernel: Array, padding: Padding) -> bool:
    """Whether Winograd's products outweigh its transforms.

    On one core of an AMD EPYC, 16 images in a loop, forward and backward: 1.0 to 1.15 times as fast
    as "direct" from 16 channels to 16, 1.5 to 1.6 times from 32 to 32, 2.1 to 2.7 times from 64 to
    64 on. An image of 5×5 outputs is 39 % of its four tiles: from 64 channels to 64 it is 0.9 times
    as fast; one of 6×6, 1.5 times.
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
    if kernel.shape[2] == 1:  # of one map XLA's kernel is slow
        return _by_patches(x, kernel, padding, stride), saved
    if kernel.shape[2:] == (3, 32):
        # RGB to 32 maps, the usual first layer: with a fourth channel of zeros XLA's CPU backend
        # takes 0.18 ms instead of 0.55 (10×32×32×3, one core); other widths gain nothing.
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
        last = (outputs - 1) * stride - low  # where the last window begins
        back.append((k - 1 - low, n - 1 - last))
    # A stride of y is a dilation of dy in both gradients.
    turned = jnp.flip(kernel, (0, 1)).swapaxes(2, 3)
    dx = _nhwc(dy, turned, back, x_dilation=stride)
    return dx, _kernel_gradient(x, dy, kernel.shape, padding, stride)


def _kernel_gradient(
    x: Array, dy: Array, shape: Sequence[int], padding: Padding, stride: int
) -> Array:
    """Correlates x with dy over the batch: one convolution whose channels are the batch.

    From 64 maps on the width joins the batch: the sums are longer and without gaps in memory, which
    is 1.1 to 1.4 times as fast; with fewer maps up to 3 times as slow.
    """
    (_, rows, cols, o), (h, w, c, _) = dy.shape, shape
    sizes = zip(x.shape[1:3], dy.shape[1:3], (h, w), padding, strict=True)
    # Behind the last window; negative if an edge meets none.
    seen = [(low, k + stride * (m - 1) - low - n) for n, m, k, (low, _) in sizes]
    if o < 64:
        dy = dy.transpose(1, 2, 0, 3)
        dk = _nhwc(x.transpose(3, 1, 2, 0), dy, seen, kernel_dilation=stride)
        return dk.transpose(1, 2, 0, 3)
    x = jnp.pad(x, ((0, 0), (0, 0), padding[1], (0, 0))).transpose(1, 3, 0, 2)
    reach = stride * (cols - 1) + 1
    columns = jnp.stack([x[..., v : v + reach : stride] for v in range(w)], axis=1)
    dk = _nhwc(
        columns.reshape(1, x.shape[0], w * c, -1),
        dy.swapaxes(0, 1).reshape(rows, 1, -1, o),
        (seen[0], (0, 0)),
        kernel_dilation=stride,
    )
    return dk.reshape(h, w, c, o)


_direct.defvjp(_direct_fwd, _direct_bwd)


def _shifts(x: Array, size: Sequence[int], padding: Padding, stride: int) -> list[Array]:
    """What each entry of a kernel of this size meets, row by row: ``[B, H', W', C]`` each."""
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    rows, cols = (n - k + 1 for n, k in zip(x.shape[1:3], size, strict=True))
    return [
        x[:, i : i + rows : stride, j : j + cols : stride]
        for i in range(size[0])
        for j in range(size[1])
    ]


def _by_patches(x: Array, kernel: Array, padding: Padding, stride: int) -> Array:
    """One matrix product whose long axis, all places of a batch, is the last one in memory too.

    Columns of patches are gathered first, then rows, which copies whole stretches. From grey images
    it takes a fifth of the time of XLA's kernel (16×28×28 to 10 maps by 5×5, one core: 0.18 and
    0.96 ms); of RGB on it gains nothing.
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
    r"""Every channel under its own kernel, :math:`y_{bijc} = \sum_{uv} x_{b,si+u,sj+v,c}\,k_{uvc}`.

    Shifted multiply-adds, which XLA fuses into one loop and vmap over clients leaves as they are.
    On CPU the grouped convolution of ``lax`` takes 43 times as long forward and 340 times with its
    gradients (16×7×7×336, 3×3 kernels, on one core: 0.13 and 2.0 ms here, 5.6 and 680 ms there).

    Args:
        x: ``f32[B, H, W, C]``.
        kernel: ``f32[h, w, C]``.
        padding: (low, high) for H and W.
        stride: s, for H and W.

    Returns:
        ``f32[B, H', W', C]``.

    Example:
        >>> x, kernel = jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2))
        >>> depthwise(x, kernel, ((1, 1), (1, 1)), stride=2)[0, :, :, 0].tolist()
        [[4.0, 6.0], [6.0, 9.0]]
    """
    x, kernel = promote_dtype(x, kernel)
    h, w, c = kernel.shape
    taps = kernel.reshape(h * w, 1, 1, 1, c)
    met = _shifts(x, (h, w), padding, stride)
    return functools.reduce(jnp.add, [a * k for a, k in zip(met, taps, strict=True)])
