"""A model from what a user names: a model, a flax module, or a function that makes one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import flax.linen as nn

from fedjax_sim.base import Model
from fedjax_sim.base.signatures import takes
from fedjax_sim.models.adapters import from_linen

WANTED = (
    "a function (shape, classes) -> Model or flax.linen module, a function (shape, classes, rngs) "
    "or (rngs) -> flax.nnx module, or a Model or a flax.linen module itself"
)


def made() -> tuple[type, ...]:
    """The types that a factory may return."""
    # Importing flax.nnx takes a third of a second: who has a module of it has imported it.
    nnx = sys.modules.get("flax.nnx")
    return (Model, nn.Module) if nnx is None else (Model, nn.Module, nnx.Module)


def is_factory(value: Any) -> bool:
    """Whether :func:`model_of` can make a model of it."""
    if isinstance(value, Model | nn.Module):
        return True
    return takes(value, (1,), 2) or takes(value, (1,), 2, rngs=0) or takes(value, rngs=0)


def model_of(factory: Any, shape: Sequence[int], outputs: int) -> Model:
    """Returns the model that a user's value makes.

    Args:
        factory: as :data:`WANTED` says.
        shape: of one input, without the batch axis.
        outputs: classes, or the numbers that another task predicts.

    Raises:
        ValueError: if it makes something else. A user's function may raise anything.
    """
    if not isinstance(factory, Model | nn.Module):
        names = _parameters(factory)
        if "rngs" in names:
            from fedjax_sim.models._nnx import from_nnx  # flax.nnx takes a third of a second

            sizes = (shape, outputs) if len(names) > 1 else ()
            return from_nnx(lambda rngs: factory(*sizes, rngs=rngs))
        factory = factory(shape, outputs)
    if isinstance(factory, nn.Module):
        return from_linen(factory, shape)
    if not isinstance(factory, Model):
        raise ValueError(
            f"must return a Model or a flax.linen module, got {type(factory).__name__}; a function "
            "that returns a flax.nnx module takes rngs, or returns fs.models.from_nnx(...)"
        )
    return factory


def _parameters(factory: Any) -> list[str]:
    # The class of nnx modules hides their signature.
    function = factory.__init__ if isinstance(factory, type) else factory  # type: ignore[misc]
    try:
        return [name for name in inspect.signature(function).parameters if name != "self"]
    except (TypeError, ValueError):  # of a builtin
        return []
