"""Which slots the server collects, and when."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import Array, Schedule


def every_round(slots: int) -> Schedule:
    """All ``slots`` are due in every round (FedAvg).

    >>> every_round(2).due(jnp.int32(5)).tolist()
    [True, True]
    """
    return delayed(slots, 1)


def delayed(slots: int, rounds: int) -> Schedule:
    """All ``slots`` are due together, in every ``rounds``-th round (RADFed).

    Raises:
        ValueError: if rounds is below 1.

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


def staggered(slots: int, phases: int) -> Schedule:
    """``phases`` equal groups of slots, one due per round in turn (phase shift).

    The first group is due after one round, the second after two, then each after ``phases``.

    Raises:
        ValueError: if the slots do not fall into so many equal groups.

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

    return Schedule(period=phases, group=group, due=due)


def never(slots: int) -> Schedule:
    """No slot is ever due: there is no server (gossip).

    >>> never(2).due(jnp.int32(5)).tolist()
    [False, False]
    """
    _check_slots(slots)
    group = np.zeros(slots, np.int32)
    return Schedule(period=2, group=group, due=lambda t: jnp.zeros(slots, bool), never=True)


def _check_slots(slots: int) -> None:
    if slots < 1:
        raise ValueError(f"clients_per_round must be at least 1, got {slots}")
