"""Which part of a model travels."""

from __future__ import annotations

from typing import NamedTuple

from fedjax_sim.base.model import Leaves
from fedjax_sim.base.need import Need
from fedjax_sim.base.origin import Origin, shown


class Exchange(NamedTuple):
    """Which leaves of a model travel between clients and server; all that are not named here.

    Attributes:
        own: those that stay with the clients, each of which trains its own; None for none.
        frozen: those that nobody trains and every client has from the start; None for none.
        fragments: if those that travel do so in turn: the leaves of each fragment. In round t the
          server collects fragment t mod P of all slots, and a slot that keeps its client takes the
          new fragment in place of its own. () for all in every round.
        nothing: whether no leaf travels.
        needs: what it needs of other parts.
        origin: the call that made it.
    """

    own: Leaves | None = None
    frozen: Leaves | None = None
    fragments: tuple[Leaves, ...] = ()
    nothing: bool = False
    needs: tuple[Need, ...] = ()
    origin: Origin | None = None

    def __repr__(self) -> str:
        return shown(self)
