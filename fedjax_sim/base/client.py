"""What a client does with the model that it receives."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.cohort import Gathered, LocalInfo
from fedjax_sim.base.data import ClientData, ClientView
from fedjax_sim.base.model import Context, Leaves, Variables
from fedjax_sim.base.parts import Part
from fedjax_sim.base.survey import Survey
from fedjax_sim.base.train import Train


class SetupTraffic(NamedTuple):
    """What travels once, before the first round.

    Attributes:
        up: bytes sent by all clients together.
        down: bytes sent to them.
    """

    up: int
    down: int


class Aggregator(Protocol):
    """Reduces a stack of updates to one."""

    def __call__(self, stacked: PyTree, weights: Array, /) -> PyTree:
        """``[P, *p]``, ``f32[P]`` -> ``[*p]``.

        A row of weight 0 is absent, even if it holds NaN: a slot that is not due, or a row that
        holds no slot. The result does not depend on the order of rows, is the common row if all are
        equal, and keeps the dtypes. At least one weight is positive.
        """


class Reduce(Protocol):
    """Turns the clients' messages of a round into the next shared state."""

    def __call__(
        self,
        shared_state: PyTree,
        messages: PyTree,
        weights: Array,
        clients: int,
        aggregator: Aggregator,
        /,
    ) -> PyTree:
        """Returns the new shared state.

        Args:
            shared_state: the one before.
            messages: ``[P, *]``, one of each row, as they were sent.
            weights: ``f32[P]``, how much each client's model counts in the composition; a row of
                weight 0 is absent.
            clients: N.
            aggregator: the composition's, which takes the place of a mean of weights: a robust rule
                guards a control variate as it guards the model.
        """


class Follow(Protocol):
    """Turns what the server has aggregated into the next shared state."""

    def __call__(self, shared_state: PyTree, step: Variables, gathered: Gathered, /) -> PyTree:
        """Returns the new shared state.

        It is not called in a round in which the server collects nothing.

        Args:
            shared_state: what :class:`Reduce` made of it in this round.
            step: ``[*p]``, the aggregate of the updates, before the server's own part.
            gathered: the updates behind it.
        """


class SetupTrafficOf(Protocol):
    """Counts what travels once, before the first round."""

    def __call__(self, variables: Variables, data: ClientData, /) -> SetupTraffic:
        """Only shapes of ``variables`` are known; ``data.start`` is that of one run, concrete."""


class LocalUpdate(Part):
    """Trains one model on one client; ``compose`` batches it over a cohort.

    A local update overrides ``train`` and ``steps_for``, and what else differs from the defaults.
    """

    def client_state(self, variables: Variables, /) -> PyTree:
        """Returns the initial state of each client, for the initial model; () for no state."""
        return ()

    def shared_state(self, variables: Variables, /) -> PyTree:
        """Returns the initial state that the server keeps and sends along with every model."""
        return ()

    @property
    def train(self) -> Train:
        """Trains one model on one client: a method, or a :class:`TrainInSteps`."""
        raise NotImplementedError

    def reduce(
        self,
        shared_state: PyTree,
        messages: PyTree,
        weights: Array,
        clients: int,
        aggregator: Aggregator,
        /,
    ) -> PyTree:
        """Returns the next shared state, see :class:`Reduce`."""
        return shared_state

    def change(self, **settings: Any) -> LocalUpdate:
        """Returns the local update with other settings; a wrapper changes the one that it wraps."""
        return self.replace(**settings)

    def steps_for(self, samples: Any, /) -> Any:
        """Returns T_k for n_k = ``samples``, a number or an array; of drawn T_k, the largest."""
        raise NotImplementedError

    @property
    def epochs(self) -> float:
        """E."""
        return 1.0

    @property
    def batch_size(self) -> int:
        """B."""
        raise NotImplementedError

    @property
    def peers(self) -> bool:
        """Whether ``train`` reads ``ClientView.starts``, the samples of other clients."""
        return False

    @property
    def corrections(self) -> Sequence[Correction]:
        """The corrections of its gradients."""
        return ()

    @property
    def response(self) -> Callable[[int], Sequence[float | Array]] | None:
        """Returns the weight after 1, 2, ... steps of gradient -1, from 0 and a fresh optimiser.

        The weights are numbers, or arrays if the rate is traced. None: unknown.
        """
        return None

    @property
    def fresh(self) -> bool:
        """Whether the optimiser's state is reset at the start of every visit."""
        return True

    @property
    def stops(self) -> bool:
        """Whether ``train`` takes at most ``ClientView.limit`` steps."""
        return False

    @property
    def known(self) -> bool:
        """Whether a visit takes exactly T_k steps."""
        return False

    @property
    def trained(self) -> Leaves | None:
        """The leaves that it trains; None: all."""
        return None

    @property
    def moves_start(self) -> bool:
        """Whether it trains from another model than the received one."""
        return False

    @property
    def reflects(self) -> bool:
        """Whether it sends twice its new model minus its last one."""
        return False

    @property
    def setup_traffic(self) -> SetupTrafficOf | None:
        """Counts the traffic before the first round; None if there is none."""
        return None

    @property
    def follow(self) -> Follow | None:
        """Updates the shared state with the aggregate, without uploads; None: unchanged."""
        return None

    @property
    def told(self) -> Callable[[PyTree], PyTree] | None:
        """Selects the part of the shared state that is sent to clients; None: all of it."""
        return None

    @property
    def survey(self) -> Survey | None:
        """The exchange before local training; None if there is none."""
        return None


class Wrapper(LocalUpdate):
    """A local update that changes another one, and delegates to it all that it does not override.

    Args:
        local: the local update that is wrapped, and that ``change`` changes.
    """

    local: LocalUpdate

    @property
    def inner(self) -> LocalUpdate:
        """The local update that it delegates to: ``local``, or ``local`` with other settings."""
        return self.local

    def change(self, **settings: Any) -> LocalUpdate:
        """Returns the wrapper of the changed local update."""
        return self.replace(local=self.local.change(**settings))


for _hook in (*vars(LocalUpdate), "needs"):
    if not _hook.startswith("_") and _hook != "change":
        setattr(Wrapper, _hook, property(operator.attrgetter(f"inner.{_hook}")))


class Done(NamedTuple):
    """A local update at its end, for :class:`Correction`.

    Attributes:
        info: its report.
        gradient: ``() -> [*p]``, the gradient of the client's whole loss at the received model,
          which costs a pass over its samples.
        path: ``[*p]``, the mean of the minibatch gradients along its steps, without the
          corrections; None unless a correction asked for it.
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
        """Returns the next shared state, see :class:`Reduce`."""
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

    @property
    def anchored(self) -> bool:
        """Whether ``gradient`` has the gradient of the same samples at w_recv subtracted.

        It costs one more gradient in every step.
        """
        return False

    @property
    def kind(self) -> object:
        """What it corrects: two corrections of one kind would correct twice, and are rejected."""
        return type(self)

    @property
    def pull(self) -> float | Array | None:
        """μ, if the correction only adds μ (w - w_recv) to the gradient; else None."""
        return None

    @property
    def dual(self) -> float | Array | None:
        """α, if each client subtracts α (w_k - w_recv) from an h_k that it keeps; else None."""
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
            client_state: what its local update keeps, see :class:`LocalUpdate`.
        """
