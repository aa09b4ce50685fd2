"""Corrections of local training, shared statistics, and types that several roles use."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.cohort import Gathered, LocalInfo
from fedjax_sim.base.data import ClientData, ClientView
from fedjax_sim.base.model import Context, Variables
from fedjax_sim.base.parts import Part


class SetupTraffic(NamedTuple):
    """The traffic before the first round.

    Attributes:
        up: bytes sent by all clients together.
        down: bytes sent to all clients together.
    """

    up: int
    down: int


class Aggregator(Protocol):
    """Reduces a stack of updates to one."""

    def __call__(self, stacked: PyTree, weights: Array, /) -> PyTree:
        """``[P, *p]``, ``f32[P]`` -> ``[*p]``.

        A row of weight 0 is absent, even if it holds NaN: a slot that is not due, or a row without
        a slot. The result does not depend on the order of rows, is the common row if all rows are
        equal, and keeps the dtypes. At least one weight is positive.
        """


class Follow(Protocol):
    """Updates a shared state with the aggregate of a round."""

    def __call__(self, shared_state: PyTree, step: Variables, gathered: Gathered, /) -> PyTree:
        """Returns the new shared state.

        It is not called in a round in which the server collects nothing.

        Args:
            shared_state: the state after ``reduce`` in this round.
            step: ``[*p]``, the aggregate of the updates, before the server update.
            gathered: the updates behind it.
        """


SetupTrafficOf: TypeAlias = Callable[[Variables, ClientData], SetupTraffic]
"""Counts the traffic before the first round.

Only shapes of the variables are known; ``data.start`` is concrete, of one run.
"""


class Done(NamedTuple):
    """The end of a local update, for :class:`Correction`.

    Attributes:
        info: the client's report.
        gradient: ``() -> [*p]``, computes the gradient of the client's whole loss at the received
          model, which costs a pass over its samples.
        path: ``[*p]``, the mean of the minibatch gradients along its steps, without the
          corrections; None unless a correction reads it.
    """

    info: LocalInfo
    gradient: Callable[[], PyTree]
    path: PyTree


class Correction(Part):
    """Changes every local gradient, usually against client drift, and the state behind that change.

    A correction overrides the methods that it needs; the defaults keep, send and change nothing.
    """

    def client_state(self, params: PyTree, /) -> PyTree:
        """Returns the initial state of each client, for the parameters of the initial model."""
        return ()

    def shared_state(self, params: PyTree, /) -> PyTree:
        """Returns the initial state that the server keeps and sends along with the model."""
        return ()

    def direction(
        self,
        gradient: PyTree,
        params: PyTree,
        context: Context,
        client_state: PyTree,
        shared_state: PyTree,
        /,
    ) -> PyTree:
        """Returns the corrected gradient ``[*p]``, given the gradient at the weights ``params``."""
        return gradient

    def finish(
        self,
        params: PyTree,
        context: Context,
        client_state: PyTree,
        shared_state: PyTree,
        done: Done,
        /,
    ) -> tuple[PyTree, PyTree]:
        """Returns the client's next state and its message to the server; () for nothing."""
        return (), ()

    def reduce(
        self,
        shared_state: PyTree,
        messages: PyTree,
        weights: Array,
        clients: int,
        aggregator: Aggregator,
        /,
    ) -> PyTree:
        """Returns the next shared state, see :meth:`fedjax_sim.base.LocalUpdate.reduce`."""
        return shared_state

    @property
    def path(self) -> bool:
        """Whether ``finish`` reads ``Done.path``."""
        return False

    @property
    def follow(self) -> Follow | None:
        """Updates the shared state with the aggregate; None: unchanged."""
        return None

    @property
    def ask(self) -> Callable[[Callable[[], PyTree], Context], PyTree] | None:
        """Returns a client's answer to the exchange before training; None if there is no exchange.

        It is called as ``ask(gradient, context)``. ``gradient()`` is the gradient of the client's
        whole loss at the received model, which costs a pass over its samples.
        """
        return None

    def tell(self, shared_state: PyTree, answer: PyTree, /) -> PyTree:
        """Returns the shared state to train with, given the aggregate of the answers."""
        return shared_state

    anchored = False
    """Whether ``gradient`` has the gradient of the same samples at w_recv subtracted.

    It costs one more gradient in every step.
    """

    @property
    def reads_samples(self) -> bool:
        """Whether it reads more of a client's samples than the gradients of its steps.

        DP-SGD adds noise only to these gradients, so it rejects a correction that reads more.
        """
        return True

    @property
    def kind(self) -> object:
        """The kind of correction: two of one kind would correct twice, and are rejected."""
        return type(self)

    @property
    def pull(self) -> float | Array | None:
        """μ, if the correction only adds μ (w - w_recv) to the gradient; else None."""
        return None

    @property
    def dual(self) -> float | Array | None:
        """α, if each client subtracts α (w_k - w_recv) from an h_k that it keeps; else None."""
        return None


class Shared(Part):
    """Statistics that clients share besides the model, for their objective, such as class means.

    The server keeps them and sends them to every client that trains; objectives read them in
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
    def downloaded(self) -> Callable[[PyTree], PyTree] | None:
        """Selects the part that is sent and that the objective reads; None: all."""
        return None


class Personal(Protocol):
    """The model that a client itself uses."""

    def __call__(
        self, key: Array, received: Variables, client: ClientView, client_state: PyTree, /
    ) -> Variables:
        """Returns client k's own model.

        Args:
            key: the client's own.
            received: the model that the client would be sent now.
            client: its training samples.
            client_state: the client's state of the local update, see :class:`LocalUpdate`.
        """
