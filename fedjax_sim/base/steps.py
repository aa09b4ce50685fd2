"""Numbers of steps that are drawn."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from fedjax_sim.base.arrays import Array
from fedjax_sim.base.origin import Origin, shown


class StepsDraw(Protocol):
    """Draws a number of steps."""

    def __call__(self, key: Array, /) -> Array:
        """``int32[]``, at least 1; ``key`` is one that all clients of the round have."""


class DrawnSteps(NamedTuple):
    """The steps of a round, as many for each of its clients, whatever their numbers of samples.

    Attributes:
        draw: of a round.
        most: it draws at most this (static).
        origin: the call that made it.
    """

    draw: StepsDraw
    most: int
    origin: Origin | None = None

    def __repr__(self) -> str:
        return shown(self)
