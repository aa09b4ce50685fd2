"""The part of a model that travels."""

from __future__ import annotations

from typing import Protocol

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.model import Leaves, Variables
from fedjax_sim.base.parts import Part


class Coverage(Protocol):
    """Chooses the entries of a model that a client has."""

    def __call__(self, variables: Variables, client: Array, round: Array, /) -> PyTree:
        """Returns bools that broadcast to each leaf.

        Args:
            variables: the model; only shapes are known.
            client: ``int32[]``.
            round: ``int32[]``.
        """


class Exchange(Part):
    """Selects the leaves of a model that travel between clients and server."""

    @property
    def own(self) -> Leaves | None:
        """The leaves that stay with the clients, which each train their own; None: no leaf."""
        return None

    @property
    def frozen(self) -> Leaves | None:
        """The leaves that are not trained and that every client has; None: no leaf."""
        return None

    @property
    def fragments(self) -> tuple[Leaves, ...]:
        """The leaves of each fragment, if fragments travel in turn; (): all in every round.

        In round t the server collects fragment t mod P of all slots, and a slot that keeps its
        client replaces its own fragment by the new one.
        """
        return ()

    @property
    def coverage(self) -> Coverage | None:
        """The entries that each client receives, trains and sends; None: all entries.

        In the model that a client trains, the others are 0. The server averages each entry over the
        clients that have it, and keeps the entries that nobody has.
        """
        return None

    nothing = False
    """Whether no leaf travels."""
