"""Models from a user's value: a model, a flax module, or a function that returns one."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Sequence
from typing import Any

import flax.linen as nn

from fedjax_sim.base import Model
from fedjax_sim.base.binding import argument, bind
from fedjax_sim.base.calls import Call
from fedjax_sim.base.signatures import takes
from fedjax_sim.models.adapters import from_linen

WANTED = (
    "a function (shape, classes) -> Model or flax.linen module, a function (shape, classes, rngs) "
    "or (rngs) -> flax.nnx module, or a Model or a flax.linen module itself"
)


def made() -> tuple[type, ...]:
    """Returns the types that a factory may return."""
    # Importing flax.nnx takes a third of a second; a user with an nnx module has imported it.
    nnx = sys.modules.get("flax.nnx")
    return (Model, nn.Module) if nnx is None else (Model, nn.Module, nnx.Module)


def is_factory(value: Any) -> bool:
    """Returns whether :func:`model_of` accepts a value."""
    if isinstance(value, Model | nn.Module):
        return True
    return takes(value, (1,), 2) or takes(value, (1,), 2, rngs=0) or takes(value, rngs=0)


def with_settings(factory: Any, call: Call) -> Any:
    """Returns a factory with the settings of a call, such as ``transformer(width=64)``.

    Raises:
        ValueError: if the factory does not take them, or takes them with other values.

    Example:
        >>> from fedjax_sim.base import calls
        >>> def small(shape, classes, width=8): return width
        >>> with_settings(small, calls.parse("small(width=3)"))((4,), 2)
        3
    """
    if not call.args and not call.named:
        return factory
    if isinstance(factory, Model | nn.Module):
        raise ValueError(f"{call.name} is a model, which takes no settings, got {call}")
    known = [p for p in _signature(factory)[2:] if p.name != "rngs"]  # after shape and classes
    named = inspect.Signature([p.replace(kind=p.KEYWORD_ONLY) for p in known])

    def find(name: str) -> Any:
        raise ValueError(f"{name} is not a number, True, False or None; write a text in quotes")

    given = bind(call, named).arguments
    return functools.partial(
        factory, **{name: argument(factory, name, node, find) for name, node in given.items()}
    )


def model_of(factory: Any, shape: Sequence[int], outputs: int) -> Model:
    """Returns the model of a user's value, see :data:`WANTED`, for inputs ``[*shape]``.

    Raises:
        ValueError: if factory returns something else. A user's function may raise any exception.
    """
    if not isinstance(factory, Model | nn.Module):
        names = [parameter.name for parameter in _signature(factory)]
        if "rngs" in names:
            from fedjax_sim.models._nnx import (
                from_nnx,
            )  # importing flax.nnx takes a third of a second

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


def _signature(factory: Any) -> list[inspect.Parameter]:
    # The metaclass of nnx modules hides their signature.
    function = factory.__init__ if isinstance(factory, type) else factory  # type: ignore[misc]
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return []
    return [parameter for parameter in found if parameter.name != "self"]
