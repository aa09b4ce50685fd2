"""How long a round takes: the clients' devices, and what the server waits for."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from fedjax_sim.base.arrays import Array
from fedjax_sim.base.need import Need
from fedjax_sim.base.origin import Origin, shown

Late = Literal["drop", "partial"]


class Now(NamedTuple):
    """Simulated time; float32 alone would lose a second after 97 days.

    Attributes:
        seconds: ``int32[]``, whole ones since the start.
        fraction: ``f32[]``, in [0, 1), the rest.
    """

    seconds: Array
    fraction: Array


class Law(Protocol):
    """A number of each client's device: seconds or bytes per second."""

    def __call__(self, key: Array, client: Array, now: Now, /) -> Array:
        """``f32[P]``, positive, of ``client int32[P]``; ``key`` is the same in every round.

        A client's number depends on nothing but its own number and the time, so that a population
        costs as much as a cohort of it.
        """


class Availability(Protocol):
    """Who is awake."""

    def __call__(self, keys: Array, client: Array, now: Now, /) -> Array:
        """``bool[S]`` of ``client int32[S]`` at the start of a round.

        ``keys key[S]`` are the clients' own in this round.
        """


class Link(NamedTuple):
    """How fast bytes travel.

    Attributes:
        up: bytes per second from a client; if ``shared``, of all clients together.
        down: bytes per second to a client.
        shared: whether those who upload in a round have an equal part of ``up``.
        origin: the call that made it.
    """

    up: Law
    down: Law
    shared: bool = False
    origin: Origin | None = None

    def __repr__(self) -> str:
        return shown(self)


class Clock(NamedTuple):
    """How long the visits of a round take, who is there, and whom the server waits for.

    Attributes:
        compute: seconds of a local step.
        link: what travels how fast; None: in no time.
        available: who is awake; None: everyone, always.
        failures: the probability that a client is lost in the middle of a visit.
        deadline: the seconds after which the server closes a round; None: it waits for all.
        late: of a deadline: the visits of clients that are then at work are dropped, or these stop
          in time to send what they have done.
        first: the uploads that the server waits for; None: all.
        idle: the seconds of a round in which no client trains.
        watts: the power of a device that computes; None: not known.
        seed: of the devices; they are the same in all runs.
        clients: how many of them it knows; None: any number.
        needs: of the other parts.
        origin: the call that made it.
    """

    compute: Law
    link: Link | None = None
    available: Availability | None = None
    failures: float = 0.0
    deadline: float | None = None
    late: Late = "drop"
    first: int | None = None
    idle: float = 60.0
    watts: float | None = None
    seed: int = 0
    clients: int | None = None
    needs: tuple[Need, ...] = ()
    origin: Origin | None = None

    def __repr__(self) -> str:
        return shown(self)

    @property
    def loses(self) -> bool:
        """Whether a visit may be left out or come to nothing."""
        waits = self.deadline is None and self.first is None
        return self.available is not None or self.failures > 0 or not waits

    @property
    def cuts(self) -> bool:
        """Whether clients stop in time for the deadline."""
        return self.deadline is not None and self.late == "partial"


class Elapsed(NamedTuple):
    """What a clock says of a round; sums over its clients.

    Attributes:
        seconds: ``f32[]``, from its start to its end.
        computing: ``f32[]``, the seconds that clients computed.
        link: ``f32[]``, the seconds that they received or sent.
        waiting: ``f32[]``, the seconds that they were done, or had no model yet, and waited for the
          server.
        asleep: ``int32[]``, clients that were chosen and not there.
        lost: ``int32[]``, clients that were lost in the middle of their visit.
        late: ``int32[]``, clients that came too late.
        silent: ``int32[]``, clients that trained or were to, and sent nothing: those that were
          lost, for which the deadline left no step, or that computed when the round was over.
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
        """``f32[]``, the seconds in which clients had a model, or could have had one."""
        return self.computing + self.link + self.waiting
