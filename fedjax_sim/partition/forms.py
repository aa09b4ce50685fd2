"""Text forms of samplers, such as ``ll(2, 7/8)``."""

import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from fedjax_sim.base import binding, calls
from fedjax_sim.base.signatures import keywords
from fedjax_sim.partition.table import Partition

DATA = ("seed", "groups", "features")
"""Keyword arguments that a sampler receives from the run and the data, not from the user."""


def read_switch(name: str) -> Callable[[str], bool]:
    """Returns a reader of a switch, which its name turns on.

    >>> read_switch("balanced")("balanced")
    True
    """

    def read(word: str) -> bool:
        if word not in (name, "True"):
            raise ValueError
        return True

    return read


class Form(NamedTuple):
    """Text form of a sampler.

    Attributes:
        text: the form, with optional arguments in brackets.
        sampler: ``(labels, clients, *, seed, **arguments, **inputs) -> Partition``; the flags come
            from the signature and docstring of the function that it wraps.
        arguments: reader of each argument by name, in the order of the text.
        required: number of required arguments.
        expected: ``(classes, clients, **arguments)`` -> EMD on balanced labels, or None if unknown.
        inputs: which of "groups" and "features" the sampler takes.
    """

    text: str
    sampler: Callable[..., Partition]
    arguments: Mapping[str, Callable[[str], Any]]
    required: int
    expected: Callable[..., float | None] | None = None
    inputs: tuple[str, ...] = ()


def form_from_signature(name: str, sampler: Callable[..., Partition]) -> Form:
    """Makes a form from a sampler's keyword parameters, required ones first.

    >>> def shards(labels, clients, *, seed, each: int, mixed: bool = False): ...
    >>> form = form_from_signature("mine:shards", shards)
    >>> form.text, form.required
    ('mine:shards(each, mixed=False)', 1)
    """
    own = keywords(sampler, DATA)
    needed = [key for key, p in own.items() if p.default is p.empty]
    order = [*needed, *(key for key in own if key not in needed)]
    words = [*needed, *(f"{key}={own[key].default}" for key in order[len(needed) :])]
    return Form(
        f"{name}({', '.join(words)})" if words else name,
        sampler,
        {key: reader(own[key].annotation) for key in order},
        len(needed),
        inputs=tuple(key for key in DATA[1:] if key in keywords(sampler)),
    )


def read_options(
    arguments: Mapping[str, Callable[[str], Any]], call: calls.Call, required: int
) -> dict[str, Any]:
    """Returns the keyword arguments that a call gives, by position or as ``name=value``.

    Args:
        arguments: the names and what reads them.
        call: the call.
        required: how many of the names must be given.

    Raises:
        ValueError: if an argument is missing, given twice, malformed or unknown.
        KeyError: if a choice is unknown.
    """
    takes = {key: i < required for i, key in enumerate(arguments)}
    given = binding.arguments(call, takes)
    return {key: arguments[key](calls.word(node)) for key, node in given.items()}


def reader(hint: Any) -> Callable[[str], Any]:
    """Returns a reader of values of a type; None in the type marks an optional value."""
    kinds = typing.get_args(hint) or (hint,)
    if typing.get_origin(hint) is Literal:
        return lambda word: {str(choice): choice for choice in kinds}[word]
    readers: dict[Any, Callable[[str], Any]] = {
        bool: {"True": True, "False": False}.__getitem__,
        int: int,
        float: float,
    }
    return next((read for kind, read in readers.items() if kind in kinds), str)
