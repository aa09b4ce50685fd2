"""Streams of random numbers, by the level of the key into which they are folded.

.. code-block:: text

    seed -> run -> round t -> client k -> epoch e -> step b

``ADAPTER``, ``EPOCH``, ``TURN``, ``STEP``, ``TRANSFORM``, ``DIAGNOSTIC`` and ``SENDING`` are the
first numbers of open ranges; other streams of a level keep clear of them.
"""

from __future__ import annotations

import enum

import jax

from fedjax_sim.base import Array


class Seed(enum.IntEnum):
    """Streams folded into a seed's key."""

    WEIGHTS = 0
    ROUNDS = 1


class Weights(enum.IntEnum):
    """Streams folded into the key of a model's weights; the key itself initialises the network."""

    ADAPTER = 2**30


class Round(enum.IntEnum):
    """Streams folded into a round's key: the run's key with the round number folded in."""

    SELECTION = 0
    REDISTRIBUTION = 1
    CLIENTS = 2
    PREAGGREGATION = 3
    SERVER = 4
    PERSONAL = 5
    DIAGNOSTIC = 6
    DISPATCH = 2**30 - 6
    POLL = 2**30 - 5
    AWAKE = 2**30 - 4
    LOST = 2**30 - 3
    FINISH = 2**30 - 2
    COIN = 2**30 - 1
    DEAL = 2**30
    SENDING = 2**30 + 1


class Dispatch(enum.IntEnum):
    """Streams folded into the key of a single asynchronous dispatch."""

    CLIENT = 0
    AWAKE = 1
    LOST = 2


class Client(enum.IntEnum):
    """Streams folded into a client's key in a round."""

    EPOCH = 0
    TURN = 2**30
    STRAGGLER = 2**31 - 10
    FIRST_VISIT = 2**31 - 9
    FINAL_LOSS = 2**31 - 8
    AGREEMENT = 2**31 - 7
    TICKET = 2**31 - 6
    MIXING = 2**31 - 5
    INITIAL_LOSS = 2**31 - 4
    COMPRESSION = 2**31 - 3
    WHOLE_GRADIENT = 2**31 - 2
    BROADCAST = 2**31 - 1


class Device(enum.IntEnum):
    """Streams folded into the key of a clock's devices, which does not depend on the run."""

    COMPUTE = 0
    UP = 1
    DOWN = 2


class Epoch(enum.IntEnum):
    """Streams folded into an epoch's key; the key itself orders the samples."""

    STEP = 1


class Step(enum.IntEnum):
    """Streams folded into a step's key.

    The key itself goes to the model, which may fold or split it into its own streams from 0 on.
    """

    TRANSFORM = 2**30
    PSEUDO_LABELS = 2**31 - 7
    WIDTH = 2**31 - 6
    PRIVATE = 2**31 - 5
    ROUNDING = 2**31 - 4
    LAYER = 2**31 - 3
    ADAPTATION = 2**31 - 2
    NOISE = 2**31 - 1


def stream(key: Array, which: enum.IntEnum, number: Array | int = 0) -> Array:
    """Returns the key of a stream; in a range, the key of a ``number``."""
    return jax.random.fold_in(key, int(which) + number)
