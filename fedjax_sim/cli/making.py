"""Makes named methods: fills in the arguments that mean the same in every method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.base import Clock, LocalUpdate, Model, Objective
from fedjax_sim.base.signatures import keywords
from fedjax_sim.client.local import local_sgd
from fedjax_sim.client.objective import empirical_risk
from fedjax_sim.engine.execution import Execution
from fedjax_sim.models import logistic
from fedjax_sim.plan.clock import simulated
from fedjax_sim.round import Algorithm


class Common(NamedTuple):
    """The arguments that mean the same in all methods; a method gets the ones in its signature."""

    local: LocalUpdate
    model: Model
    objective: Objective
    classes: int | None
    clients_per_round: int
    lr: float
    momentum: float
    clock: Clock | None
    execution: Execution | None = None


def stand_in(model: Model | None = None, **fields: Any) -> Common:
    """Returns arguments with which every method can be made, to inspect its parts.

    Unless fields of :class:`Common` are given, there are a logistic regression of 8 x 8 images in
    10 classes, SGD with learning rate 0.1 and momentum 0.9, 10 clients a round, one second a local
    step and a deadline after 60.
    """
    model = model or logistic((8, 8, 1), 10)
    known: dict[str, Any] = {"model": model, "objective": empirical_risk(model), "classes": 10}
    known |= {"clients_per_round": 10, "lr": 0.1, "momentum": 0.9}
    known |= {"clock": simulated(1, deadline=60)} | fields
    if "local" not in known:
        optimizer = optax.sgd(known["lr"], momentum=known["momentum"])
        known["local"] = local_sgd(known["objective"], optimizer)
    return Common(**known)


def make(
    method: str | Callable[..., Algorithm], common: Common | None = None, **options: Any
) -> Algorithm:
    """Returns a method, made with its common arguments and its own options.

    The clock goes only to methods that require one.

    >>> make("fedcs", clients_per_round=3).parts.clients_per_round
    3
    """
    function = ALGORITHMS.resolve(method)[1] if isinstance(method, str) else method
    given, taken = (common or stand_in())._asdict(), keywords(function)
    local, execution = given.pop("local"), given.pop("execution")
    if "clock" in taken and taken["clock"].default is None:
        del given["clock"]
    made = function(local, **({key: given[key] for key in given if key in taken} | options))
    if not isinstance(made, Algorithm):  # a user's function
        raise ValueError(f"must return an Algorithm, got {type(made).__name__}")
    return made if execution is None else made.on(execution)
