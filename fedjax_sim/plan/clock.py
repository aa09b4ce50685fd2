"""Clocks: how long rounds take, and what the server waits for; devices differ by laws."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fedjax_sim.base import Availability, Clock, Law, Link, Need, part
from fedjax_sim.base.clock import Late
from fedjax_sim.engine.needs import NO_FLIGHT
from fedjax_sim.plan import traces
from fedjax_sim.plan.devices import (
    as_law,
    bandwidth,
    bernoulli,
    check_positive,
    constant,
    diurnal,
    lognormal,
    pareto,
    tiers,
)
from fedjax_sim.plan.redistribution import keep

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

_KNOWN_AGE = Need(
    "broadcast",
    "models whose staleness is not drawn: in a round they come back when they are done",
    lambda parts: parts.broadcast.tags != "staleness",
    "broadcast=latest()",
)
_BY_SERVER = Need(
    "redistribution",
    "models that clients send to the server, and not to one another",
    lambda parts: not parts.selection.sticky or parts.redistribution is keep,
    "redistribution=keep",
)
_WHOLE = Need(
    "exchange",
    "models without fragments, of which a client that is not there would miss some",
    lambda parts: not parts.exchange.fragments,
    "exchange=everything()",
)
_STOPS = Need(
    "local",
    "an update that can stop early",
    lambda parts: parts.local.stops,
    "local_sgd, or late='drop'",
)


@part
def simulated(
    compute: float | Law,
    link: Link | None = None,
    available: Availability | None = None,
    *,
    failures: float = 0.0,
    deadline: float | None = None,
    late: Late = "drop",
    first: int | None = None,
    idle: float = 60.0,
    watts: float | None = None,
    seed: int = 0,
) -> Clock:
    r"""Devices of laws, and rounds that last as long as the slowest visit, if no rule ends them.

    .. math:: s_k = \frac{\text{bytes down}}{\text{down}_k} + T_k c_k +
              \frac{\text{bytes up}}{\text{up}_k}, \qquad
              s = \min(\max_k s_k, \text{deadline})

    A client that is asleep is not asked, and its slot is idle. One that is lost falls silent at a
    uniform point of its visit, and the server sees it. A client that is at work when the round is
    over stops there, and an upload that it has begun counts as sent. Of a client that is lost or
    late nothing is taken: it weighs nothing, keeps what it had before, and a model in flight stays
    as it was before the visit; a model that is due at a client which keeps its slot is lost with
    it. What was sent before the first round and after the last takes no time. With a schedule that
    takes models as they come back (:func:`fedjax_sim.schedule.buffered`) the same holds of each
    visit by itself, but no round stops one.

    Args:
        compute: c_k, the seconds of each local step that a client reports; a number for all.
        link: see :func:`bandwidth`; None: bytes travel in no time.
        available: who is awake when the round begins; None: everyone.
        failures: the probability that a client is lost in the middle of its visit.
        deadline: the seconds of a round at most; None for any number.
        late: what becomes of a client that the deadline finds at work: "drop" drops its visit;
            "partial" lets it take the steps that leave time for the upload, if that is one at
            least.
        first: the server waits for so many uploads and drops the others (over-selection); None for
            all.
        idle: the seconds of a round in which no client trains, as all sleep; also the seconds after
            which a model that goes to one client alone is offered again if that one sleeps.
        watts: the power of a device that computes; None: energy is not told.
        seed: of the devices. All runs have the same.

    Returns:
        A clock.

    Raises:
        ValueError: if a number is out of range, or there is nothing that ``late`` is for.

    Source: Bonawitz et al. 2019 <https://arxiv.org/abs/1902.01046>, section 2.2, where a server
    waits for enough devices or a time and ignores the others; Li et al. 2020
    <https://arxiv.org/abs/1812.06127>, for partial work.

    Example:
        >>> import fedjax_sim as fs
        >>> fs.clock.simulated(fs.clock.tiers(1, 2, 10), fs.clock.bandwidth(1e6, 4e6))
        simulated(tiers(1, 2, 10), link=bandwidth(1000000.0, 4000000.0))
    """
    if not 0 <= failures < 1:
        raise ValueError(f"failures must be in [0, 1), got {failures}")
    for name, value in (("deadline", deadline), ("idle", idle), ("watts", watts)):
        if value is not None:
            check_positive(name, value)
    if late not in ("drop", "partial"):
        raise ValueError(f"late must be 'drop' or 'partial', got {late!r}")
    if late == "partial" and deadline is None:
        raise ValueError("late='partial' needs a deadline, which clients stop in time for")
    if first is not None and first < 1:
        raise ValueError(f"first must be at least 1, got {first}")
    made = Clock(
        compute=as_law("compute", compute),
        link=link,
        available=available,
        failures=failures,
        deadline=deadline,
        late=late,
        first=first,
        idle=idle,
        watts=watts,
        seed=seed,
    )
    needs = [_KNOWN_AGE, _BY_SERVER]
    needs += [_WHOLE] * made.loses + [_STOPS] * made.cuts
    if first is not None:
        enough = Need(
            "schedule",
            f"at least {first} clients to wait for",
            lambda parts: len(parts.schedule.group) >= first,
            "a larger cohort",
        )
        needs += [NO_FLIGHT, enough]
    return made._replace(needs=tuple(needs))


@part
def traced(file: str | Path, *, period: int | None = None, **settings: Any) -> Clock:
    """:func:`simulated` with the devices of a file.

    It has a row for each client, from 0 and in order, with the columns ``client``,
    ``seconds_per_step``, ``up_bytes_per_second`` and ``down_bytes_per_second``: a .csv file with
    these names in its first line, or a .npz file with an array of each. If it has ``from`` and
    ``to`` besides, in whole seconds of simulated time, a client may have several rows: it is awake
    from each ``from`` until before the ``to``, with the speeds of that row, and asleep at any other
    time. A row holds for a whole round, by the round's beginning.

    Args:
        file: the trace; it may have more clients than the data.
        period: seconds after which the trace begins again; None: it does not, and all who have no
            row then sleep to the end of the run.
        settings: of :func:`simulated`, beside compute, link and available.

    Returns:
        A clock.

    Raises:
        ValueError: if a number of the file is out of range, a client is missing, or rows are out of
            order; says which row. When it starts, if the data have more clients.
    """
    if period is not None and not 1 <= period < 2**31:
        raise ValueError(f"period must be a whole number of seconds from 1, got {period}")
    trace = traces.read(file, period)
    made = simulated(trace.compute, trace.link, trace.available, **settings)
    return made._replace(clients=trace.clients)
