"""Evaluates parsed calls: looks up names and binds arguments."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import jax

from fedjax_sim.base.calls import Call, Literal, Name, Node, write
from fedjax_sim.base.spelling import hint, plain

T = TypeVar("T")


def arguments(call: Call, takes: Mapping[str, bool]) -> dict[str, Node]:
    """Returns the arguments of a call by name; ``takes`` maps each name to required or not.

    Raises:
        ValueError: if they do not fit; names the argument.

    >>> from fedjax_sim.base import calls
    >>> arguments(calls.parse("emd(7/8, in_turn)"), {"target": True, "in_turn": False})["in_turn"]
    'in_turn'
    """
    either, needed = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    order = sorted(takes, key=lambda name: not takes[name])  # those with a default last
    parameters = [
        inspect.Parameter(name, either, default=needed if takes[name] else None) for name in order
    ]
    return dict(bind(call, inspect.Signature(parameters)).arguments)


def build(node: Node, find: Callable[[str], Any]) -> Any:
    """Returns the value of a tree: literals, the names that ``find`` knows, and results of calls.

    Raises:
        ValueError: if a name is unknown or an argument does not fit.

    >>> from fedjax_sim.base import calls
    >>> build(calls.parse("max(1, -2, 7/2)"), {"max": lambda *values: max(values)}.__getitem__)
    3.5
    """
    if isinstance(node, Literal):
        return node.value
    if isinstance(node, tuple | list):
        return type(node)(build(item, find) for item in node)
    if not isinstance(node, Call):
        return find(node)
    function = find(node.name)
    bound = bind(node, inspect.signature(function))
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            bound.arguments[name] = {key: build(item, find) for key, item in value.items()}
        elif kind is inspect.Parameter.VAR_POSITIONAL:
            bound.arguments[name] = tuple(argument(function, name, item, find) for item in value)
        else:
            bound.arguments[name] = argument(function, name, value, find)
    return function(*bound.args, **bound.kwargs)


def finder(kind: str, known: Mapping[str, T]) -> Callable[[str], T]:
    """Returns what looks up a name, in any case and with dashes or underscores.

    >>> finder("rule", {"trimmed_mean": 1})("Trimmed-Mean")
    1
    """
    by_plain = {plain(name): value for name, value in known.items()}

    def find(name: str) -> T:
        if plain(name) not in by_plain:
            raise ValueError(f"{name!r} is not a known {kind}{hint(name, known)}")
        return by_plain[plain(name)]

    return find


def bind(call: Call, takes: inspect.Signature) -> inspect.BoundArguments:
    """Returns the arguments of a call as a signature takes them.

    Raises:
        ValueError: if they do not fit; names the argument.
    """
    known = takes.parameters
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        for name in call.named:
            if name not in known:
                meant = hint(name, known) or f"; its arguments are {', '.join(known)}" * bool(known)
                raise ValueError(f"{name} is not an argument of {call.name}{meant}")
    try:
        return takes.bind(*call.args, **call.named)
    except TypeError as error:
        words = (str(p.replace(annotation=p.empty)) for p in known.values())
        form = f"{call.name}({', '.join(words)})"
        raise ValueError(f"{call} must be written {form}: {error}") from error


def argument(
    function: Callable[..., Any], name: str, node: Node, find: Callable[[str], Any]
) -> Any:
    """Returns the value of an argument; a text or a choice of its type needs no quotes.

    Raises:
        ValueError: if the parameter takes only numbers, texts or choices, and the value is another.
    """
    try:
        hinted = typing.get_type_hints(function).get(name)
    except (NameError, TypeError, AttributeError):  # imported for checkers only
        hinted = None
    members = typing.get_args(hinted) if typing.get_origin(hinted) in _UNIONS else (hinted,)
    choices = [c for m in members if typing.get_origin(m) is typing.Literal for c in m.__args__]
    if isinstance(node, Name) and node in choices:
        return str(node)
    scalars = [m for m in members if m in _SCALARS]
    known = all(
        m in (*_SCALARS, jax.Array) or typing.get_origin(m) is typing.Literal for m in members
    )
    if not known or isinstance(node, Call):
        return build(node, find)
    value: Any = node
    if not isinstance(node, Name):
        value = build(node, find)
    elif str in scalars:
        value = str(node)
    else:
        with suppress(ValueError):
            value = find(node)  # a number that has a name, such as the classes of the run
    fits = type(value) in scalars or (type(value) is int and float in scalars)
    if not fits and value not in choices:
        wanted = [*map(str, choices), *(_SCALARS[m] for m in scalars)]
        raise ValueError(f"{name} must be {' or '.join(wanted)}, got {write(node)}")
    return value


_SCALARS = {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}
_SCALARS |= {type(None): "None"}
_UNIONS = (typing.Union, types.UnionType)
