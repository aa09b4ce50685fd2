"""Clocks: how long rounds take, and how long the server waits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fedjax_sim.base import Availability, Clock, Count, Decay, FinitePositive, Law, Link, Need
from fedjax_sim.base.clock import Late
from fedjax_sim.engine.needs import NO_FLIGHT
from fedjax_sim.plan.devices import (
    bandwidth,
    bernoulli,
    constant,
    diurnal,
    lognormal,
    pareto,
    tiers,
)
from fedjax_sim.plan.traces import Trace, read

__all__ = [
    "bandwidth",
    "bernoulli",
    "constant",
    "diurnal",
    "lognormal",
    "pareto",
    "simulated",
    "tiers",
    "traced",
]

KNOWN_AGE = Need(
    "broadcast",
    "models whose staleness is not drawn: in a round they return when they are done",
    lambda parts: parts.broadcast.tags != "staleness",
    "broadcast=latest()",
)
BY_SERVER = Need(
    "flight",
    "models that clients send to the server, and not to one another",
    lambda parts: not parts.selection.sticky or parts.flight.redistribution is None,
    "redistribution=None",
)
NO_FRAGMENTS = Need(
    "exchange",
    "models without fragments, of which a client that is not there would miss some",
    lambda parts: not parts.exchange.fragments,
    "exchange=everything()",
)
STOPS = Need(
    "local",
    "an update that can stop early",
    lambda parts: parts.local.stops,
    "local_sgd, or late='drop'",
)


class _Rounds(Clock):
    """The rules by which rounds end."""

    _: dataclasses.KW_ONLY
    failures: Decay = 0.0
    deadline: FinitePositive | None = None
    late: Late = "drop"
    first: Count | None = None
    idle: FinitePositive = 60.0
    watts: FinitePositive | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.late == "partial" and self.deadline is None:
            raise ValueError("late='partial' needs a deadline, which clients stop in time for")

    @property
    def needs(self) -> tuple[Need, ...]:
        needs = [KNOWN_AGE, BY_SERVER] + [NO_FRAGMENTS] * self.loses + [STOPS] * self.cuts
        if (first := self.first) is not None:
            enough = Need(
                "clients_per_round",
                f"at least {first} clients to wait for",
                lambda parts: parts.slots >= first,
                "a larger cohort",
            )
            needs += [NO_FLIGHT, enough]
        return tuple(needs)


class simulated(_Rounds):
    r"""Simulated devices; a round lasts as long as its slowest visit, or until a rule ends it.

    .. math:: s_k = \frac{\text{bytes down}}{\text{down}_k} + T_k c_k +
              \frac{\text{bytes up}}{\text{up}_k}, \qquad
              s = \min(\max_k s_k, \text{deadline})

    A client that is asleep is not sent a model, and its slot is idle. A lost client stops at a
    uniformly random point of its visit, and the server notices. A client that is still working when
    the round ends stops, and an upload that it has begun counts as sent. Nothing of a lost or late
    client is used: it has no weight and keeps its previous state, and a model in flight stays as it
    was before the visit; a due model is lost with a client that keeps its slot. Transfers before
    the first round and after the last take no time. A client that withholds its update uploads no
    model, and is not among the ``first``; if the size of messages depends on the updates, limits
    that are known before a client trains (``late="partial"``, selections by time) assume the
    largest message. With a flight that collects models as they return
    (:func:`fedjax_sim.flight.buffered`) the same applies to each visit separately, but no round
    ends a visit.

    Args:
        compute: c_k, the seconds of each local step that a client reports; a number for all
            clients, or a distribution such as :func:`lognormal`.
        link: see :func:`bandwidth`; None: transfers take no time.
        available: the clients that are awake when the round begins; None: all.
        failures: the probability that a client is lost in the middle of its visit.
        deadline: the maximum duration of a round in seconds; None for no limit.
        late: what happens to a client that is working at the deadline: "drop" drops its visit;
            "partial" lets it take the steps that leave time for the upload, at least one.
        first: the number of uploads that the server waits for, dropping the others
            (over-selection); None for all.
        idle: the duration of a round in which no client trains because all are asleep; also the
            seconds after which a model that is sent alone is offered again if its client sleeps.
        watts: the power of a computing device; None: energy is not reported.
        seed: seed of the devices, which are the same in all runs.

    Raises:
        ValueError: if a number is out of range, or ``late`` is "partial" without a deadline.

    Source: Bonawitz et al. 2019 <https://arxiv.org/abs/1902.01046>, section 2.2, where a server
    waits for enough devices or a deadline and ignores the others; Li et al. 2020
    <https://arxiv.org/abs/1812.06127>, for partial work.

    Example:
        >>> import fedjax_sim as fs
        >>> fs.clock.simulated(fs.clock.tiers(1, 2, 10), fs.clock.bandwidth(1e6, 4e6))
        simulated(tiers(1, 2, 10), link=bandwidth(1000000.0, 4000000.0))
    """

    compute: FinitePositive | Law
    link: Link | None = None
    available: Availability | None = None


class traced(_Rounds):
    """Simulated devices from a file, otherwise as :func:`simulated`.

    The .csv file has a row for each client, from 0 and in order, with the columns ``client``,
    ``seconds_per_step``, ``up_bytes_per_second`` and ``down_bytes_per_second``, named in its first
    line. With additional columns ``from`` and ``to``, in whole seconds of simulated time, a client
    may have several rows: it is awake in each interval [from, to), with the speeds of that row, and
    asleep at any other time. The row at the start of a round applies to the whole round.

    Args:
        file: the trace; it may have more clients than the data.
        period: seconds after which the trace repeats; None: never, and clients without a later row
          sleep until the end of the run.
        failures: see :func:`simulated`, like all that follow.
        deadline: maximum duration of a round.
        late: what happens to a client that is working at the deadline.
        first: the number of uploads that the server waits for.
        idle: the duration of a round in which no client trains.
        watts: the power of a computing device.
        seed: without effect, because the file has all properties of the devices.

    Raises:
        ValueError: if a number in the file is out of range, a client is missing, or rows are out of
            order, with the number of the row; in the first round, if the data have more clients.
    """

    file: str | Path
    _: dataclasses.KW_ONLY
    period: Count | None = None
    trace: Trace = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "trace", read(self.file, self.period))
        super().__post_init__()

    @property
    def compute(self) -> Law:
        return self.trace.compute

    @property
    def link(self) -> Link:
        return self.trace.link

    @property
    def available(self) -> Availability | None:
        return self.trace.available

    @property
    def clients(self) -> int:
        return self.trace.clients
