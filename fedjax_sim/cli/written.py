"""Methods as texts with settings of their own: ``fedprox(mu=0.01|0.1, lr=0.05)``."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_sim.base.spelling import hint
from fedjax_sim.cli.flags import flag, kind
from fedjax_sim.cli.methods import algorithm, parameters
from fedjax_sim.cli.training import Training

TRAINED = (
    "epochs", "batch_size", "optimizer", "optimizer_state", "lr", "momentum", "weight_decay",
    "last_batch",
)  # fmt: skip
"""Settings of local training that a method may have of its own; the model is the same for all."""


MOST = 1000
"""Settings of a method that one text may stand for."""


class Written(NamedTuple):
    """A method as it was written.

    Attributes:
        name: what ``ALGORITHMS`` has or imports.
        options: its own keyword arguments.
        training: its own settings of local training.
    """

    name: str
    options: dict[str, Any]
    training: dict[str, Any]


def written(text: str) -> tuple[str, ...]:
    """The methods of a text, in the same words for the same method; an argparse type.

    Args:
        text: ``NAME`` or ``NAME(key=value, ...)``; ``value|value`` stands for one method each.

    Raises:
        argparse.ArgumentTypeError: if there is no such method or setting, or a value is out of
            range.

    >>> written("FedProx( mu=0.01|0.1, lr=0.05 )")
    ('fedprox(mu=0.01, lr=0.05)', 'fedprox(mu=0.1, lr=0.05)')
    >>> written("fedavg"), written("fedprox()")
    (('fedavg',), ('fedprox',))
    """
    match = re.fullmatch(r"\s*([^()]+?)\s*(?:\(([^()]*)\))?\s*", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"a method is written NAME or NAME(key=value, ...), got {text!r}"
        )
    name, inside = algorithm(match[1]), (match[2] or "").strip()
    given: dict[str, list[str]] = {}
    for word in inside.split(",") if inside else []:
        key, equals, values = map(str.strip, word.partition("="))
        if not equals or not values:
            raise argparse.ArgumentTypeError(
                f"{text}: settings are written key=value, got {word.strip()!r}"
            )
        if key in given:
            raise argparse.ArgumentTypeError(f"{text}: {key} is given twice")
        given[key] = [value.strip() for value in values.split("|")]
    if (count := math.prod(map(len, given.values()))) > MOST:
        raise argparse.ArgumentTypeError(f"{name} may have {MOST:,} settings, got {count:,}")
    found = []
    for values_of_one in itertools.product(*given.values()):
        words = ", ".join(f"{k}={v}" for k, v in zip(given, values_of_one, strict=True))
        label = f"{name}({words})" if words else name
        read(label)
        found.append(label)
    return tuple(found)


@functools.cache
def read(label: str) -> Written:
    """What one text of :func:`written` says.

    >>> read("fedprox(mu=0.1, lr=0.05)")
    Written(name='fedprox', options={'mu': 0.1}, training={'lr': 0.05})
    """
    name, _, inside = label.partition("(")
    own, found = parameters(name), Written(name, {}, {})
    readers = {**_trained(), **{key: _reader(p.annotation) for key, p in own.items()}}
    for word in inside.removesuffix(")").split(", ") if inside else []:
        key, _, value = word.partition("=")
        if key not in readers:
            known = (*own, *TRAINED)
            meant = hint(key, known) or f": use {', '.join(known)}"
            raise argparse.ArgumentTypeError(f"{label}: {key} is no setting of {name}{meant}")
        try:
            (found.options if key in own else found.training)[key] = readers[key](value)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise argparse.ArgumentTypeError(f"{label}: {key}: {error}") from error
    return found


def check_used(given: Mapping[str, Any], labels: Sequence[str]) -> None:
    """Refuses a flag of local training that every method has its own value of.

    Raises:
        ValueError: names the flag.
    """
    for key in TRAINED:
        if key in given and all(key in read(label).training for label in labels):
            raise ValueError(f"{flag(key)} has no effect beside {' and '.join(labels)}")


def _trained() -> dict[str, Callable[[str], Any]]:
    hints = typing.get_type_hints(Training)
    fields = {field.name: field for field in dataclasses.fields(Training)}
    readers = {}
    for key in TRAINED:
        limits = fields[key].metadata["setting"].limits
        readers[key] = _reader(hints[key], **limits)
    return readers


def _reader(hint: Any, **limits: float) -> Callable[[str], Any]:
    """What reads a value of a parameter of this type, within its limits if it is a number."""
    told = kind(hint, **limits)
    if "choices" in told:
        return functools.partial(_choice, {str(value): value for value in told["choices"]})
    return told.get("type", _switch)


def _choice(values: Mapping[str, Any], word: str) -> Any:
    if word not in values:
        raise ValueError(f"must be one of {', '.join(values)}, got {word!r}")
    return values[word]


def _switch(word: str) -> bool:
    if word not in ("True", "False"):
        raise ValueError(f"must be True or False, got {word!r}")
    return word == "True"
