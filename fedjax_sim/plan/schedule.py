"""Which slots the server collects, and when."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import Array, Schedule, part
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


@part
def every_round(slots: int) -> Schedule:
    """All slots are due in every round (FedAvg).

    Args:
        slots: S.

    Returns:
        A schedule.

    Raises:
        ValueError: if slots is below 1.

    >>> every_round(2).due(jnp.int32(5)).tolist()
    [True, True]
    """
    return delayed(slots, 1)._replace(one_round=True)


@part
def delayed(slots: int, rounds: int) -> Schedule:
    """All slots are due together, once in ``rounds`` rounds (RADFed).

    Args:
        slots: S.
        rounds: the rounds from one aggregation to the next.

    Returns:
        A schedule.

    Raises:
        ValueError: if slots or rounds is below 1.

    >>> [delayed(1, 3).due(jnp.int32(t)).tolist() for t in range(4)]
    [[False], [False], [True], [False]]
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    _check_slots(slots)
    return Schedule(
        period=rounds,
        group=np.zeros(slots, np.int32),
        due=lambda t: jnp.full(slots, (t + 1) % rounds == 0),
    )


@part
def staggered(slots: int, phases: int) -> Schedule:
    """Equal groups of slots, of which one is due per round, in turn (phase shift).

    The first group is due after one round, the second after two, then each after ``phases``.

    Args:
        slots: S.
        phases: the number of groups.

    Returns:
        A schedule.

    Raises:
        ValueError: if the slots cannot be divided into that many equal groups.

    >>> [staggered(4, 2).due(jnp.int32(t)).tolist() for t in range(2)]
    [[True, True, False, False], [False, False, True, True]]
    """
    if phases < 1 or slots % phases:
        allowed = [n for n in range(1, slots + 1) if slots % n == 0]
        raise ValueError(
            f"phases must divide the {slots} active clients: one of {allowed}, got {phases}"
        )
    _check_slots(slots)
    group = np.arange(slots, dtype=np.int32) // (slots // phases)

    def due(t: Array) -> Array:
        return jnp.asarray(group) == t % phases

    needs = (STICKY,) if phases > 1 else ()
    return Schedule(period=phases, group=group, due=due, needs=needs)


@part
def permanent(slots: int) -> Schedule:
    """No slot is ever due: the first clients keep theirs for the whole run.

    The server collects fragments of their models (:func:`fedjax_sim.exchange.fragments`).

    Args:
        slots: S.

    Returns:
        A schedule.

    Raises:
        ValueError: if slots is below 1.

    >>> permanent(2).due(jnp.int32(5)).tolist()
    [False, False]
    """
    _check_slots(slots)
    return Schedule(
        period=2,
        group=np.zeros(slots, np.int32),
        due=lambda t: jnp.zeros(slots, bool),
        needs=(STICKY, IN_FRAGMENTS),
    )


@part
def serverless(slots: int) -> Schedule:
    """No slot is ever due: there is no server (gossip).

    Models meet in the redistribution alone. What a server would do is refused: rules and optimisers
    would act on the evaluated mean only, and never reach a node.

    Args:
        slots: S.

    Returns:
        A schedule.

    Raises:
        ValueError: if slots is below 1.

    >>> serverless(2).due(jnp.int32(5)).tolist()
    [False, False]
    """
    _check_slots(slots)
    group = np.zeros(slots, np.int32)
    return Schedule(
        period=2,
        group=group,
        due=lambda t: jnp.zeros(slots, bool),
        serverless=True,
        needs=(PLAIN_MEAN, UNCHANGED, PLAIN_SERVER, ONE_MODEL, NOTHING_SHARED),
    )


@part
def buffered(size: int, *, at_work: int) -> Schedule:
    r"""A round takes the models that come back first, and the server waits for no others.

    C clients are at work at once, each with the server model that was the newest when it was sent.
    Who comes back is replaced at once; who comes back last of a round is replaced after the server
    has moved, and so are those that come back at the same instant. Of two such clients the one of
    the lower number comes first. A client is drawn again once the server has taken its model. If it
    sleeps when it is drawn, nobody is sent that model for the clock's ``idle`` seconds.

    If nobody is at work, as all who were asked sleep, the round ends with the models that there
    are. Those that are at work after the last round are not trained, but have been sent.

    Args:
        size: K, the models of a round.
        at_work: C.

    Returns:
        A schedule; its rounds need a clock.

    Raises:
        ValueError: if size is not in 1 .. at_work.

    Source: Nguyen et al. 2022 <https://arxiv.org/abs/2106.06639>, Algorithm 1 (K, concurrency);
    Xie et al. 2019 <https://arxiv.org/abs/1903.03934>, with K = 1.

    >>> buffered(2, at_work=10).due(jnp.int32(5)).tolist()
    [True, True]
    """
    if not 1 <= size <= at_work:
        raise ValueError(
            f"buffer_size must be in 1..{at_work}, the models that are at work at once, got {size}"
        )
    return _timed(every_round(size), at_work)


@part
def periodic(seconds: float, *, at_work: int) -> Schedule:
    """A round has a length, and takes the models that come back in it: semi-synchronous.

    C clients are at work at once; who comes back waits for the end of the round, when all are
    replaced that are not at work. See :func:`buffered`.

    Args:
        seconds: of simulated time, the length of a round.
        at_work: C.

    Returns:
        A schedule; its rounds need a clock.

    Raises:
        ValueError: if seconds is not positive and finite, or at_work below 1.

    Source: Wu et al. 2019 <https://arxiv.org/abs/1910.01355>, SAFA, whose rounds end at a time and
    leave slow clients at work; its cache of updates and its choice of clients are not here.

    >>> periodic(60.0, at_work=3).due(jnp.int32(5)).tolist()
    [True, True, True]
    """
    if not 0 < seconds < 2**30:
        raise ValueError(f"seconds must be positive and below 2**30, got {seconds}")
    if at_work < 1:
        raise ValueError(f"at_work must be at least 1, got {at_work}")
    return _timed(every_round(at_work), at_work)._replace(seconds=seconds)


def _timed(schedule: Schedule, at_work: int) -> Schedule:
    needs = CLOCK, NO_ROUND_TIMED, ONE_BY_ONE, KNOWN_STEPS, ONE_MODEL, NOTHING_SHARED
    return schedule._replace(at_work=at_work, needs=needs)


def _check_slots(slots: int) -> None:
    if slots < 1:
        raise ValueError(f"clients_per_round must be at least 1, got {slots}")
