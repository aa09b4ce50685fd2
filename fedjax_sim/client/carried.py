"""What local SGD carries from visit to visit: at a client, and through the server."""

from __future__ import annotations

from typing import NamedTuple

from fedjax_sim.base import Accompanied, PyTree


class Common(NamedTuple):
    """What clients share through the server, and what each sends for it.

    Attributes:
        optimizer: the state of the optimiser, if it is averaged.
        corrections: their shared states.
        shared: see :class:`fedjax_sim.base.Shared`.
    """

    optimizer: PyTree
    corrections: tuple[PyTree, ...]
    shared: PyTree = ()


class Kept(NamedTuple):
    """What a client keeps between its visits.

    Attributes:
        optimizer: the state of the optimiser, if it is kept.
        corrections: their states.
        memory: see :class:`fedjax_sim.base.Memory`.
        companion: its companion, if it has one.
    """

    optimizer: PyTree
    corrections: tuple[PyTree, ...]
    memory: PyTree = ()
    companion: Accompanied | tuple[()] = ()
