"""A recurrent network for text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Model
from fedjax_sim.models.adapters import from_linen

_glorot = nn.initializers.glorot_uniform()
_UNROLL = 10
"""Steps in each turn of the loop on CUDA; see :func:`recurrence`."""


@jax.custom_vjp
def recurrence(inputs: Array, kernel: Array) -> Array:
    r"""Runs the recurrent part of an LSTM layer.

    .. math::
        i, f, g, o &= a_t + h_{t-1} U \\
        c_t &= \sigma(f) \odot c_{t-1} + \sigma(i) \odot \tanh(g) \\
        h_t &= \sigma(o) \odot \tanh(c_t), \qquad h_0 = c_0 = 0

    The gradient of U is a single matrix product over all steps, after the loop; JAX's own gradient
    would add to an accumulator of U's size in every step, which takes 1.8 times as long on a CPU.
    On CUDA a turn of the loop has 10 steps, for fewer kernels (``benchmarks/results/aot.md``).

    Args:
        inputs: a, ``f32[T, B, 4 H]``: projected inputs with the bias, for all steps.
        kernel: U, ``f32[H, 4 H]``.

    Returns:
        h, ``f32[T, B, H]``.

    Source: Hochreiter, Schmidhuber 1997 <https://doi.org/10.1162/neco.1997.9.8.1735>; Gers,
    Schmidhuber, Cummins 2000 <https://doi.org/10.1162/089976600300015015> (the forget gate).

    Example:
        >>> recurrence(jnp.zeros((5, 2, 12)), jnp.ones((3, 12))).shape
        (5, 2, 3)
    """
    return _recurrence_fwd(inputs, kernel)[0]


def _scan(step: Callable[..., Any], carry: Any, xs: Any, *, reverse: bool = False) -> Any:
    """Scans over time, several steps in each turn of the loop on CUDA."""
    every = functools.partial(jax.lax.scan, step, reverse=reverse)
    unrolled = functools.partial(every, unroll=_UNROLL)
    return jax.lax.platform_dependent(carry, xs, cuda=unrolled, default=every)


def _recurrence_fwd(inputs: Array, kernel: Array) -> tuple[Array, Any]:
    def step(carry: tuple[Array, Array], a: Array) -> tuple[tuple[Array, Array], Any]:
        h, c = carry
        i, f, g, o = jnp.split(a + h @ kernel, 4, axis=-1)
        i, f, g, o = jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)
        c = f * c + i * g
        h = o * jnp.tanh(c)
        return (h, c), (h, c, (i, f, g, o))

    zeros = jnp.zeros((inputs.shape[1], kernel.shape[0]), inputs.dtype)
    _, (h, c, gates) = _scan(step, (zeros, zeros), inputs)
    return h, (kernel, h, c, gates)


def _recurrence_bwd(saved: Any, dh: Array) -> tuple[Array, Array]:
    kernel, h, c, gates = saved
    back = kernel.T  # here, since XLA would transpose it in every step of the loop

    def step(carry: tuple[Array, Array], at: Any) -> tuple[tuple[Array, Array], Array]:
        (dh_next, dc_next), (dh, c, c_before, (i, f, g, o)) = carry, at
        dh, tanh_c = dh + dh_next, jnp.tanh(c)
        dc = dc_next + dh * o * (1 - tanh_c**2)
        da = jnp.concatenate(
            [
                dc * g * i * (1 - i),
                dc * c_before * f * (1 - f),
                dc * i * (1 - g**2),
                dh * tanh_c * o * (1 - o),
            ],
            axis=-1,
        )
        return (da @ back, dc * f), da

    def before(states: Array) -> Array:
        return jnp.concatenate([jnp.zeros_like(states[:1]), states[:-1]])

    zeros = jnp.zeros_like(c[0])
    _, da = _scan(step, (zeros, zeros), (dh, c, before(c), gates), reverse=True)
    units = kernel.shape[0]
    return da, before(h).reshape(-1, units).T @ da.reshape(-1, 4 * units)


recurrence.defvjp(_recurrence_fwd, _recurrence_bwd)


class _Layer(nn.Module):
    units: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """``[T, B, C]`` -> ``[T, B, units]``."""
        inputs = x.shape[-1]

        def forget_gates_open(key: Array) -> Array:
            del key
            return jnp.repeat(jnp.array([0, 1, 0, 0], jnp.float32), self.units)

        # One kernel for inputs and state: its shape determines the scale of the initialisation.
        kernel = self.param("kernel", _glorot, (inputs + self.units, 4 * self.units), jnp.float32)
        bias = self.param("bias", forget_gates_open)
        return recurrence(x @ kernel[:inputs] + bias.reshape(1, 1, -1), kernel[inputs:])


class _LSTM(nn.Module):
    classes: int
    embedding: int
    units: int
    layers: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"x must be integer tokens, got {x.dtype}")
        table = self.param("embedding", _glorot, (self.classes, self.embedding), jnp.float32)
        # A product with one-hot tokens, because the gradient of a gather is a slow scatter.
        x = jax.nn.one_hot(x.T, self.classes, dtype=table.dtype) @ table
        for _ in range(self.layers):
            x = _Layer(self.units)(x)
        return nn.Dense(self.classes, kernel_init=_glorot)(x[-1])


def lstm(
    shape: Sequence[int], classes: int, embedding: int = 8, units: int = 256, layers: int = 2
) -> Model:
    """Predicts the next token after a window: embedding, LSTM layers and a dense layer.

    It has 817,872 parameters for 80 tokens. Kernels and initialisation follow the authors' code:
    Glorot over inputs and state together, forget gates open (bias 1).

    Args:
        shape: ``(T,)``, the window length; the model accepts ``int[B, T]`` with any T.
        classes: M, the size of the vocabulary; tokens are in 0 … M - 1.
        embedding: size of the token embeddings.
        units: H, the units of each layer.
        layers: number of LSTM layers.

    Returns:
        A model with ``f32[B, M]`` logits.

    Raises:
        ValueError: if shape is not ``(T,)``, or a size is below 1.

    Source: Xue, Klabjan, Luo 2021 <https://arxiv.org/abs/2108.07433>, section IV-B; the authors'
    code, <https://github.com/yxsub/RADFed>.

    Example:
        >>> model = lstm((80,), 80)
        >>> tokens = jnp.zeros((3, 80), jnp.uint8)
        >>> def outputs(key):
        ...     return model.apply(model.init(key), tokens, train=False)[0]
        >>> jax.eval_shape(outputs, jax.random.key(0)).shape
        (3, 80)
    """
    if len(shape) != 1:
        raise ValueError(f"shape must be (tokens,), the window length, got {tuple(shape)}")
    sizes = {"embedding": embedding, "units": units, "layers": layers}
    if wrong := {name: n for name, n in sizes.items() if n < 1}:
        raise ValueError(f"embedding, units and layers must be at least 1, got {wrong}")
    return from_linen(_LSTM(classes, embedding, units, layers), shape, jnp.int32)
