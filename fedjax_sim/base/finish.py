"""What clients and server do once more after the last round."""

from __future__ import annotations

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.data import ClientView
from fedjax_sim.base.model import Variables
from fedjax_sim.base.parts import Part


class Finish(Part):
    """Changes the final model once, after the last round.

    All clients take part: each is sent the final model, and its answer counts as traffic.
    Evaluations during the run use the model without this change.
    """

    def tell(self, server: Variables, client: ClientView, /) -> PyTree:
        """Returns a client's arrays for the final model, which are summed over all clients."""
        raise NotImplementedError

    def move(self, key: Array, server: Variables, total: PyTree, /) -> Variables:
        """Returns the model to evaluate, given the sum ``total`` over all clients."""
        raise NotImplementedError
