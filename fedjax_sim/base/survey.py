"""What the clients of a round say before they train, and are told of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.data import ClientView
from fedjax_sim.base.model import Variables


class Ask(Protocol):
    """The answer of one client."""

    def __call__(
        self,
        key: Array,
        variables: Variables,
        client: ClientView,
        client_state: PyTree,
        shared_state: PyTree,
        /,
    ) -> PyTree:
        """Returns arrays; the arguments are those of :class:`Train`, the telling apart."""


class Tell(Protocol):
    """What all clients are told."""

    def __call__(self, shared_state: PyTree, aggregate: PyTree, /) -> PyTree:
        """Returns the shared state with which the round's clients train.

        Args:
            shared_state: of the rounds before.
            aggregate: of the answers, by the weights and the aggregator of the models.
        """


class Survey(NamedTuple):
    """An exchange within a round, before its training: all clients answer, and are told.

    The answers travel up; what is told counts as the shared state, which travels down. ``reduce``
    of the :class:`LocalUpdate` makes the next round's shared state of it.

    Attributes:
        ask: the answer of one client.
        tell: what the aggregate makes of the shared state.
    """

    ask: Ask
    tell: Tell

    def inside(self, inner: Callable[[PyTree], PyTree]) -> Survey:
        """The survey of a wrapper, whose client state has that of the local update ``inner``."""

        def ask(
            key: Array,
            variables: Variables,
            client: ClientView,
            client_state: PyTree,
            shared_state: PyTree,
        ) -> PyTree:
            return self.ask(key, variables, client, inner(client_state), shared_state)

        return Survey(ask, self.tell)
