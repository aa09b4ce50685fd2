"""From a user's network to a :class:`fedjax_sim.Model`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from fedjax_sim.base import Array, Model, PyTree, Variables


def from_linen(module: nn.Module, shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> Model:
    """A flax.linen module as a model.

    Args:
        module: its ``__call__(x)`` may also take ``train: bool`` and ``mask: bool[B]`` (real rows)
            by name; what it does not take is not passed. Collections other than ``params`` are
            state.
        shape: of one input, without the batch axis.
        dtype: of the input; tokens are integers.

    Returns:
        A model; dropout draws from the stream "dropout".

    Example:
        >>> model = from_linen(nn.Dense(3), (4,))
        >>> logits, _ = model.apply(model.init(jax.random.key(0)), jnp.ones((2, 4)), train=False)
        >>> logits.shape
        (2, 3)
    """
    takes = set(inspect.signature(module.__call__).parameters)

    def options(train: bool, mask: Array | None) -> dict[str, Any]:
        return {k: v for k, v in {"train": train, "mask": mask}.items() if k in takes}

    def init(key: Array) -> Variables:
        x = jnp.zeros((1, *shape), dtype)
        tree = dict(module.init(key, x, **options(False, None)))
        return Variables(tree.pop("params", {}), tree)

    def apply(
        variables: Variables,
        x: Array,
        *,
        train: bool,
        mask: Array | None = None,
        key: Array | None = None,
    ) -> tuple[Array, PyTree]:
        tree = {"params": variables.params, **variables.state}
        rngs = None if key is None else {"dropout": key}
        mutable = list(variables.state) if train else False
        out: Any = module.apply(tree, x, **options(train, mask), rngs=rngs, mutable=mutable)
        return out if mutable is not False else (out, variables.state)

    return Model(init, apply)


def from_nnx(build: Callable[[nnx.Rngs], nnx.Module]) -> Model:
    """A flax.nnx module as a model.

    Args:
        build: makes the module from its ``nnx.Rngs``. Its ``__call__(x)`` may also take ``mask`` by
            name; ``module.train()`` and ``module.eval()`` set the mode.

    Returns:
        A model; ``nnx.Param`` leaves are trained, all others (but random streams) are state.

    Example:
        >>> model = from_nnx(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
        >>> logits, _ = model.apply(model.init(jax.random.key(0)), jnp.ones((2, 4)), train=False)
        >>> logits.shape
        (2, 3)
    """
    # The structure does not depend on the key. Random streams are rebuilt from each step's key:
    # kept in the state, they would be averaged over clients.
    abstract = nnx.eval_shape(lambda: build(nnx.Rngs(params=0, dropout=0)))
    graph, params_like, streams_like, state_like = _parts(abstract)
    takes_mask = "mask" in inspect.signature(abstract.__call__).parameters

    def init(key: Array) -> Variables:
        module = build(nnx.Rngs(params=key, dropout=key))
        _, params, _, state = _parts(module)
        return Variables(nnx.to_pure_dict(params), nnx.to_pure_dict(state))

    def streams(key: Array) -> Any:
        leaves, treedef = jax.tree.flatten(streams_like)
        fresh = [
            jax.random.fold_in(key, i)
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            else jnp.zeros(leaf.shape, leaf.dtype)
            for i, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(treedef, fresh)

    def filled(like: Any, values: PyTree) -> Any:
        return jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(values))

    def apply(
        variables: Variables,
        x: Array,
        *,
        train: bool,
        mask: Array | None = None,
        key: Array | None = None,
    ) -> tuple[Array, PyTree]:
        module = nnx.merge(
            graph,
            filled(params_like, variables.params),
            streams(jax.random.key(0) if key is None else key),
            filled(state_like, variables.state),
        )
        (module.train if train else module.eval)()
        logits = module(x, mask=mask) if takes_mask else module(x)
        _, _, _, state = _parts(module)
        return logits, nnx.to_pure_dict(state)

    return Model(init, apply)


def _parts(module: nnx.Module) -> tuple[Any, Any, Any, Any]:
    """(graph, params, random streams, other state)."""
    parts: Any = nnx.split(module, nnx.Param, nnx.RngState, ...)
    return parts[0], parts[1], parts[2], parts[3]


def with_scaling(model: Model, mean: ArrayLike, std: ArrayLike) -> Model:
    r"""Scales raw inputs in the step, :math:`(x - \mu) / \sigma`, so that they may stay uint8.

    Args:
        model: takes ``f32[B, *feature]``.
        mean: μ, ``f32[C]``, in units of x, for the last axis.
        std: σ, ``f32[C]``.

    Returns:
        A model that takes ``[B, *feature]`` of any dtype.

    Example:
        >>> model = from_linen(nn.Dense(3), (4,))
        >>> scaled = with_scaling(model, jnp.full(4, 128.0), jnp.full(4, 64.0))
        >>> x = jnp.full((2, 4), 128, jnp.uint8)
        >>> scaled.apply(scaled.init(jax.random.key(0)), x, train=False)[0].tolist()
        [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    """

    def apply(
        variables: Variables,
        x: Array,
        *,
        train: bool,
        mask: Array | None = None,
        key: Array | None = None,
    ) -> tuple[Array, PyTree]:
        ones = (1,) * (x.ndim - 1)
        centre, scale = (jnp.asarray(a).reshape(*ones, -1) for a in (mean, std))
        x = (x.astype(jnp.float32) - centre) / scale
        return model.apply(variables, x, train=train, mask=mask, key=key)

    return Model(model.init, apply)
