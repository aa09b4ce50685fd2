"""Layers that stay fast when every client has its own weights, and exact under padding."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype

from fedjax_sim.base import Array

Padding = Sequence[tuple[int, int]]
Lowering = Literal["direct", "im2col"]
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

    ``direct`` is XLA's convolution with gradients that are written as convolutions in the same
    NHWC/HWIO numbering: inside a loop XLA's CPU backend has its fast kernel only for that one.
    (Plain ``lax.conv`` differentiated in a scan: 57 samples/s on the CIFAR network of the thesis;
    this one 1,400 to 2,250, im2col about half.) ``im2col`` is shifted slices and one matrix
    product, which vmap batches; it would turn a convolution into a grouped one.

    Args:
        x: ``f32[B, H, W, C]``; of another type than the kernel's, the wider of the two is taken, as
            flax does: weights in bfloat16 or float64.
        kernel: ``f32[h, w, C, O]``.
        padding: (low, high) for H and W.
        lowering: "direct" or "im2col"; None for the backend's default: "direct" on CPU, "im2col"
            elsewhere (by others' reports on grouped convolutions, jax#13800, not by a measurement
            of ours).
        stride: s, for H and W.

    Returns:
        ``f32[B, H', W', O]``.

    Raises:
        ValueError: if there is no such lowering.

    Example:
        >>> conv(jnp.ones((1, 4, 4, 2)), jnp.ones((3, 3, 2, 5)), ((0, 0), (0, 0))).shape
        (1, 2, 2, 5)
    """
    if lowering is None:
        lowering = "direct" if jax.default_backend() == "cpu" else "im2col"
    if lowering not in ("direct", "im2col"):
        raise ValueError(f"lowering must be 'direct' or 'im2col', got {lowering!r}")
    pads = tuple((int(a), int(b)) for a, b in padding)
    x, kernel = promote_dtype(x, kernel)
    return (_direct if lowering == "direct" else _im2col)(x, kernel, pads, stride)


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


@jax.custom_vjp
def max_pool(x: Array) -> Array:
    """2×2 maximum, stride 2: ``[B, H, W, C]`` -> ``[B, H // 2, W // 2, C]`` (odd edges dropped).

    The gradient goes to the first maximum of a window, in one fused pass: a window reduction's own
    gradient is a select-and-scatter, which no backend runs fast.

    >>> max_pool(jnp.arange(16.0).reshape(1, 4, 4, 1))[0, :, :, 0].tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """
    return _max_pool_fwd(x)[0]


def _max_pool_fwd(x: Array) -> tuple[Array, tuple[Array, Array]]:
    h, w = x.shape[1] // 2 * 2, x.shape[2] // 2 * 2
    corners = [x[:, i:h:2, j:w:2] for i in (0, 1) for j in (0, 1)]
    best, winner = corners[0], jnp.zeros(corners[0].shape, jnp.int8)
    for number, corner in enumerate(corners[1:], 1):
        better = corner > best
        best = jnp.maximum(best, corner)
        winner = jnp.where(better, jnp.int8(number), winner)
    return best, (winner, jnp.zeros((x.shape[1] - h, x.shape[2] - w, 0), jnp.int8))


def _max_pool_bwd(saved: tuple[Array, Array], dy: Array) -> tuple[Array]:
    winner, odd = saved
    b, h, w, c = dy.shape
    corner = jnp.arange(4, dtype=jnp.int8).reshape(1, 1, 2, 1, 2, 1)
    spread = jnp.where(winner[:, :, None, :, None] == corner, dy[:, :, None, :, None], 0)
    dx = spread.reshape(b, 2 * h, 2 * w, c)
    return (jnp.pad(dx, ((0, 0), (0, odd.shape[0]), (0, odd.shape[1]), (0, 0))),)


max_pool.defvjp(_max_pool_fwd, _max_pool_bwd)


