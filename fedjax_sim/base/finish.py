"""What clients and server do once more after the last round."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.data import ClientView
from fedjax_sim.base.model import Variables
from fedjax_sim.base.need import Need
from fedjax_sim.base.origin import Origin, shown


class FinishTell(Protocol):
    """What a client tells the server of its samples, given the final model."""

    def __call__(self, server: Variables, client: ClientView, /) -> PyTree:
        """Returns arrays, which are summed over all clients."""


class FinishMove(Protocol):
    """What the server makes of the final model."""

    def __call__(self, key: Array, server: Variables, total: PyTree, /) -> Variables:
        """Returns the model that is evaluated; ``total`` is the sum over all clients."""


class Finish(NamedTuple):
    """What changes the final model, once, after the last round.

    All clients take part: each is sent the final model, and what it tells counts as traffic. What
    is evaluated during the run is the model without it.

    Attributes:
        tell: what a client sends.
        move: the model that comes of it.
        needs: of the other parts.
        origin: the call that made it.
    """

    tell: FinishTell
    move: FinishMove
    needs: tuple[Need, ...] = ()
    origin: Origin | None = None

    def __repr__(self) -> str:
        return shown(self)
