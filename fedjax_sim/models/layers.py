"""Layers that are fast when every client has its own weights, and exact under padding."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import mlir

from fedjax_sim.base import Array
from fedjax_sim.models.convolutions import conv

MOST_ROWS = 16
"""Samples up to which the kernel's gradient may be a sum of outer products."""

_wanted: ContextVar[bool] = ContextVar("outer_products", default=False)
_chosen = Primitive("outer_products")
_chosen.def_impl(lambda: jnp.int32(1))
_chosen.def_abstract_eval(lambda: jax.core.ShapedArray((), np.dtype(np.int32)))
mlir.register_lowering(_chosen, lambda _: [mlir.ir_constant(np.int32(not _wanted.get()))])


@contextlib.contextmanager
def outer_products(wanted: bool) -> Iterator[None]:
    """Lowers programs in which :func:`product` has the gradient for CPUs, or the usual one."""
    token = _wanted.set(wanted)
    try:
        yield
    finally:
        _wanted.reset(token)


@jax.custom_jvp
def product(x: Array, kernel: Array) -> Array:
    r"""Multiplies ``f32[B, C]`` and ``f32[C, O]``: :math:`y_{bo} = \sum_c x_{bc}\, k_{co}`.

    In programs that XLA optimises for a CPU, the kernel's gradient is a sum of B outer products,
    :math:`\sum_b x_{bc}\, dy_{bo}`, for 2 to 16 samples in float32 or float64. XLA fuses it with
    the step of the optimiser, which then reads and writes the kernel once; a matrix product with
    sums of B terms is a slow pass of its own. In other programs (see :func:`outer_products`) the
    sum would be slower.

    >>> slope = jax.grad(lambda k: product(jnp.array([[1.0], [2.0]]), k).sum())
    >>> slope(jnp.zeros((1, 3))).tolist()
    [[3.0, 3.0, 3.0]]
    """
    return x @ kernel


def dense_product(x: Array, kernel: Array, *_: Any, **__: Any) -> Array:
    """Computes :func:`product` as the ``dot_general`` of flax's ``Dense``."""
    return product(x, kernel)


def _tangent(primals: tuple[Array, Array], tangents: tuple[Any, Any]) -> tuple[Array, Array]:
    (x, kernel), (dx, dk) = primals, tangents
    terms = []
    if not isinstance(dx, SymbolicZero):
        terms.append(dx @ kernel)
    if not isinstance(dk, SymbolicZero):
        few = x.ndim == 2 and 1 < len(x) <= MOST_ROWS and x.dtype.itemsize >= 4
        ways = (_by_rows, jnp.matmul)
        terms.append(jax.lax.switch(_chosen.bind(), ways, x, dk) if few else x @ dk)
    return product(x, kernel), sum(terms[1:], terms[0])


product.defjvp(_tangent, symbolic_zeros=True)


def _by_rows(x: Array, dk: Array) -> Array:
    """Returns ``x @ dk`` as B products of one row, whose transpose is a sum of outer products.

    The barriers keep XLA from computing x and dy again for each entry of the kernel.
    """
    rows = jnp.unstack(jax.lax.optimization_barrier(x))
    # The transpose goes backwards, and so adds the outer products as a matrix product does: second
    # to first, as the multiplication that is fused with the first addition, then the others.
    order = [*range(len(rows) - 1, 1, -1), 0, 1]
    products = {b: jnp.sum(rows[b][:, None] * dk, axis=0) for b in order}
    return jax.lax.optimization_barrier(jnp.stack([products[b] for b in range(len(rows))]))


@jax.custom_vjp
def max_pool(x: Array) -> Array:
    """Takes 2×2 maxima: ``[B, H, W, C]`` -> ``[B, H // 2, W // 2, C]`` (odd edges dropped).

    The gradient goes to the first maximum of a window, in one fused pass; JAX's own gradient of a
    window reduction is a select-and-scatter, which is slow on every backend.

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
    r"""Returns PyTorch's default initialiser, :math:`U(-1/\sqrt{fan\_in}, 1/\sqrt{fan\_in})`.

    Source: Paszke et al. 2019 <https://arxiv.org/abs/1912.01703>.
    """
    bound = 1 / math.sqrt(fan_in)

    def init(key: Array, shape: Sequence[int], dtype: Any = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def _per_channel(v: Array) -> Array:
    """Reshapes ``[C]`` to ``[1, 1, 1, C]``."""
    return jnp.expand_dims(v, (0, 1, 2))


class Dense(nn.Module):
    """Dense layer with PyTorch's initialisation, as in the papers' networks."""

    features: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """``[B, C]`` -> ``[B, features]``."""
        fan_in = x.shape[-1]
        init = fan_in_uniform(fan_in)
        layer = nn.Dense(self.features, kernel_init=init, bias_init=init, dot_general=dense_product)
        return layer(x)


class Conv(nn.Module):
    """Convolution with stride 1, a bias and PyTorch's initialisation."""

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
        return conv(x, kernel, ((self.padding, self.padding),) * 2) + _per_channel(bias)


class BatchNorm(nn.Module):
    r"""Batch normalisation with the statistics of the real rows only.

    .. math:: y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta, \qquad
              \mu = \frac{\sum_b m_b \sum_{ij} x_{bij}}{HW \sum_b m_b}

    Running statistics are exponential averages with weight 0.1 and hold the unbiased variance, as
    in PyTorch. All statistics are computed in float32 or wider, as in flax; the output has the
    wider dtype of x and the weights.

    Attributes:
        epsilon: ε, added to the variance.
    """

    epsilon: float = 1e-5

    @nn.compact
    def __call__(self, x: Array, *, train: bool, mask: Array | None = None) -> Array:
        """``[B, H, W, C]`` -> ``[B, H, W, C]``; ``mask bool[B]`` marks the real rows."""
        channels = (x.shape[-1],)
        # float32 even if JAX_ENABLE_X64 makes float64 the default, like all weights of flax.
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
            return (x * _per_channel(factor) + _per_channel(shift)).astype(given)
        real = jnp.ones(x.shape[0], bool) if mask is None else mask
        keep = real.astype(x.dtype)[:, None, None, None]
        x = jnp.where(keep > 0, x, 0)  # padding may hold NaN
        count = jnp.sum(keep) * (x.shape[1] * x.shape[2])
        mu = jnp.sum(x, axis=(0, 1, 2)) / count
        centred = x - _per_channel(mu)
        variance = jnp.sum(jnp.square(centred) * keep, axis=(0, 1, 2)) / count
        if not self.is_initializing():
            unbiased = variance * count / jnp.maximum(count - 1, 1)
            for running, new in ((mean, mu), (var, unbiased)):
                kept = running.value.dtype
                running.value = (0.9 * running.value.astype(wide) + 0.1 * new).astype(kept)
        factor = scale * jax.lax.rsqrt(variance + self.epsilon)
        return (centred * _per_channel(factor) + _per_channel(bias)).astype(given)


class Dropout(nn.Module):
    """Dropout with rate 1/2 of ``[H, W]`` maps of ``[B, H, W, C]``, or of entries of ``[B, C]``."""

    @nn.compact
    def __call__(self, x: Array, *, train: bool) -> Array:
        """Returns ``x`` unchanged if ``train`` is False."""
        spatial = tuple(range(1, x.ndim - 1))
        return nn.Dropout(0.5, broadcast_dims=spatial, deterministic=not train)(x)
