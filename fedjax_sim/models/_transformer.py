"""A transformer for text that predicts the next token at every position of a window."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Model
from fedjax_sim.models.adapters import from_linen

_DEVIATION = 0.02
_normal = nn.initializers.normal(_DEVIATION)
_HALVES = ("attention", "mlp")


def causal_attention(query: Array, key: Array, value: Array) -> Array:
    r"""Computes causal attention of q, k and v ``[B, T, H, C]``: positions attend to earlier ones.

    .. math:: o_t = \sum_{s \le t} \frac{\exp(q_t \cdot k_s / \sqrt{C})}
                    {\sum_{r \le t} \exp(q_t \cdot k_r / \sqrt{C})} v_s

    Weights are computed in float32 or wider; ``jax.nn.dot_product_attention`` would round float64
    weights to float32.

    Source: Vaswani et al. 2017 <https://arxiv.org/abs/1706.03762>, section 3.2.

    Example:
        >>> value = jnp.array([1.0, 3.0]).reshape(1, 2, 1, 1)
        >>> causal_attention(jnp.zeros_like(value), value, value).ravel().tolist()
        [1.0, 2.0]
    """
    length, channels = query.shape[1], query.shape[-1]
    # Heads lead, as in a batched product: XLA transposes once instead of before each product.
    query, key, value = (jnp.swapaxes(a, 1, 2) for a in (query, key, value))
    scores = jnp.einsum("bhtc,bhsc->bhts", query, key)
    scores = _wide(scores) / math.sqrt(channels)
    seen = jnp.tril(jnp.ones((1, 1, length, length), bool))
    weights = _softmax(jnp.where(seen, scores, -jnp.inf))
    out = jnp.einsum("bhts,bhsc->bhtc", weights.astype(value.dtype), value)
    return jnp.swapaxes(out, 1, 2)


@jax.custom_jvp
def _softmax(scores: Array) -> Array:
    """Computes the softmax; its backward pass reads the result alone, so scores are not stored."""
    return jax.nn.softmax(scores, axis=-1)


@_softmax.defjvp
def _(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    weights, change = _softmax(*primals), tangents[0]
    return weights, weights * (change - jnp.sum(weights * change, axis=-1, keepdims=True))


@jax.custom_jvp
def _rows(table: Array, index: Array) -> Array:
    """Returns rows of a table; the gradient is a product with one-hot rows: scatters are slow."""
    return jnp.asarray(table).at[index].get(mode="fill", fill_value=0, wrap_negative_indices=False)


@_rows.defjvp
def _(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (table, index), (change, _) = primals, tangents
    return _rows(table, index), jax.nn.one_hot(index, len(table), dtype=table.dtype) @ change


def _wide(x: Array) -> Array:
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


class LayerNorm(nn.Module):
    """Layer normalisation with statistics in float32 or wider.

    Flax's LayerNorm rejects bfloat16 under JAX's strict dtype promotion.
    """

    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """``[N, D]`` -> ``[N, D]``."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        centred = _wide(x) - jnp.mean(_wide(x), axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + 1e-5)
        y = y.astype(x.dtype) * jnp.expand_dims(scale, 0)
        if not self.use_bias:
            return y
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],), jnp.float32)
        return y + jnp.expand_dims(bias, 0)


