"""Methods as texts with their own settings: ``fedprox(mu=0.01|0.1, lr=0.05)``."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from fedjax_sim.base import calls
from fedjax_sim.base.binding import arguments
from fedjax_sim.base.spelling import hint
from fedjax_sim.cli.flags import flag, naming, reader
from fedjax_sim.cli.methods import algorithm, parameters
from fedjax_sim.cli.parts import ROLES, check_part
from fedjax_sim.cli.training import Training

TRAINED = (
    "epochs", "batch_size", "optimizer", "optimizer_state", "lr", "momentum", "weight_decay",
    "last_batch", "stragglers",
)  # fmt: skip
"""Settings of local training that a method may have of its own; the model is the same for all."""


class Written(NamedTuple):
    """A method with its written settings, and the texts of parts that replace its own."""

    name: str
    options: dict[str, Any]
    training: dict[str, Any]
    parts: dict[str, str]


def labels_in(text: str) -> tuple[str, ...]:
    """Returns the canonical texts of the methods in a text.

    The text is ``NAME`` or ``NAME(value, key=value, ...)``, with the method's own options, settings
    of local training and parts by role; ``value|value`` stands for one method each.

    >>> labels_in("FedProx( mu=0.01|0.1, lr=1/2 )")
    ('fedprox(mu=0.01, lr=1/2)', 'fedprox(mu=0.1, lr=1/2)')
    >>> labels_in("fedprox(0.1)"), labels_in("fedavg(aggregator=krum(0.1|0.2))")[1]
    (('fedprox(mu=0.1)',), 'fedavg(aggregator=krum(0.2))')
    """
    return tuple(_label(calls.as_call(tree, text)) for tree in calls.alternatives(text))


def _label(call: calls.Call) -> str:
    name = algorithm(call.name)
    own = [*parameters(name)]
    for key in call.named:
        if key not in (*own, *TRAINED, *ROLES):
            meant = hint(key, (*own, *TRAINED, *ROLES)) or f": use {', '.join((*own, *TRAINED))}"
            raise ValueError(f"{call}: {key} is not a setting of {name}{meant}")
    given = arguments(calls.Call(name, call.args), dict.fromkeys(own, False))
    if twice := given.keys() & call.named.keys():
        raise ValueError(f"{call}: {min(twice)} is given twice")
    given |= call.named
    words = (f"{k}={calls.write(calls.unquoted(v))}" for k, v in given.items())
    label = f"{name}({', '.join(words)})" if given else name
    parse_label(label)
    return label


@functools.cache
def parse_label(label: str) -> Written:
    """Returns the method of one text of :func:`labels_in`.

    >>> parse_label("fedprox(mu=0.1, lr=0.05)")
    Written(name='fedprox', options={'mu': 0.1}, training={'lr': 0.05}, parts={})
    """
    call = calls.as_call(calls.parse(label), label)
    own, found = parameters(call.name), Written(call.name, {}, {}, {})
    for key, node in call.named.items():
        with naming(f"{label}: {key}"):
            if key in ROLES and (key not in own or isinstance(node, calls.Call)):
                found.parts[key] = check_part(key, calls.write(node))
            elif key in own:
                found.options[key] = reader(own[key].annotation)(calls.word(node))
            else:
                found.training[key] = _trained()[key](calls.word(node))
    return found


def check_used(given: Mapping[str, Any], labels: Sequence[str]) -> None:
    """Rejects a flag of local training for which every method has its own value."""
    for key in TRAINED:
        if key in given and all(key in parse_label(label).training for label in labels):
            raise ValueError(f"{flag(key)} has no effect next to {' and '.join(labels)}")


@functools.cache
def _trained() -> dict[str, Callable[[str], Any]]:
    """Returns the functions that read each setting of local training."""
    hints = typing.get_type_hints(Training)
    return {
        field.name: reader(hints[field.name], **field.metadata["setting"].limits)
        for field in dataclasses.fields(Training)
        if field.name in TRAINED
    }