def fan_in_uniform(fan_in: int) -> Any:
    r""":math:`U(-1/\sqrt{fan\_in}, 1/\sqrt{fan\_in})`, PyTorch's default for weights and biases.

    Source: Paszke et al. 2019 <https://arxiv.org/abs/1912.01703>.
    """
    bound = 1 / math.sqrt(fan_in)

    def init(key: Array, shape: Sequence[int], dtype: Any = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def _wide(v: Array) -> Array:
    """``[C]`` -> ``[1, 1, 1, C]``."""
    return jnp.expand_dims(v, (0, 1, 2))


class Dense(nn.Module):
    """Affine layer with PyTorch's initialisation, as the papers' networks have it.

    Attributes:
        features: outputs.
    """

    features: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """``[B, C]`` -> ``[B, features]``."""
        fan_in = x.shape[-1]
        init = fan_in_uniform(fan_in)
        return nn.Dense(self.features, kernel_init=init, bias_init=init)(x)


class Conv(nn.Module):
    """Convolution with stride 1, a bias and PyTorch's initialisation.

    It is computed by :func:`conv`.

    Attributes:
        features: output channels.
        size: side of the square kernel.
        padding: zeros on every side.
    """

    features: int
    size: int = 3
    padding: int = 0

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """``[B, H, W, C]`` -> ``[B, H', W', features]``."""
        shape = (self.size, self.size, x.shape[-1], self.features)
        init = fan_in_uniform(math.prod(shape[:3]))
        kernel = self.param("kernel", init, shape)
        bias = self.param("bias", init, (self.features,))
        return conv(x, kernel, ((self.padding, self.padding),) * 2) + _wide(bias)


class BatchNorm(nn.Module):
    r"""Batch normalisation whose statistics are those of the real rows alone.

    .. math:: y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta, \qquad
              \mu = \frac{\sum_b m_b \sum_{ij} x_{bij}}{HW \sum_b m_b}

    Running statistics follow with weight 0.1; they hold the unbiased variance, as PyTorch's do. All
    statistics are taken in float32 at least, as flax takes them; the output has the wider type of x
    and the weights.

    Attributes:
        epsilon: ε.
    """

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: Array, *, train: bool, mask: Array | None = None) -> Array:
        """``[B, H, W, C]`` -> the same; ``mask bool[B]`` marks the real rows."""
        channels = (x.shape[-1],)
        # float32 even where JAX_ENABLE_X64 makes float64 the default, as all of flax's weights are.
        scale = self.param("scale", nn.initializers.ones, channels, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, channels, jnp.float32)
        mean = self.variable("batch_stats", "mean", jnp.zeros, channels, jnp.float32)
        var = self.variable("batch_stats", "var", jnp.ones, channels, jnp.float32)
        given = jnp.result_type(x, scale, bias)
        wide = jnp.float64 if given == jnp.float64 else jnp.float32
        x, scale, bias = x.astype(wide), scale.astype(wide), bias.astype(wide)
        if not train:
            factor = scale * jax.lax.rsqrt(var.value.astype(wide) + self.epsilon)
            shift = bias - mean.value.astype(wide) * factor
            return (x * _wide(factor) + _wide(shift)).astype(given)
        real = jnp.ones(x.shape[0], bool) if mask is None else mask
        keep = real.astype(x.dtype)[:, None, None, None]
        x = jnp.where(keep > 0, x, 0)  # padding may hold NaN
        count = jnp.sum(keep) * (x.shape[1] * x.shape[2])
        mu = jnp.sum(x, axis=(0, 1, 2)) / count
        centred = x - _wide(mu)
        variance = jnp.sum(jnp.square(centred) * keep, axis=(0, 1, 2)) / count
        if not self.is_initializing():
            unbiased = variance * count / jnp.maximum(count - 1, 1)
            for running, new in ((mean, mu), (var, unbiased)):
                kept = running.value.dtype
                running.value = (0.9 * running.value.astype(wide) + 0.1 * new).astype(kept)
        factor = scale * jax.lax.rsqrt(variance + self.epsilon)
        return (centred * _wide(factor) + _wide(bias)).astype(given)


class Dropout(nn.Module):
    """Zeroes whole ``[H, W]`` maps of ``[B, H, W, C]``, or entries of ``[B, C]``, with rate 1/2."""

    @nn.compact
    def __call__(self, x: Array, *, train: bool) -> Array:
        """Gives ``x`` unchanged if ``train`` is False."""
        spatial = tuple(range(1, x.ndim - 1))
        return nn.Dropout(0.5, broadcast_dims=spatial, deterministic=not train)(x)
