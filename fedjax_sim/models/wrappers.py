"""A model around a model: other inputs, another type inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from fedjax_sim.base import Array, Model, PyTree, Variables


def with_scaling(model: Model, mean: ArrayLike, std: ArrayLike) -> Model:
    r"""Scales raw inputs in the step, :math:`(x - \mu) / \sigma`, so that they may stay uint8.

    Args:
        model: takes ``f32[B, *feature]``.
        mean: μ, ``f32[C]``, in units of x, for the last axis.
        std: σ, ``f32[C]``.

    Returns:
        A model that takes ``[B, *feature]`` of any dtype.

    Example:
        >>> import fedjax_sim as fs
        >>> model = fs.models.logistic((4,), 3)
        >>> scaled = with_scaling(model, jnp.full(4, 128.0), jnp.full(4, 64.0))
        >>> x, variables = jnp.full((2, 4), 128, jnp.uint8), model.init(jax.random.key(0))
        >>> outputs, _ = scaled.apply(variables, x, train=False)
        >>> at_zero, _ = model.apply(variables, jnp.zeros((2, 4)), train=False)
        >>> bool((outputs == at_zero).all())
        True
    """

    def scaled(variables: Variables, x: Array) -> Array:
        ones = (1,) * (x.ndim - 1)
        centre, scale = (jnp.asarray(a).reshape(*ones, -1) for a in (mean, std))
        return (x.astype(jnp.float32) - centre) / scale

    return with_inputs(model, scaled)


def with_inputs(model: Model, change: Callable[[Variables, Array], Array]) -> Model:
    """A model that is given ``change(variables, x)`` in place of x."""

    def around(run: Callable[..., Any]) -> Callable[..., Any]:
        def apply(variables: Variables, x: Array, **options: Any) -> tuple[Any, PyTree]:
            return run(variables, change(variables, x), **options)

        return apply

    return _around(model, around)


def _around(model: Model, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Model:
    """The model with its ``apply``, and its ``features`` if it has some, wrapped."""
    features = None if model.features is None else wrap(model.features)
    return model._replace(apply=wrap(model.apply), features=features)


def with_compute_dtype(model: Model, dtype: DTypeLike) -> Model:
    """Computes in another type: weights and inputs are cast in the step, the outputs back.

    The weights, their gradients and updates, BatchNorm's statistics and the loss stay in the type
    of the weights, float32: mixed precision, as an accelerator's matrix units want it.

    Args:
        model: computes in the type of its weights and inputs.
        dtype: of what it computes, ``jnp.bfloat16``.

    Returns:
        The model; its outputs are ``f32``.

    Raises:
        ValueError: at its first use, if the model does not compute in that type.

    Source: Micikevicius et al. 2018 <https://arxiv.org/abs/1710.03740>, without the scaling of the
    loss, which bfloat16 with its wide exponent does not need.

    Example:
        >>> import fedjax_sim as fs
        >>> model = with_compute_dtype(fs.models.logistic((4,), 3), jnp.bfloat16)
        >>> variables = model.init(jax.random.key(0))
        >>> model.apply(variables, jnp.ones((2, 4)), train=False)[0].dtype
        dtype('float32')
    """
    kind = jnp.dtype(dtype)

    def cast(a: Array) -> Array:
        return a.astype(kind) if jnp.issubdtype(a.dtype, jnp.floating) else a

    def widened(outputs: Array) -> Array:
        if outputs.dtype != kind:
            raise ValueError(
                f"model must compute in {kind} if its weights and inputs are, got {outputs.dtype}"
            )
        return outputs.astype(jnp.float32)

    def around(run: Callable[..., Any]) -> Callable[..., Any]:
        def apply(variables: Variables, x: Array, **options: Any) -> tuple[Any, PyTree]:
            inside = variables._replace(params=jax.tree.map(cast, variables.params))
            outputs, state = run(inside, cast(x), **options)
            return jax.tree.map(widened, outputs), state

        return apply

    return _around(model, around)
