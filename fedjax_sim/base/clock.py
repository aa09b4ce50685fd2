"""Clocks: the clients' devices, and how long the server waits for them."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import jax.numpy as jnp

from fedjax_sim.base.arrays import Array
from fedjax_sim.base.parts import Part

Late = Literal["drop", "partial"]


class Now(NamedTuple):
    """Simulated time; float32 alone would lose a second after 97 days.

    Attributes:
        seconds: ``int32[]``, whole seconds since the start.
        fraction: ``f32[]``, in [0, 1), the rest.
    """

    seconds: Array
    fraction: Array


class Law(Protocol):
    """A distribution of a device property over clients: seconds or bytes per second."""

    def __call__(self, key: Array, client: Array, now: Now, /) -> Array:
        """Returns ``f32[P]``, positive, for ``client int32[P]``; ``key`` is constant in a run.

        The value depends only on the client's index and the time, so that a large population costs
        no more than its cohort.
        """


def evaluate_law(law: float | Law, key: Array, client: Array, now: Now) -> Array:
    """Returns the property ``f32[P]`` of each client; a number applies to all."""
    return law(key, client, now) if callable(law) else jnp.full(client.shape, law, jnp.float32)


class Availability(Protocol):
    """Determines which clients are awake."""

    def __call__(self, keys: Array, client: Array, now: Now, /) -> Array:
        """Returns ``bool[S]`` for ``client int32[S]`` at the start of a round.

        ``keys key[S]`` are the clients' keys in this round.
        """


class Link(Part):
    """The speed of the network."""

    @property
    def up(self) -> float | Law:
        """Bytes per second from a client; if ``shared``, from all clients together."""
        raise NotImplementedError

    @property
    def down(self) -> float | Law:
        """Bytes per second to a client."""
        raise NotImplementedError

    shared = False
    """Whether the clients that upload in a round share ``up`` equally."""


class Clock(Part):
    """Simulated devices: how long visits take, who is available, and whom the server waits for."""

    @property
    def compute(self) -> float | Law:
        """Seconds of a local step."""
        raise NotImplementedError

    @property
    def link(self) -> Link | None:
        """The network; None: transfers take no time."""
        return None

    @property
    def available(self) -> Availability | None:
        """The clients that are awake; None: all, always."""
        return None

    failures = 0.0
    """The probability that a client is lost in the middle of a visit."""

    @property
    def deadline(self) -> float | None:
        """Seconds after which the server closes a round; None: it waits for all."""
        return None

    @property
    def late(self) -> Late:
        """At the deadline: unfinished visits are dropped, or stop in time to send partial work."""
        return "drop"

    @property
    def first(self) -> int | None:
        """The number of uploads that the server waits for; None: all."""
        return None

    idle = 60.0
    """Seconds of a round in which no client trains."""

    @property
    def watts(self) -> float | None:
        """Power of a device that computes; None: unknown."""
        return None

    seed = 0
    """Seed of the devices, which are the same in all runs."""

    @property
    def clients(self) -> int | None:
        """The number of clients of the clock; None: any number."""
        return None

    @property
    def loses(self) -> bool:
        """Whether a visit may be skipped or lost."""
        waits = self.deadline is None and self.first is None
        return self.available is not None or self.failures > 0 or not waits

    @property
    def cuts(self) -> bool:
        """Whether clients stop in time for the deadline."""
        return self.deadline is not None and self.late == "partial"


class Elapsed(NamedTuple):
    """Durations and counts of a round, summed over its clients.

    Attributes:
        seconds: ``f32[]``, the duration of the round.
        computing: ``f32[]``, the seconds that clients computed.
        link: ``f32[]``, the seconds that clients received or sent.
        waiting: ``f32[]``, the seconds that clients waited for the server, finished or without a
          model.
        asleep: ``int32[]``, selected clients that were asleep.
        lost: ``int32[]``, clients that were lost in the middle of their visit.
        late: ``int32[]``, clients that returned too late.
        silent: ``int32[]``, selected clients that sent nothing: lost, without time for a step
          before the deadline, or still computing when the round ended.
    """

    seconds: Array
    computing: Array
    link: Array
    waiting: Array
    asleep: Array
    lost: Array
    late: Array
    silent: Array

    @property
    def held(self) -> Array:
        """Returns ``f32[]``, the seconds in which clients had a model, or could have had one."""
        return self.computing + self.link + self.waiting
