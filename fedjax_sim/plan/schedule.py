"""Schedules: which slots the server collects, and when."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Array, Count, Need, Schedule
from fedjax_sim.engine.needs import (
    CLOCK,
    IN_FRAGMENTS,
    KNOWN_STEPS,
    NO_ROUND_TIMED,
    NOTHING_SHARED,
    ONE_BY_ONE,
    ONE_MODEL,
    PLAIN_MEAN,
    PLAIN_SERVER,
    STICKY,
    UNCHANGED,
)

__all__ = ["buffered", "delayed", "every_round", "periodic", "permanent", "serverless", "staggered"]


class _OfSlots(Schedule):
    """A schedule of S slots."""

    slots: Count


class every_round(_OfSlots):
    """All slots are due in every round (FedAvg).

    Args:
        slots: S.
        round_factor: the rounds to run for each round of FedAvg that the user budgets.

    Raises:
        ValueError: if slots is below 1.

    >>> every_round(2).due(jnp.int32(5)).tolist()
    [True, True]
    """

    _: dataclasses.KW_ONLY
    round_factor: float = 1.0

    one_round = True


class delayed(_OfSlots):
    """All slots are due together, once in ``rounds`` rounds (RADFed).

    Args:
        slots: S.
        rounds: the rounds from one aggregation to the next.
        apart: whether each slot is a group of its own, so that no other slot visits its clients.
        round_factor: see :func:`every_round`.

    Raises:
        ValueError: if slots or rounds is below 1.

    >>> [delayed(1, 3).due(jnp.int32(t)).tolist() for t in range(4)]
    [[False], [False], [True], [False]]
    """

    rounds: Count
    _: dataclasses.KW_ONLY
    apart: bool = False
    round_factor: float = 1.0

    @property
    def period(self) -> int:
        return self.rounds

    @property
    def group(self) -> NDArray[np.int32]:
        return np.arange(self.slots, dtype=np.int32) * self.apart

    def due(self, t: Array) -> Array:
        return jnp.full(self.slots, (t + 1) % self.rounds == 0)


class staggered(_OfSlots):
    """Equal groups of slots, one of which is due per round, in turn (phase shift).

    The first group is due after one round, the second after two, then each after ``phases``.

    Args:
        slots: S.
        phases: the number of groups.
        round_factor: see :func:`every_round`.

    Raises:
        ValueError: if the slots cannot be divided into that many equal groups.

    >>> [staggered(4, 2).due(jnp.int32(t)).tolist() for t in range(2)]
    [[True, True, False, False], [False, False, True, True]]
    """

    phases: int
    _: dataclasses.KW_ONLY
    round_factor: float = 1.0

    def __post_init__(self) -> None:
        if self.phases < 1 or self.slots % self.phases:
            allowed = [n for n in range(1, self.slots + 1) if self.slots % n == 0]
            raise ValueError(
                f"phases must divide the {self.slots} active clients: one of {allowed}, got "
                f"{self.phases}"
            )

    @property
    def needs(self) -> tuple[Need, ...]:
        return (STICKY,) if self.phases > 1 else ()

    @property
    def period(self) -> int:
        return self.phases

    @property
    def group(self) -> NDArray[np.int32]:
        return np.arange(self.slots, dtype=np.int32) // (self.slots // self.phases)

    def due(self, t: Array) -> Array:
        return jnp.asarray(self.group) == t % self.phases


class _NeverDue(_OfSlots):
    """A schedule whose slots are never due."""

    period = 2

    def due(self, t: Array) -> Array:
        return jnp.zeros(self.slots, bool)


class permanent(_NeverDue):
    """No slot is ever due: the first clients keep theirs for the whole run.

    The server collects fragments of their models (:func:`fedjax_sim.exchange.fragments`).

    Args:
        slots: S.

    Raises:
        ValueError: if slots is below 1.

    >>> permanent(2).due(jnp.int32(5)).tolist()
    [False, False]
    """

    needs = (STICKY, IN_FRAGMENTS)


class serverless(_NeverDue):
    """No slot is ever due: there is no server (gossip).

    Models are only combined by the redistribution. Settings of a server are rejected: rules and
    optimisers would only act on the evaluated mean, and never reach a node.

    Args:
        slots: S.

    Raises:
        ValueError: if slots is below 1.

    >>> serverless(2).due(jnp.int32(5)).tolist()
    [False, False]
    """

    serverless = True
    needs = (PLAIN_MEAN, UNCHANGED, PLAIN_SERVER, ONE_MODEL, NOTHING_SHARED)


class _Asynchronous(Schedule):
    """A schedule whose rounds collect models of C clients as they return."""

    one_round = True
    needs = (CLOCK, NO_ROUND_TIMED, ONE_BY_ONE, KNOWN_STEPS, ONE_MODEL, NOTHING_SHARED)


class buffered(_Asynchronous):
    r"""A round collects the models that return first, and the server waits for no others (FedBuff).

    C clients train at once, each from the server model that was the newest when it was sent. A
    client that returns is replaced at once; the last one of a round is replaced after the server
    has moved, and so are those that return at the same instant. Of two such clients the one with
    the lower number comes first. A client can be drawn again once the server has taken its model.
    If it sleeps when it is drawn, no client is sent that model for the clock's ``idle`` seconds.

    If no client is training, because all that were drawn sleep, the round ends with the models that
    have returned. Clients that are training at the end of the run have been sent a model, but are
    not trained. A round of FedAvg with C clients corresponds to C / K rounds.

    Args:
        size: K, the number of models in a round.
        at_work: C.

    Raises:
        ValueError: if size is not in 1 .. at_work.

    Source: Nguyen et al. 2022 <https://arxiv.org/abs/2106.06639>, Algorithm 1 (K, concurrency);
    Xie et al. 2019 <https://arxiv.org/abs/1903.03934>, with K = 1.

    >>> buffered(2, at_work=10).due(jnp.int32(5)).tolist()
    [True, True]
    """

    size: Count
    _: dataclasses.KW_ONLY
    at_work: int

    def __post_init__(self) -> None:
        if self.size > self.at_work:
            raise ValueError(
                f"buffer_size must be in 1..{self.at_work}, the models that are at work at once, "
                f"got {self.size}"
            )

    @property
    def slots(self) -> int:
        return self.size

    @property
    def round_factor(self) -> float:
        return self.at_work / self.size


class periodic(_Asynchronous):
    """A round has a fixed duration, and collects the models that return in it: semi-synchronous.

    C clients train at once; a client that returns waits for the end of the round, when all that are
    not training are replaced. See :func:`buffered`.

    Args:
        seconds: the duration of a round, in simulated time.
        at_work: C.

    Raises:
        ValueError: if seconds is not positive and finite, or at_work below 1.

    Source: Wu et al. 2019 <https://arxiv.org/abs/1910.01355>, SAFA, whose rounds have a fixed
    duration and leave slow clients at work; without its cache of updates and its choice of clients.

    >>> periodic(60.0, at_work=3).due(jnp.int32(5)).tolist()
    [True, True, True]
    """

    seconds: float
    _: dataclasses.KW_ONLY
    at_work: Count

    def __post_init__(self) -> None:
        if not 0 < self.seconds < 2**30:
            raise ValueError(f"seconds must be positive and below 2**30, got {self.seconds}")

    @property
    def slots(self) -> int:
        return self.at_work
