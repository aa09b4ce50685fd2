"""``--attack`` and ``--attackers``: which clients attack, and how."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from fedjax_sim import attacks
from fedjax_sim.attacks import Malicious
from fedjax_sim.attacks._together import hidden_shift
from fedjax_sim.base import ClientData, Sending, Task, calls
from fedjax_sim.base.binding import argument, arguments, finder
from fedjax_sim.cli.flags import naming
from fedjax_sim.cli.settings import Group, setting
from fedjax_sim.round import Algorithm

SENT: Mapping[str, Callable[..., Sending]] = {
    name: getattr(attacks, name)
    for name in (
        "sign_flip",
        "gaussian",
        "alie",
        "ipm",
        "mimic",
        "fang_trim",
        "fang_krum",
        "optimised",
    )
}
"""Attacks by what clients send; ``label_flip`` is one by what they learn from."""

LABEL_FLIP = "label_flip"
GIVEN = ("malicious", "rule", "preaggregation")
"""Arguments that an attack gets from the run."""


def _parameters(name: str) -> list[inspect.Parameter]:
    """Returns the parameters of an attack that a text gives."""
    if name == LABEL_FLIP:
        return []
    found = inspect.signature(SENT[name]).parameters.values()
    return [p.replace(annotation=p.empty) for p in found if p.name not in GIVEN]


def forms() -> str:
    """Returns the forms of all attacks.

    >>> forms()[:37]
    'sign_flip(scale=4.0), gaussian(sigma)'
    """
    texts = [f"{name}({', '.join(map(str, _parameters(name)))})" for name in SENT]
    return ", ".join([*texts, LABEL_FLIP])


def parse_attack(text: str) -> tuple[str, dict[str, Any]]:
    """Returns the attack and its arguments that a text means.

    Raises:
        ValueError: if it is none; names them all.

    >>> parse_attack("Optimised(mean, evaluations=8)")
    ('optimised', {'along': 'mean', 'evaluations': 8})
    """
    with naming(f"must be one of {forms()}, got {text!r}"):
        call = calls.as_call(calls.parse(text), text)
        name = finder("attack", {name: name for name in (*SENT, LABEL_FLIP)})(call.name)
        given = arguments(call, {p.name: p.default is p.empty for p in _parameters(name)})
        none = finder("value", dict[str, Any]())
        return name, {key: argument(SENT[name], key, node, none) for key, node in given.items()}


def _checked(text: str) -> str:
    parse_attack(text)
    return text


@dataclasses.dataclass(frozen=True)
class Attack(Group):
    """Malicious clients."""

    title: ClassVar[str] = "attacks, for all algorithms alike"

    attack: str | None = setting(
        None,
        lambda: (
            f"what malicious clients do: {forms()}; fang_krum and optimised know the method's "
            "aggregator, label_flip learns from wrong labels"
        ),
        shown="none",
        metavar="TEXT",
        convert=_checked,
    )
    attackers: float | None = setting(
        None,
        "share of the clients that attack, drawn once for all seeds",
        shown="none",
        above=0,
        below=1,
    )

    def __post_init__(self) -> None:
        """Rejects half an attack."""
        if self.attackers is None and self.attack is not None:
            raise ValueError(f"--attack {self.attack} needs --attackers, the share of the clients")
        if self.attack is None and self.attackers is not None:
            raise ValueError("--attackers is for --attack")


def malicious_of(attack: Attack, clients: int) -> Malicious | None:
    """Returns ``bool[N]``, who attacks; None for nobody.

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
    """Returns the clients' data, with wrong labels for malicious clients if that is the attack.

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
    """Returns the algorithm with the attack as the first part of ``sending``.

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
    known = {"rule": parts.aggregator, "preaggregation": parts.preaggregation}
    taken = inspect.signature(SENT[name]).parameters
    options |= {key: value for key, value in known.items() if key in taken}
    with naming(f"--attack {attack.attack}"):
        part = SENT[name](malicious, **options)
        return algorithm.replace(sending=(part, *parts.sending))


def recorded(attack: Attack, clients: int) -> dict[str, Any]:
    """Returns the attack and the number of attackers; nothing without one."""
    malicious = malicious_of(attack, clients)
    if malicious is None:
        return {}
    return {"attack": attack.attack, "attackers": int(malicious.sum())}


def told(attack: Attack, clients: int) -> str:
    """Returns the line about the attack; "" for none."""
    found = recorded(attack, clients)
    if not found:
        return ""
    return f"\nattack: {attack.attack} by {found['attackers']} of {clients} clients"