class _Block(nn.Module):
    heads: int
    bias: bool
    last: Any  # initialiser of the layers whose outputs are added to the stream

    @nn.compact
    def __call__(self, x: Array, steps: int, halves: Sequence[str] = _HALVES) -> Array:
        """``[B T, D]`` -> ``[B T, D]`` for windows of ``steps`` tokens, T."""
        width = x.shape[-1]
        dense = functools.partial(nn.Dense, use_bias=self.bias, kernel_init=_normal)
        norm = functools.partial(LayerNorm, use_bias=self.bias)
        if "attention" in halves:
            # One product: its backward pass is one product too.
            y = dense(3 * width, name="qkv")(norm(name="LayerNorm_0")(x))
            y = y.reshape(-1, steps, 3 * self.heads, width // self.heads)
            y = causal_attention(*jnp.split(y, 3, axis=2)).reshape(x.shape)
            x = x + dense(width, kernel_init=self.last, name="out")(y)
        if "mlp" in halves:
            y = dense(4 * width, name="up")(norm(name="LayerNorm_1")(x))
            x = x + dense(width, kernel_init=self.last, name="down")(jax.nn.gelu(y))
        return x


class _Transformer(nn.Module):
    length: int
    classes: int
    width: int
    layers: int
    heads: int
    remat: bool
    bias: bool

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise TypeError(f"x must be integer tokens, got {x.dtype}")
        steps = x.shape[1]
        if steps > self.length:
            raise ValueError(f"x must have at most {self.length} tokens, got {steps}")
        tokens = self.param("tokens", _normal, (self.classes, self.width), jnp.float32)
        places = self.param("places", _normal, (self.length, self.width), jnp.float32)
        y = _rows(tokens, x) + jnp.expand_dims(places[:steps], 0)
        # Rows of one matrix: with two axes of positions, XLA transposes before every product of the
        # backward pass.
        y = y.reshape(-1, self.width)
        last = nn.initializers.normal(_DEVIATION / math.sqrt(2 * self.layers))
        for i in range(self.layers):
            block = _Block(self.heads, self.bias, last, name=f"layer_{i}")
            if self.remat and not self.is_initializing():
                # Flax's remat copies the weights, and LoRA knows a kernel by its identity.
                run = functools.partial(block.clone(parent=None, name=None).apply, block.variables)
                for half in _HALVES:
                    y = jax.checkpoint(functools.partial(run, steps=steps, halves=(half,)))(y)
            else:
                y = block(y, steps)
        y = LayerNorm(self.bias)(y)
        logits = nn.Dense(self.classes, use_bias=False, kernel_init=_normal, name="next")(y)
        return logits.reshape(*x.shape, self.classes)


def transformer(
    shape: Sequence[int],
    classes: int,
    width: int = 128,
    layers: int = 4,
    heads: int = 4,
    remat: bool = False,
    bias: bool = False,
) -> Model:
    r"""Predicts the next token at every position of a window: a small GPT-2 decoder.

    Each layer computes, with the layer norm LN,

    .. math::
        x &\leftarrow x + W_o \, \mathrm{attention}(W_q y, W_k y, W_v y), \qquad
            y = \mathrm{LN}(x) \\
        x &\leftarrow x + W_{down} \, \mathrm{GELU}(W_{up} \mathrm{LN}(x))

    and the logits are :math:`W_{next} \mathrm{LN}(x)`. Attention is causal: the logits at a
    position depend only on its token and earlier tokens. W_q, W_k and W_v are the columns of one
    matrix, ``qkv``, as in GPT-2. Positional embeddings are learned. Initial weights are normal with
    standard deviation 0.02, divided by √(2 layers) for W_o and W_down, as in nanoGPT.

    W_next, the head of the model, is a separate layer. If it were tied to the token embeddings, as
    in GPT-2, clients could not keep it while sending the embeddings.

    It has 814,208 parameters for windows of 80 tokens and 64 characters, about as many as
    :func:`fedjax_sim.models.lstm`.

    Args:
        shape: ``(T,)``, the window length; the model accepts ``int[B, t]`` with t ≤ T.
        classes: M, the size of the vocabulary; tokens are in 0 … M - 1.
        width: D, the width of the residual stream x.
        layers: number of layers.
        heads: number of attention heads, each with D / heads channels.
        remat: whether the backward pass computes each layer again from x, so that a step stores
            the activations of one layer instead of all.
        bias: whether the layers and norms have biases, as in GPT-2; W_next has none.

    Returns:
        A model with ``f32[B, t, M]`` logits.

    Raises:
        ValueError: if shape is not ``(T,)``, a size is below 1, or heads does not divide width.

    Source: Vaswani et al. 2017 <https://arxiv.org/abs/1706.03762>; Radford et al. 2019
    <radford2019language>, section 2.3; Karpathy <https://github.com/karpathy/nanoGPT>.

    Example:
        >>> model = transformer((80,), 64)
        >>> tokens = jnp.zeros((3, 80), jnp.uint8)
        >>> def outputs(key):
        ...     return model.apply(model.init(key), tokens, train=False)[0]
        >>> jax.eval_shape(outputs, jax.random.key(0)).shape
        (3, 80, 64)
    """
    if len(shape) != 1:
        raise ValueError(f"shape must be (tokens,), the window length, got {tuple(shape)}")
    sizes = {"tokens": shape[0], "width": width, "layers": layers}
    if wrong := {name: n for name, n in sizes.items() if n < 1}:
        raise ValueError(f"tokens, width and layers must be at least 1, got {wrong}")
    if heads < 1 or width % heads:
        raise ValueError(f"heads must divide the width {width}, got {heads}")
    module = _Transformer(shape[0], classes, width, layers, heads, remat, bias)
    return from_linen(module, shape, jnp.int32)
