"""The decorator of methods, which completes their docstrings."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import ParamSpec

from fedjax_sim.base import part
from fedjax_sim.round import Algorithm

_P = ParamSpec("_P")

ARGUMENTS = {
    "local": "the local update.",
    "clients_per_round": "m, the clients in a round, drawn without replacement.",
    "equal_weights": "weigh clients equally instead of by n_k, their numbers of samples.",
    "model": "the model to train.",
    "objective": "the clients' loss, an :func:`fedjax_sim.empirical_risk`.",
}
"""Descriptions of arguments that have the same meaning in all methods."""

EXAMPLE = """\
>>> import optax, fedjax_sim as fs
>>> problem = fs.toy()
>>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
>>> algorithm = {call}
>>> problem.accuracy(algorithm, rounds=5) > 0.5
True"""
GIVEN = {
    "clients_per_round": "5",
    "model": "problem.model",
    "objective": "problem.objective",
    "classes": "problem.classes",
    "lr": "0.1",
    "momentum": "0.0",
    "clock": "fs.clock.simulated(1, deadline=60)",
}


def method(factory: Callable[_P, Algorithm]) -> Callable[_P, Algorithm]:
    """Decorates a method: completes its docstring, and records calls of it.

    Arguments that its docstring leaves out are described by ``ARGUMENTS``; a method without an
    example gets the common one.
    """
    factory.__doc__ = _completed(factory)
    return part(factory)


def _completed(factory: Callable[..., Algorithm]) -> str:
    head, arguments, tail = _split(inspect.getdoc(factory) or "")
    parameters = inspect.signature(factory).parameters
    entries = [f"    {name}: {arguments.get(name) or ARGUMENTS[name]}" for name in parameters]
    if "Example:" not in tail:
        required = [p.name for p in parameters.values() if p.default is p.empty][1:]
        given = [f"{name}={GIVEN[name]}" for name in required]
        call = f"fs.algorithms.{factory.__name__}(local, {', '.join(given)})"
        if len(call) > 75:
            call = call.replace("(local", "(\n...     local")[:-1] + "\n... )"
        example = EXAMPLE.format(call=call)
        tail += f"\n\nExample:\n{textwrap.indent(example, '    ')}"
    return "\n".join([head, "", "Args:", *entries, "", tail, ""])


def _split(doc: str) -> tuple[str, dict[str, str], str]:
    """Returns what precedes a docstring's arguments, these by name, and what follows them."""
    head, _, rest = doc.partition("\nArgs:\n")
    if not rest:
        head, mark, rest = doc.partition("\nReturns:")
        return head.rstrip(), {}, f"{mark}{rest}".strip()
    section, _, tail = rest.partition("\n\n")
    entries = re.split(r"^ {4}(\w+): ", section, flags=re.M)[1:]
    return head.rstrip(), dict(zip(entries[::2], map(str.rstrip, entries[1::2]), strict=True)), tail
