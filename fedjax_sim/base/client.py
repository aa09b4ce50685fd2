"""What a client does with the model that it receives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.cohort import Gathered, LocalInfo
from fedjax_sim.base.data import ClientData, ClientView
from fedjax_sim.base.model import Context, Leaves, Variables
from fedjax_sim.base.need import Need
from fedjax_sim.base.parts import Origin, Part, shown
from fedjax_sim.base.survey import CorrectionSurvey, Survey
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


class StateInit(Protocol):
    """The state of a part before the first round."""

    def __call__(self, variables: Variables, /) -> PyTree:
        """``variables`` are those of the initial model; () for no state."""


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


class Told(Protocol):
    """What of the shared state clients are sent."""

    def __call__(self, shared_state: PyTree, /) -> PyTree:
        """The part that counts as traffic; the server alone needs the rest."""


class Steps(Protocol):
    """The length of a local update."""

    def __call__(self, samples: Any, /) -> Any:
        """T_k of a client with n_k = ``samples``, a number or an array; of the same kind."""


class Response(Protocol):
    """How an optimiser answers."""

    def __call__(self, steps: int, /) -> Sequence[float | Array]:
        """Where a weight that starts at 0 is after 1, 2, ... ``steps`` steps of gradient -1.

        Numbers, or arrays if the rate is traced.
        """


class SetupTrafficOf(Protocol):
    """Counts what travels once, before the first round."""

    def __call__(self, variables: Variables, data: ClientData, /) -> SetupTraffic:
        """Only shapes of ``variables`` are known; ``data.start`` is that of one run, concrete."""


class Change(Protocol):
    """Makes a local update again with other settings."""

    def __call__(self, **settings: Any) -> LocalUpdate:
        """See :class:`LocalUpdate`."""


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class LocalUpdate:
    """Trains one model on one client; ``compose`` batches it over a cohort.

    Settings are changed by ``change``, functions by :func:`wrap` or :meth:`replace`; in any
    order, nothing is lost.

    Attributes:
        client_state: what each client keeps between its visits, at the start.
        shared_state: what the server keeps and sends along with every model, at the start.
        train: the local update.
        reduce: makes the next shared state of the clients' messages, after every round.
        change: the same with some settings of :func:`fedjax_sim.local.local_sgd` replaced.
          ``corrections`` and ``transforms`` are added at the end; ``corrections=None`` drops those
          that are there. A wrapper changes what it wraps, and wraps it again.
        steps: T_k; if it is drawn, the most that it may be.
        epochs: E.
        batch_size: B.
        peers: whether ``train`` needs ``ClientView.starts``.
        corrections: what changes its gradients.
        response: how far it moves a weight under a constant gradient, from a fresh state; None: not
          known.
        fresh: whether every visit begins with a fresh state of the optimiser.
        stops: whether ``train`` heeds ``ClientView.limit``.
        known: whether a visit takes T_k steps and no fewer: its end is known when it begins.
        trained: the weights that it trains; None: all.
        moves_start: whether it trains from another model than the one that it received.
        reflects: whether it sends twice its new model less its last one.
        setup_traffic: what travels before the first round; None: nothing.
        follow: what the aggregate makes of the shared state, which costs no upload; None: nothing.
        told: what of the shared state travels with the model; None: all of it.
        survey: what clients say before they train, and are told of it; None: nothing.
        needs: of the other parts.
        origin: the call that made it.
    """

    client_state: StateInit
    shared_state: StateInit
    train: Train
    reduce: Reduce
    change: Change
    steps: Steps
    epochs: float
    batch_size: int
    peers: bool = False
    corrections: tuple[Correction, ...] = ()
    response: Response | None = None
    fresh: bool = True
    stops: bool = False
    known: bool = False
    trained: Leaves | None = None
    moves_start: bool = False
    reflects: bool = False
    setup_traffic: SetupTrafficOf | None = None
    follow: Follow | None = None
    told: Told | None = None
    survey: Survey | None = None
    needs: tuple[Need, ...] = ()
    origin: Origin | None = None

    def __repr__(self) -> str:
        return shown(self)

    def replace(self, **functions: Any) -> LocalUpdate:
        """The same with some of its attributes replaced; ``change`` keeps them."""
        return wrap(lambda local: dataclasses.replace(local, **functions), self)


def wrap(wrapper: Callable[..., LocalUpdate], *locals_: LocalUpdate) -> LocalUpdate:
    """A local update made of others, so that ``change`` changes those and makes it again.

    Args:
        wrapper: ``(*locals) -> LocalUpdate``, mostly ``dataclasses.replace`` of the first one.
        locals_: the local updates that are wrapped.

    Returns:
        ``wrapper(*locals_)`` with that ``change``.
    """

    def change(**settings: Any) -> LocalUpdate:
        return wrap(wrapper, *(local.change(**settings) for local in locals_))

    return dataclasses.replace(wrapper(*locals_), change=change)


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

    HOOKS = (
        *("client_state", "shared_state", "direction", "finish", "reduce", "path", "follow"),
        *("survey", "anchored", "pull", "dual"),
    )

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
    def survey(self) -> CorrectionSurvey | None:
        """The exchange before local training; None if there is none."""
        return None

    @property
    def anchored(self) -> bool:
        """Whether ``gradient`` has the gradient of the same samples at w_recv subtracted.

        It costs one more gradient in every step.
        """
        return False

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
