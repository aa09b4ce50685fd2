"""Statistics that clients share through the server, besides the model."""

from __future__ import annotations

from collections.abc import Callable

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.client import Aggregator, Follow
from fedjax_sim.base.model import Context, Variables
from fedjax_sim.base.parts import Part


class Shared(Part):
    """Statistics that clients share besides the model, for their objective, such as class means.

    The server keeps them and sends them to every client that trains, whose objective finds them in
    ``Context.shared``. Both directions count as traffic.
    """

    def init(self, variables: Variables, /) -> PyTree:
        """Returns the statistics before the first round."""
        raise NotImplementedError

    def send(self, trained: Variables, context: Context, /) -> PyTree:
        """Returns the message of a client with the model ``trained``; () for nothing."""
        return ()

    def reduce(
        self,
        shared_state: PyTree,
        messages: PyTree,
        weights: Array,
        clients: int,
        aggregator: Aggregator,
        /,
    ) -> PyTree:
        """Returns the next statistics, see :meth:`fedjax_sim.base.LocalUpdate.reduce`."""
        return shared_state

    @property
    def follow(self) -> Follow | None:
        """Updates them with the aggregate; None: unchanged."""
        return None

    @property
    def told(self) -> Callable[[PyTree], PyTree] | None:
        """Selects the part that is sent and that the objective reads; None: all."""
        return None
