"""Adapters that make a :class:`fedjax_sim.Model` of a flax.linen module."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from fedjax_sim.base import Array, Model, PyTree, Variables
from fedjax_sim.engine.streams import Step, stream
from fedjax_sim.models.layers import BatchNorm

TRAINING = ("train", "training", "is_training", "is_train")
"""Names of a mode argument that is True in training."""

EVALUATING = ("deterministic", "eval", "is_eval", "inference", "testing", "use_running_average")
"""Names of a mode argument that is True in evaluation."""


def from_linen(
    module: nn.Module, shape: Sequence[int] | PyTree, dtype: DTypeLike = jnp.float32
) -> Model:
    """Adapts a flax.linen module.

    Args:
        module: the module; its collections other than ``params`` are state. Its ``__call__(x)`` may
            also take the mode by name, as ``train: bool`` or another usual name (``training``,
            ``is_training``; or ``deterministic``, which is True in evaluation), and
            ``mask: bool[B]``, True for the real rows of a padded minibatch. Every ``nn.BatchNorm``
            inside it receives that mask, whether or not the module takes it.
        shape: shape of one input, without the batch axis; if inputs are pytrees, one sample with
            its dtypes, such as ``jax.tree.map(lambda a: a[0], x)``.
        dtype: dtype of the input; an integer type for tokens.

    Returns:
        A model. Every random stream that the module uses has a key: the step's in training, a fixed
        one in evaluation. Its head is the dense layer that is called last; its features are the
        inputs of the head.

    Raises:
        ValueError: if module is not a flax.linen module, takes the mode by two names, or by none
            although it has dropout or BatchNorm; at the first step, if padding would enter its
            state: a BatchNorm does not see the rows on its first axis, or the module changes state
            of its own without taking ``mask``.

    Example:
        >>> model = from_linen(nn.Dense(3), (4,))
        >>> logits, _ = model.apply(model.init(jax.random.key(0)), jnp.ones((2, 4)), train=False)
        >>> logits.shape
        (2, 3)
    """
    if not isinstance(module, nn.Module):
        raise ValueError(f"module must be a flax.linen module, such as Net(), got {module!r}")
    if isinstance(shape, int):
        raise ValueError(f"shape must be that of one input, such as ({shape},), got {shape}")
    name, takes = type(module).__name__, inspect.signature(module.__call__).parameters
    mode = mode_of(name, takes)
    is_sample = any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(shape))
    like = shape if is_sample else jax.ShapeDtypeStruct(tuple(shape), dtype)
    first = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct((1, *a.shape), jax.dtypes.canonicalize_dtype(a.dtype)), like
    )
    if not mode(True):
        _check_modeless(module, first)

    def options(train: bool, mask: Array | None) -> dict[str, Any]:
        return mode(train) | ({"mask": mask} if "mask" in takes else {})

    def init(key: Array) -> Variables:
        x = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), first)
        tree = dict(module.init(key, x, **options(False, None)))
        return Variables(tree.pop("params", {}), tree)

    def apply(
        variables: Variables,
        x: PyTree,
        *,
        train: bool,
        mask: Array | None = None,
        key: Array | None = None,
    ) -> tuple[Array, PyTree]:
        tree = {"params": variables.params, **variables.state}
        # flax draws from "params" for every missing stream.
        if not train:
            fixed = {"params": jax.random.key(0)}
            out: Any = module.apply(tree, x, **options(train, mask), rngs=fixed)
            return out, variables.state
        rngs = None if key is None else {"dropout": key, "params": stream(key, Step.LAYER)}
        norms: set[tuple[Any, ...]] = set()
        with nn.intercept_methods(functools.partial(_pass_mask, mask, norms)):
            out, state = module.apply(
                tree, x, **options(train, mask), rngs=rngs, mutable=list(variables.state)
            )
        if mask is not None and "mask" not in takes:
            for collection, new in state.items():
                check_changes(name, variables.state[collection], new, norms)
        return out, state

    def features(
        variables: Variables, x: PyTree, **options: Any
    ) -> tuple[tuple[Array, Array], PyTree]:
        (outputs, state), (_, inputs) = _last_dense(name, lambda: apply(variables, x, **options))
        return (outputs, inputs), state

    def head(variables: Variables) -> Variables:
        # A new function, so that it is traced.
        _, (last, _) = _last_dense(name, lambda: jax.eval_shape(lambda: init(jax.random.key(0))))

        def inside(path: Any, leaf: Any) -> bool:
            del leaf
            return tuple(jax.tree_util.keystr((k,), simple=True) for k in path[: len(last)]) == last

        chosen = jax.tree_util.tree_map_with_path(inside, variables.params)
        return Variables(chosen, jax.tree.map(lambda leaf: False, variables.state))

    return Model(init, apply, features, head)


def _last_dense(name: str, run: Callable[[], Any]) -> tuple[Any, tuple[tuple[str, ...], Array]]:
    """Runs a module; also returns the path and inputs of the dense layer that is called last."""
    seen: list[tuple[tuple[str, ...], Array]] = []

    def record(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        if isinstance(context.module, nn.Dense) and context.method_name == "__call__":
            seen.append((context.module.path, args[0] if args else kwargs["inputs"]))
        return call(*args, **kwargs)

    with nn.intercept_methods(record):
        out = run()
    if not seen:
        raise ValueError(f"the head must be a dense layer; {name} has none")
    return out, seen[-1]


def mode_of(name: str, takes: Collection[str]) -> Callable[[bool], dict[str, bool]]:
    """Returns ``train -> {argument: value}`` for the mode argument of a module, if any."""
    found = [argument for argument in (*TRAINING, *EVALUATING) if argument in takes]
    if len(found) > 1:
        raise ValueError(
            f"module must take the mode by one name; {name}.__call__ has {' and '.join(found)}"
        )
    return lambda train: {a: train if a in TRAINING else not train for a in found}


def _check_modeless(module: nn.Module, x: PyTree) -> None:
    """Raises ValueError if a module takes no mode but one of its layers has one."""

    def check(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        layer = context.module
        drops = getattr(layer, "rate", 0) or getattr(layer, "dropout_rate", 0)
        if isinstance(layer, nn.BatchNorm | BatchNorm) or (
            hasattr(layer, "deterministic") and drops
        ):
            raise ValueError(
                f"module must take train: bool by name, since it has {type(layer).__name__}, got "
                f"{type(module).__name__}.__call__{inspect.signature(module.__call__)}"
            )
        return call(*args, **kwargs)

    with nn.intercept_methods(check):
        jax.eval_shape(module.init, jax.eval_shape(lambda: jax.random.key(0)), x)


def _pass_mask(
    mask: Array | None,
    norms: set[tuple[Any, ...]],
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context: Any,
) -> Any:
    """Passes the mask to every BatchNorm and records their paths, as a flax interceptor."""
    layer = context.module
    if context.method_name == "__call__":
        if isinstance(layer, nn.BatchNorm | BatchNorm | nn.SpectralNorm):
            norms.add(layer.path)
        if isinstance(layer, nn.BatchNorm | BatchNorm):
            rows = mask if kwargs.get("mask") is None else kwargs["mask"]
            if rows is not None and isinstance(layer, nn.BatchNorm):
                rows = broadcast_mask(rows, args[0] if args else kwargs["x"])
            kwargs = {**kwargs, "mask": rows}
    return call(*args, **kwargs)


def broadcast_mask(mask: Array, x: Array) -> Array:
    """Reshapes a mask ``[B]`` to broadcast against ``x [B, ...]``; keeps masks of other shapes."""
    if mask.ndim != 1:
        return mask
    if len(mask) != len(x):
        raise ValueError(
            f"BatchNorm must see the {len(mask)} rows of the minibatch on its first axis, or "
            f"receive its own mask, got an input of shape {x.shape}"
        )
    return mask.reshape(-1, *(1,) * (x.ndim - 1))


def check_changes(name: str, old: PyTree, new: PyTree, norms: Collection[tuple[Any, ...]]) -> None:
    """Raises ValueError if training changed state outside the norms, which leave out padding."""
    before = dict(jax.tree_util.tree_leaves_with_path(old))
    for path, leaf in jax.tree_util.tree_leaves_with_path(new):
        names = [jax.tree_util.keystr((entry,), simple=True) for entry in path]
        in_norm = any(names[: len(norm)] == [str(key) for key in norm] for norm in norms)
        if leaf is not before.get(path) and not in_norm:
            raise ValueError(
                f"module must take mask: bool[B] by name, so that padding does not enter its state "
                f"{'/'.join(names)}, but {name}.__call__ takes none"
            )
