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
from fedjax_sim.base import ClientData, Task, calls
from fedjax_sim.base.binding import argument, arguments, finder
from fedjax_sim.cli.flags import naming
from fedjax_sim.cli.settings import Group, setting
from fedjax_sim.data.clients import EvalSet
from fedjax_sim.round import Algorithm
from fedjax_sim.tasks import classification

KNOWN: Mapping[str, Callable[..., Any]] = {
    name: getattr(attacks, name)
    for name in (
        "sign_flip",
        "scaling",
        "gaussian",
        "alie",
        "ipm",
        "mimic",
        "fang_trim",
        "fang_krum",
        "optimised",
        "label_flip",
        "backdoor",
    )
}
"""Attacks by name."""

LEARNED = {"label_flip", "backdoor"}
"""Attacks by what clients learn from; the others are by what they send."""

GIVEN = ("malicious", "rule", "preaggregation", "data", "test", "classes")
"""Arguments that an attack gets from the run."""


def _parameters(name: str) -> list[inspect.Parameter]:
    """Returns the parameters of an attack that a text can set."""
    found = inspect.signature(KNOWN[name]).parameters.values()
    return [p.replace(annotation=p.empty) for p in found if p.name not in GIVEN]


def forms() -> str:
    """Returns the forms of all attacks.

    >>> forms()[:37]
    'sign_flip(scale=4.0), scaling(factor)'
    """
    texts = [f"{name}({', '.join(map(str, _parameters(name)))})" for name in KNOWN]
    return ", ".join(texts).replace("()", "")


def parse_attack(text: str) -> dict[str, dict[str, Any]]:
    """Returns the arguments of each attack in a text.

    >>> parse_attack("Label-Flip * optimised(mean, evaluations=8)")
    {'label_flip': {}, 'optimised': {'along': 'mean', 'evaluations': 8}}
    """
    found: dict[str, dict[str, Any]] = {}
    with naming(f"must be one of {forms()}, or several joined by *, got {text!r}"):
        for node in calls.factors(text):
            call = calls.as_call(node, text)
            name = finder("attack", {name: name for name in KNOWN})(call.name)
            if name in found:
                raise ValueError(f"{name} is given twice")
            given = arguments(call, {p.name: p.default is p.empty for p in _parameters(name)})
            none = finder("value", dict[str, Any]())
            found[name] = {k: argument(KNOWN[name], k, v, none) for k, v in given.items()}
    return found


def _checked(text: str) -> str:
    parse_attack(text)
    return text


@dataclasses.dataclass(frozen=True)
class Attack(Group):
    """Malicious clients."""

    title: ClassVar[str] = "attacks, for all algorithms"

    attack: str | None = setting(
        None,
        lambda: (
            f"attack of the malicious clients: {forms()}, or several joined by *; fang_krum and "
            "optimised know the method's aggregator, label_flip learns from wrong labels, backdoor "
            "from images with a trigger, which adds the score attack_success"
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
        """Rejects an attack without attackers, and attackers without an attack."""
        if self.attackers is None and self.attack is not None:
            raise ValueError(f"--attack {self.attack} needs --attackers, the share of the clients")
        if self.attack is None and self.attackers is not None:
            raise ValueError("--attackers is for --attack")


def malicious_of(attack: Attack, clients: int) -> Malicious | None:
    """Returns the malicious clients, ``bool[N]``; None for no attack."""
    if attack.attackers is None:
        return None
    malicious = attacks.byzantine(clients, attack.attackers)
    if not 0 < malicious.sum() < clients:
        raise ValueError(
            f"--attackers must be a share of 1 to {clients - 1} of the {clients} clients, got "
            f"{attack.attackers:g}, which is {malicious.sum()}"
        )
    return malicious


def scored(attack: Attack, task: Task) -> Task:
    """Returns the task, which also scores a backdoor attack."""
    named = parse_attack(attack.attack) if attack.attack else {}
    scores = "backdoor" in named
    fits = isinstance(task, classification) if scores else task.classes is not None
    if named.keys() & LEARNED and not fits:
        raise ValueError(f"--attack {attack.attack} is for classes, the task is {task!r}")
    return task.replace(backdoor=True) if scores else task


def poisoned(
    attack: Attack, data: ClientData, sets: Mapping[str, EvalSet | None], classes: int | None
) -> dict[str, Any]:
    """Returns ``data`` as malicious clients change it, and the sets that score this, by name."""
    malicious, found = malicious_of(attack, data.clients), dict[str, Any](sets)
    if attack.attack is None or malicious is None or classes is None:
        return found | {"data": data}
    named = parse_attack(attack.attack)
    with naming(f"--attack {attack.attack}"):
        if "label_flip" in named:
            data = attacks.label_flip(data, malicious, classes)
        if (options := named.get("backdoor")) is None:
            return found | {"data": data}
        for name, examples in sets.items():
            if examples is not None:
                both = attacks.backdoor(data, examples, malicious, classes, **options)
                found["data"], found[name] = both
    return found


def attacked(algorithm: Algorithm, attack: Attack, clients: int) -> Algorithm:
    """Returns the algorithm with the attack as the first part of ``sending``."""
    malicious = malicious_of(attack, clients)
    if attack.attack is None or malicious is None:
        return algorithm
    named = {k: v for k, v in parse_attack(attack.attack).items() if k not in LEARNED}
    hostile = int(malicious.sum())
    numbers = jnp.int32(clients), jnp.int32(hostile)
    if "alie" in named and "z" not in named["alie"] and not hidden_shift(*numbers) > 0:
        raise ValueError(
            f"--attack {attack.attack}: the shift z is 0 for {hostile} of {clients} clients, too "
            "few to sway a majority: give alie(z=1.5), or more --attackers"
        )
    blind = "alie" in named or named.get("fang_trim", {}).get("knowledge") == "partial"
    if blind and hostile == 1:
        raise ValueError(
            f"--attack {attack.attack}: 1 of {clients} clients knows no other update and sends its "
            "own: give more --attackers"
        )
    parts = algorithm.parts
    known = {"rule": parts.aggregator, "preaggregation": parts.preaggregation}
    with naming(f"--attack {attack.attack}"):
        made = []
        for name, options in named.items():
            taken = inspect.signature(KNOWN[name]).parameters
            own = {key: value for key, value in known.items() if key in taken}
            made.append(KNOWN[name](malicious, **options, **own))
        return algorithm.replace(sending=(*made, *parts.sending))


def attack_entries(attack: Attack, clients: int) -> dict[str, Any]:
    """Returns the attack and the number of attackers; {} without an attack."""
    malicious = malicious_of(attack, clients)
    if malicious is None:
        return {}
    return {"attack": attack.attack, "attackers": int(malicious.sum())}


def describe(attack: Attack, clients: int) -> str:
    """Returns the line about the attack; "" for none."""
    found = attack_entries(attack, clients)
    if not found:
        return ""
    return f"\nattack: {attack.attack} by {found['attackers']} of {clients} clients"
