"""``--attack`` and ``--attackers``: which clients attack, and how."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, NamedTuple

import jax.numpy as jnp

from fedjax_sim import attacks
from fedjax_sim.attacks import Malicious
from fedjax_sim.attacks._together import hidden_shift
from fedjax_sim.base import ClientData, Sending, Task, calls
from fedjax_sim.base.binding import arguments, finder
from fedjax_sim.cli.settings import Group, setting
from fedjax_sim.partition.forms import reader
from fedjax_sim.round import Algorithm

SENT: Mapping[str, Callable[..., Sending]] = {
    "sign_flip": attacks.sign_flip,
    "gaussian": attacks.gaussian,
    "alie": attacks.alie,
    "ipm": attacks.ipm,
    "mimic": attacks.mimic,
    "optimised": attacks.optimised,
}
"""Attacks by what clients send; ``label_flip`` is one by what they learn from."""

LABEL_FLIP = "label_flip"
GIVEN = ("malicious", "rule", "preaggregation")
"""Arguments that an attack gets from the run."""


class Form(NamedTuple):
    """How an attack is written.

    Attributes:
        name: its name.
        text: its text form, optional arguments with their defaults.
        arguments: their names in the order of the text, and what reads each one.
        required: those that must be given.
    """

    name: str
    text: str
    arguments: Mapping[str, Callable[[str], Any]]
    required: Collection[str]


def forms() -> dict[str, Form]:
    """The forms of all attacks.

    >>> [form.text for form in forms().values()][:2]
    ['sign_flip(scale=4.0)', 'gaussian(sigma)']
    """
    found = {}
    for name, attack in SENT.items():
        own = [p for p in inspect.signature(attack).parameters.values() if p.name not in GIVEN]
        hints = typing.get_type_hints(attack)
        needed = [p.name for p in own if p.default is p.empty]
        words = [*needed, *(f"{p.name}={p.default}" for p in own[len(needed) :])]
        readers = {p.name: reader(hints[p.name]) for p in own}
        found[name] = Form(name, f"{name}({', '.join(words)})", readers, needed)
    return found | {LABEL_FLIP: Form(LABEL_FLIP, LABEL_FLIP, {}, ())}


def parse_attack(text: str) -> tuple[str, dict[str, Any]]:
    """The attack and its arguments that a text means.

    Args:
        text: such as ``ipm`` or ``sign_flip(scale=2)``.

    Raises:
        argparse.ArgumentTypeError: if it is none; names them all.

    >>> parse_attack("optimised(mean, evaluations=8)")
    ('optimised', {'along': 'mean', 'evaluations': 8})
    """
    known = forms()
    try:
        call = calls.as_call(calls.parse(text), text)
        form = finder("attack", known)(call.name)
        given = arguments(call, {key: key in form.required for key in form.arguments})
        read = {key: form.arguments[key](calls.word(node)) for key, node in given.items()}
        return form.name, read
    except (ValueError, LookupError) as error:
        allowed = ", ".join(form.text for form in known.values())
        raise argparse.ArgumentTypeError(
            f"must be one of {allowed}, got {text!r}: {error}"
        ) from error


def _checked(text: str) -> str:
    parse_attack(text)
    return text


@dataclasses.dataclass(frozen=True)
class Attack(Group):
    """Malicious clients.

    Attributes:
        attack: the text of an attack; None for none.
        attackers: the share of the clients that attack; None without an attack.
    """

    title: ClassVar[str] = "attacks, for all algorithms alike"

    attack: str | None = setting(
        None,
        lambda: (
            "what malicious clients do: "
            f"{', '.join(form.text for form in forms().values())}; optimised knows the "
            "method's aggregator, label_flip learns from wrong labels"
        ),
        shown="none",
        metavar="TEXT",
        convert=_checked,
    )
    attackers: float | None = setting(
        None,
        "share of the clients that attack, drawn once and for all seeds",
        shown="none",
        above=0,
        below=1,
    )

    def __post_init__(self) -> None:
        """Refuses half an attack."""
        if self.attackers is None and self.attack is not None:
            raise ValueError(f"--attack {self.attack} needs --attackers, the share of the clients")
        if self.attack is None and self.attackers is not None:
            raise ValueError("--attackers is for --attack")


def malicious_of(attack: Attack, clients: int) -> Malicious | None:
    """``bool[N]``, who attacks; None for nobody.

    Raises:
        ValueError: if the share is of no client, or of all.
    """
    if attack.attackers is None:
        return None
    malicious = attacks.byzantine(clients, attack.attackers)
    if not 0 < malicious.sum() < clients:
        raise ValueError(
            f"--attackers must be a share of 1 to {clients - 1} of the {clients} clients, got "
            f"{attack.attackers:g}, which is {malicious.sum()}"
        )
    return malicious


def poisoned(attack: Attack, data: ClientData, task: Task) -> ClientData:
    """The clients' data, of malicious ones with wrong labels if that is the attack.

    Raises:
        ValueError: if there are no classes; names the flag.
    """
    malicious = malicious_of(attack, data.clients)
    if attack.attack is None or malicious is None or parse_attack(attack.attack)[0] != LABEL_FLIP:
        return data
    if task.classes is None:
        raise ValueError(f"--attack {attack.attack} is for classes, the task is {task!r}")
    return attacks.label_flip(data, malicious, task.classes)


def attacked(algorithm: Algorithm, attack: Attack, clients: int) -> Algorithm:
    """The algorithm with the attack as the first part of what clients send.

    Raises:
        ValueError: if they do not fit, or a setting is out of range; names the flag.
    """
    malicious = malicious_of(attack, clients)
    if attack.attack is None or malicious is None:
        return algorithm
    name, options = parse_attack(attack.attack)
    if name == LABEL_FLIP:
        return algorithm
    hostile = int(malicious.sum())
    numbers = jnp.int32(clients), jnp.int32(hostile)
    if name == "alie" and "z" not in options and not hidden_shift(*numbers) > 0:
        raise ValueError(
            f"--attack {attack.attack}: the shift z is 0 for {hostile} of {clients} clients, too "
            "few to sway a majority: give alie(z=1.5), or more --attackers"
        )
    parts = algorithm.parts
    if name == "optimised":
        options |= {"rule": parts.aggregator, "preaggregation": parts.preaggregation}
    try:
        part = SENT[name](malicious, **options)
        return algorithm.replace(sending=(part, *parts.sending))
    except ValueError as error:
        raise ValueError(f"--attack {attack.attack}: {error}") from error


def recorded(attack: Attack, clients: int) -> dict[str, Any]:
    """The attack and how many clients it is of; nothing without one."""
    malicious = malicious_of(attack, clients)
    if malicious is None:
        return {}
    return {"attack": attack.attack, "attackers": int(malicious.sum())}


def told(attack: Attack, clients: int) -> str:
    """What is to be said of the attack; "" for none."""
    found = recorded(attack, clients)
    if not found:
        return ""
    return f"\nattack: {attack.attack} by {found['attackers']} of {clients} clients"
