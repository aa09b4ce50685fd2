"""The length of a visit, if it is not E epochs."""

from __future__ import annotations

from typing import Protocol

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.model import Context, Variables
from fedjax_sim.base.parts import Part


class DrawnSteps(Part):
    """A random number of local steps, the same for all clients of a round."""

    def draw(self, key: Array, shared: PyTree, /) -> Array:
        """Returns ``int32[]``; with 0 steps a client sends back the received model.

        Args:
            key: a key common to all clients of the round.
            shared: the statistics of ``local_sgd(shared=...)``, or ().
        """
        raise NotImplementedError

    @property
    def most(self) -> int:
        """The largest number that it draws (static)."""
        raise NotImplementedError


class Until(Protocol):
    """Ends a visit before its last epoch."""

    def __call__(self, variables: Variables, epoch: Array, context: Context, /) -> Array:
        """``bool[]``, whether training is over; asked before every epoch, numbered from 0."""
