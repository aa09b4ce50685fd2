"""The part of a model that travels."""

from __future__ import annotations

from fedjax_sim.base.model import Leaves
from fedjax_sim.base.parts import Part


class Exchange(Part):
    """Selects the leaves of a model that travel between clients and server."""

    @property
    def own(self) -> Leaves | None:
        """The leaves that stay with the clients, each of which trains its own; None: no leaf."""
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

    nothing = False
    """Whether no leaf travels."""
