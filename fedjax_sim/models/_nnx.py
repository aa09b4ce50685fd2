"""An adapter that makes a :class:`fedjax_sim.Model` of a flax.nnx module."""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fedjax_sim.base import Array, Model, PyTree, Variables
from fedjax_sim.models.adapters import broadcast_mask, check_changes, mode_of


def from_nnx(build: Callable[[nnx.Rngs], nnx.Module]) -> Model:
    """Adapts a flax.nnx module.

    Args:
        build: a function that makes the module from its ``nnx.Rngs``. ``module.train()`` and
            ``module.eval()`` set the mode; its ``__call__(x)`` may also take the mode and ``mask``
            by name, see :func:`from_linen`. Every ``nnx.BatchNorm`` inside it receives the mask.

    Returns:
        A model; ``nnx.Param`` leaves are trained, all others (except random streams) are state.
        ``model._replace(head=fs.leaves.named("head"), features=...)`` adds what FedPer and MOON
        need; the features may be those of ``from_nnx(Body)`` at the weights ``params["body"]``.

    Raises:
        ValueError: if build is not a function, or the module takes the mode by two names; at the
            first step, if padding would enter its state, see :func:`from_linen`.

    Example:
        >>> model = from_nnx(lambda rngs: nnx.Linear(4, 3, rngs=rngs))
        >>> logits, _ = model.apply(model.init(jax.random.key(0)), jnp.ones((2, 4)), train=False)
        >>> logits.shape
        (2, 3)
    """
    if isinstance(build, nnx.Module) or not callable(build):
        raise ValueError(
            "build must be a function of nnx.Rngs, such as lambda rngs: Net(rngs), got "
            f"{type(build).__name__}"
        )
    # The structure does not depend on the key. Random streams are rebuilt from each step's key;
    # as part of the state, they would be averaged over clients.
    abstract = nnx.eval_shape(lambda: build(_rngs(jax.random.key(0))))
    norms = set()
    for path, layer in nnx.iter_graph(abstract):
        if isinstance(layer, _NORMS):
            norms.add(path)
        if isinstance(layer, nnx.BatchNorm):
            layer.__class__ = _masked(type(layer))
    graph, params_like, streams_like, state_like = _parts(abstract)
    name, takes = type(abstract).__name__, inspect.signature(abstract.__call__).parameters
    mode = mode_of(name, takes)

    def init(key: Array) -> Variables:
        module = build(_rngs(key))
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
        x: PyTree,
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
        before = _MASK.set(mask)
        try:
            logits = module(x, **mode(train), **({"mask": mask} if "mask" in takes else {}))
        finally:
            _MASK.reset(before)
        state = nnx.to_pure_dict(_parts(module)[3])
        if train and mask is not None and "mask" not in takes:
            check_changes(name, variables.state, state, norms)
        return logits, state

    return Model(init, apply)


_NORMS = tuple(
    getattr(nnx, name)
    for name in ("BatchNorm", "SpectralNorm")
    if hasattr(nnx, name)  # since flax 0.12.1
)
"""Norms of nnx whose state leaves out padding."""

_MASK: contextvars.ContextVar[Array | None] = contextvars.ContextVar("mask", default=None)
"""Mask of the minibatch that an nnx module is called on."""


@functools.cache
def _masked(kind: type[nnx.BatchNorm]) -> type[nnx.BatchNorm]:
    """Returns a subclass of a BatchNorm that uses ``_MASK``; nnx has no interceptors."""

    def call(self: nnx.BatchNorm, x: Array, *args: Any, **kwargs: Any) -> Any:
        rows = _MASK.get() if kwargs.get("mask") is None else kwargs["mask"]
        if rows is not None:
            kwargs["mask"] = broadcast_mask(rows, x)
        return kind.__call__(self, x, *args, **kwargs)

    return type(kind.__name__, (kind,), {"__call__": call})


def _rngs(key: Array) -> nnx.Rngs:
    """Returns random streams for a module; streams of other names use the default one."""
    return nnx.Rngs(key, params=key, dropout=key)


def _parts(module: nnx.Module) -> tuple[Any, Any, Any, Any]:
    """Returns the graph, the parameters, the random streams and the other state."""
    parts: Any = nnx.split(module, nnx.Param, nnx.RngState, ...)
    return parts[0], parts[1], parts[2], parts[3]
