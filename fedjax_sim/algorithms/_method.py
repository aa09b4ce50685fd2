"""The decorator of methods, which completes their docstrings, and options of several methods."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from typing import ParamSpec

import optax

from fedjax_sim import server
from fedjax_sim.base import Server, Weighting, part
from fedjax_sim.round import Algorithm
from fedjax_sim.server import weighting

_P = ParamSpec("_P")

METHODS: dict[str, Callable[..., Algorithm]] = {}
"""The methods below ``@method`` by name, in the order of their definitions."""

ARGUMENTS = {
    "local": "the local update.",
    "clients_per_round": "m: clients per round, sampled without replacement.",
    "model": "the model to train.",
    "objective": "F, the objective of the local update.",
    "classes": "M: number of classes.",
    "clock": "the simulated clock, see :mod:`fedjax_sim.clock`.",
    "lr": "η: learning rate of the clients' SGD, as set in the local update.",
    "momentum": "ρ: momentum of the clients' SGD, as set in the local update.",
    "equal_weights": "weight clients equally instead of by n_k, their numbers of samples.",
    "server_lr": "η: server learning rate.",
    "server_momentum": "β: server momentum; 0 disables it.",
    "alpha": "α: step towards the clients' average; 1 replaces the server model.",
    "beta1": "β1: decay of the server optimiser's first moment.",
    "beta2": "β2: decay of the server optimiser's second moment.",
    "tau": "τ: added to the root of the server optimiser's second moment.",
    "v0": "initial second moment of the server optimiser; None: τ².",
    "variant": '"reddi" is the update of Reddi et al., "optax" is optax\'s own, which has no v0.',
    "mu": "μ: weight of the proximal term; 0 disables it.",
    "temperature": "τ: temperature.",
    "rho": "ρ: length of the perturbation; 0 is FedAvg.",
    "fine_tuning_epochs": "epochs of fine-tuning at each client.",
    "levels": "L: number of widths; 1 is FedAvg.",
    "most_steps": "upper bound on τ, the local steps per round.",
    "sparsity": "p: fraction of an update's entries that is sent.",
    "evaluated": "clients on which accuracy is measured; None: all.",
    "redistribution_rounds": "S: local rounds between two aggregations.",
    "gamma": "γ: weight of a client's newest importance in its running average.",
    "initial_scores": 'initial importance: "gradient" takes a pass over all samples, "ones" is 1.',
    "max_staleness": "d_max: largest sampled staleness; the server keeps as many models. None: 16.",
    "decay": 's: discount of staleness d: "constant" 1; "polynomial" (d + 1)^-a; "hinge" 1 up to\n'
    "      d = b, then 1 / (a (d - b) + 1).",
    "slope": 'a of the decay; None: 0.5 for "polynomial", 10 for "hinge". "constant" takes none.',
    "grace": 'b: largest staleness that "hinge" does not discount.',
}
"""Descriptions of arguments, unless a method's own docstring has another one."""

SETUP = """\
>>> import optax, fedjax_sim as fs
>>> problem = fs.toy()
>>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
"""
RUN = """\
>>> problem.accuracy(algorithm, rounds=5) > 0.5
True
"""
SECTIONS = {
    "Returns": "Returns:\n    The algorithm. Traffic per round: m models down, m up.",
    "Raises": "Raises:\n    ValueError: if a setting is out of range, or does not fit another one.",
}
"""The sections of a docstring that lacks them."""

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
    """Lists a method, completes its docstring and records its calls.

    ``ARGUMENTS`` describes the arguments that the docstring omits. Missing returns, exceptions and
    parts of an example (the problem, the call, a run) are added.
    """
    factory.__doc__ = _completed(factory)
    listed = METHODS[factory.__name__] = part(factory)
    return listed


def _completed(factory: Callable[..., Algorithm]) -> str:
    head, arguments, tail = _split(inspect.getdoc(factory) or "")
    parameters = inspect.signature(factory).parameters
    entries = [f"    {name}: {arguments.get(name) or ARGUMENTS[name]}" for name in parameters]
    found, rest = [], tail
    for name, default in SECTIONS.items():
        section = default
        if rest.startswith(f"{name}:"):
            section, _, rest = rest.partition("\n\n")
        found.append(section)
    tail, _, example = "\n\n".join([*found, rest]).partition("\nExample:\n")
    example = textwrap.dedent(example) or RUN
    if ">>> algorithm = " not in example and ">>> import" not in example:
        required = [p.name for p in parameters.values() if p.default is p.empty][1:]
        *given, last = ["local", *(f"{name}={GIVEN[name]}" for name in required)]
        most = ", ".join(given)
        call = f"fs.algorithms.{factory.__name__}({most}, {last})"
        if len(call) > 75:
            gap = "\n...     " if len(most) + len(last) > 90 else " "
            call = f"fs.algorithms.{factory.__name__}(\n...     {most},{gap}{last}\n... )"
        example = f">>> algorithm = {call}\n{example}"
    if ">>> import" not in example:
        example = SETUP + example
    shown = textwrap.indent(example.rstrip(), "    ")
    return "\n".join([head, "", "Args:", *entries, "", tail.rstrip(), "", "Example:", shown, ""])


def _split(doc: str) -> tuple[str, dict[str, str], str]:
    """Splits a docstring into the text before Args, the arguments by name, and the text after."""
    head, _, rest = doc.partition("\nArgs:\n")
    if not rest:
        found = re.search(r"^(Returns|Raises|Source):", doc, flags=re.M)
        end = len(doc) if found is None else found.start()
        return doc[:end].rstrip(), {}, doc[end:].strip()
    section, _, tail = rest.partition("\n\n")
    entries = re.split(r"^ {4}(\w+): ", section, flags=re.M)[1:]
    return head.rstrip(), dict(zip(entries[::2], map(str.rstrip, entries[1::2]), strict=True)), tail


def client_weights(equal_weights: bool) -> Weighting:
    """Returns equal weights, or the clients' numbers of samples."""
    return weighting.equal if equal_weights else weighting.by_samples


def server_sgd(
    server_lr: float, server_momentum: float | None = None, *, nesterov: bool = False
) -> Server:
    """Returns SGD on the mean update."""
    return server.optimizer(optax.sgd(server_lr, server_momentum, nesterov))
