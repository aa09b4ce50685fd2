"""Text forms of samplers, such as ``ll(2, 7/8)``."""

import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from fedjax_sim.base import binding, calls
from fedjax_sim.base.signatures import keywords
from fedjax_sim.partition.table import Partition

DATA = ("seed", "groups", "features")
"""Keyword arguments that a sampler receives from the run and the data, not from the user."""


class Form(NamedTuple):
    """Text form of a sampler: a call with its keyword parameters.

    Attributes:
        text: the form, with the defaults of optional arguments.
        arguments: reader of each argument by name, in the order of the text.
        required: number of required arguments.
        inputs: which of "groups" and "features" the sampler takes.
    """

    text: str
    arguments: Mapping[str, Callable[[str], Any]]
    required: int
    inputs: tuple[str, ...]


def form_of(name: str, sampler: Callable[..., Partition]) -> Form:
    """Makes the form of a sampler from its keyword parameters, required ones first.

    >>> def shards(labels, clients, *, seed, each: int, mixed: bool = False): ...
    >>> form = form_of("mine:shards", shards)
    >>> form.text, form.required
    ('mine:shards(each, mixed=False)', 1)
    """
    own = keywords(sampler, DATA)
    needed = [key for key, p in own.items() if p.default is p.empty]
    order = [*needed, *(key for key in own if key not in needed)]
    words = [*needed, *(f"{key}={own[key].default}" for key in order[len(needed) :])]
    return Form(
        f"{name}({', '.join(words)})" if words else name,
        {key: reader(own[key].annotation, key) for key in order},
        len(needed),
        tuple(key for key in DATA[1:] if key in keywords(sampler)),
    )


def read_options(form: Form, call: calls.Call) -> dict[str, Any]:
    """Reads the keyword arguments of a call, given by position or as ``name=value``.

    Raises:
        ValueError: if an argument is missing, given twice, malformed or unknown.
        KeyError: if a choice is unknown.
    """
    takes = {key: i < form.required for i, key in enumerate(form.arguments)}
    given = binding.arguments(call, takes)
    return {key: form.arguments[key](calls.word(node)) for key, node in given.items()}


def reader(hint: Any, name: str) -> Callable[[str], Any]:
    """Returns a reader of values of a type; the name of a switch turns it on.

    >>> reader(bool, "balanced")("balanced"), reader(float | None, "theta")("1")
    (True, 1.0)
    """
    kinds = typing.get_args(hint) or (hint,)
    if typing.get_origin(hint) is Literal:
        return lambda word: {str(choice): choice for choice in kinds}[word]
    readers: dict[Any, Callable[[str], Any]] = {
        bool: {"True": True, "False": False, name: True}.__getitem__,
        int: int,
        float: float,
    }
    return next((read for kind, read in readers.items() if kind in kinds), str)
