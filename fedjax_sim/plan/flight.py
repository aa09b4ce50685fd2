"""Flights: when the server collects models, and how they move between clients until then."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import (
    AnyRedistribution,
    Array,
    Count,
    Evaluated,
    FinitePositive,
    Flight,
    Need,
    Refresh,
    Variables,
)
from fedjax_sim.engine import tree
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

__all__ = [
    "buffered",
    "delayed",
    "drift_correction",
    "every_round",
    "periodic",
    "permanent",
    "serverless",
    "staggered",
]


class every_round(Flight):
    """Collects all models in every round (FedAvg).

    Args:
        round_factor: the rounds to run for each round of FedAvg that the user budgets.
    """

    _: dataclasses.KW_ONLY
    round_factor: FinitePositive = 1.0


class delayed(Flight):
    """Collects all models together, once in ``rounds`` rounds (RADFed).

    Args:
        rounds: the rounds from one aggregation to the next.
        redistribution: where models go between two rounds; None: they stay in their slots.
        refresh: the update of models in flight from the server model; None: no update.
        evaluated: "server" for the server model, or "in_flight" for the aggregate of the models in
          flight, which is newer.
        apart: whether each slot is a group of its own, so that no other slot visits its clients.
        round_factor: see :class:`every_round`.

    >>> [delayed(3).due(jnp.int32(t), 1).tolist() for t in range(4)]
    [[False], [False], [True], [False]]
    """

    rounds: Count
    _: dataclasses.KW_ONLY
    redistribution: AnyRedistribution | None = None
    refresh: Refresh | None = None
    evaluated: Evaluated = "server"
    apart: bool = False
    round_factor: FinitePositive = 1.0

    @property
    def period(self) -> int:
        return self.rounds

    def group(self, slots: int) -> NDArray[np.int32]:
        return np.arange(slots, dtype=np.int32) * self.apart

    def due(self, t: Array, slots: int) -> Array:
        return jnp.full(slots, (t + 1) % self.rounds == 0)


class staggered(Flight):
    """Collects one of several equal groups of models per round, in turn (phase shift).

    The first group is due after one round, the second after two, then each after ``phases``.

    Args:
        phases: the number of groups, which divides the number of slots.
        redistribution: see :class:`delayed`.
        refresh: see :class:`delayed`; phase shift uses :class:`drift_correction`.
        evaluated: see :class:`delayed`.
        round_factor: see :class:`every_round`.

    Raises:
        ValueError: when it is composed, if the slots cannot be divided into equal groups.

    >>> [staggered(2).due(jnp.int32(t), 4).tolist() for t in range(2)]
    [[True, True, False, False], [False, False, True, True]]
    """

    phases: Count
    _: dataclasses.KW_ONLY
    redistribution: AnyRedistribution | None = None
    refresh: Refresh | None = None
    evaluated: Evaluated = "server"
    round_factor: FinitePositive = 1.0

    @property
    def needs(self) -> tuple[Need, ...]:
        return (STICKY,) if self.phases > 1 else ()

    @property
    def period(self) -> int:
        return self.phases

    def group(self, slots: int) -> NDArray[np.int32]:
        if slots % self.phases:
            allowed = [n for n in range(1, slots + 1) if slots % n == 0]
            raise ValueError(
                f"phases must divide the {slots} active clients: one of {allowed}, got "
                f"{self.phases}"
            )
        return np.arange(slots, dtype=np.int32) // (slots // self.phases)

    def due(self, t: Array, slots: int) -> Array:
        return jnp.asarray(self.group(slots)) == t % self.phases


class _NeverDue(Flight):
    """A flight that never ends."""

    period = 2

    def due(self, t: Array, slots: int) -> Array:
        return jnp.zeros(slots, bool)


class permanent(_NeverDue):
    """Collects no model: the first clients keep theirs for the whole run.

    The server collects fragments of their models (:func:`fedjax_sim.exchange.fragments`).
    """

    needs = (STICKY, IN_FRAGMENTS)


class serverless(_NeverDue):
    """Collects no model: there is no server, and clients exchange models (gossip).

    The mean of the models is evaluated. Settings of a server are rejected: rules and optimisers
    would only act on the evaluated mean, and never reach a node.

    Args:
        redistribution: combines the models between two rounds; None: each client trains alone.
    """

    redistribution: AnyRedistribution | None = None

    serverless = True
    needs = (PLAIN_MEAN, UNCHANGED, PLAIN_SERVER, ONE_MODEL, NOTHING_SHARED)


class _Asynchronous(Flight):
    """A flight whose rounds collect models of C clients as they return."""

    asynchronous = True
    needs = (CLOCK, NO_ROUND_TIMED, ONE_BY_ONE, KNOWN_STEPS, ONE_MODEL, NOTHING_SHARED)


class buffered(_Asynchronous):
    r"""Collects the models that return first, without waiting for the others (FedBuff).

    C clients, ``clients_per_round``, train at once, each from the server model that was the newest
    when it was sent. A client that returns is replaced at once, except the last one of a round and
    clients that return at the same instant as it, which are replaced after the server update. Ties
    are ordered by client number. A client can be drawn again once the server has collected its
    model. If it sleeps when it is drawn, no client is sent that model for the clock's ``idle``
    seconds.

    If no client is training, because all drawn clients sleep, the round ends with the models that
    have returned. Clients that are training at the end of the run have been sent a model, but are
    not trained. A round of FedAvg with C clients corresponds to C / K rounds.

    Args:
        size: K, the number of models in a round.

    Raises:
        ValueError: when it is composed, if size is not in 1 .. C.

    Source: Nguyen et al. 2022 <https://arxiv.org/abs/2106.06639>, Algorithm 1 (K, concurrency);
    Xie et al. 2019 <https://arxiv.org/abs/1903.03934>, with K = 1.
    """

    size: Count

    def collected(self, active: int) -> int:
        if self.size > active:
            raise ValueError(
                f"buffer_size must be in 1..{active}, the models that are at work at once, got "
                f"{self.size}"
            )
        return self.size


class periodic(_Asynchronous):
    """Collects the models that return in rounds of a fixed duration: semi-synchronous.

    C clients, ``clients_per_round``, train at once; a client that returns waits for the end of the
    round, when all clients that are not training are replaced. See :class:`buffered`.

    Args:
        seconds: the duration of a round, in simulated time.

    Raises:
        ValueError: if seconds is not positive and below 2**30.

    Source: Wu et al. 2019 <https://arxiv.org/abs/1910.01355>, SAFA, whose rounds have a fixed
    duration and let slow clients continue; without its cache of updates and its selection.
    """

    seconds: float

    def __post_init__(self) -> None:
        if not 0 < self.seconds < 2**30:
            raise ValueError(f"seconds must be positive and below 2**30, got {self.seconds}")


class drift_correction(Refresh):
    r"""Pulls the model in flight towards the server model, weighted by the samples behind each.

    .. math:: w_k \leftarrow \frac{N_t}{n_k + N_t} w_t + \frac{n_k}{n_k + N_t} w_k

    Source: Cornelis 2022 <cornelis2022federated>, Algorithm 3 line 8.

    >>> import numpy as np
    >>> server, local = np.float32(0), np.float32(4)
    >>> float(drift_correction().correct(server, 30.0, local, 10.0))
    1.0
    """

    needs = (ONE_MODEL, STICKY)

    def correct(
        self, server: Variables, server_samples: Array, local: Variables, samples: Array
    ) -> Variables:
        return tree.interpolate(local, server, server_samples / (samples + server_samples))
