"""The parameters of a function, read from its signature."""

from __future__ import annotations

import builtins
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Container
from typing import Any


def keywords(
    function: Callable[..., Any], without: Container[str] = ()
) -> dict[str, inspect.Parameter]:
    """The keyword-only parameters of a function, their annotations as types.

    A parameter whose annotation is missing, or cannot be read where the function was defined, has
    the type of its default.

    >>> from fedjax_sim.algorithms import fedavg
    >>> list(keywords(fedavg, without=("clients_per_round", "execution")).values())
    [<Parameter "equal_weights: bool = False">]
    """
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # imported for checkers only; no plain function
        hints = {}
    return {
        p.name: p.replace(annotation=hints.get(p.name, type(p.default)))
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.name not in without
    }


def takes(function: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether a function accepts these arguments; keyword-only ones may be missing.

    >>> takes(lambda x, *, y: x, 1), takes(lambda x, y: x, 1), takes(3)
    (True, False, False)
    """
    if not callable(function):
        return False
    try:
        signature = inspect.signature(function)
        missing = {
            p.name: None
            for p in signature.parameters.values()
            if p.kind is p.KEYWORD_ONLY and p.name not in kwargs
        }
        signature.bind(*args, **(missing | kwargs))
    except (TypeError, ValueError):  # the second one for builtins without a signature
        return False
    return True


def returned(function: Any) -> Any:
    """Returns the return type that a function declares; None if it has none that can be read.

    >>> def three() -> int: ...
    >>> returned(three), returned(functools.partial(three)), returned(print)
    (<class 'int'>, <class 'int'>, None)
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__annotations__"):  # a value of a class that can be called
        function = getattr(type(function), "__call__", None)  # noqa: B004
    names = vars(sys.modules.get(getattr(function, "__module__", None) or "", builtins))
    try:
        # Of all annotations this one alone: others may be of what only checkers import.
        made = function.__annotations__["return"]
        alone = types.SimpleNamespace(__annotations__={"return": made})
        return typing.get_type_hints(alone, names)["return"]
    except (AttributeError, KeyError, NameError, SyntaxError, TypeError):
        return None
