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
from fedjax_sim.base.origin import Origin, shown
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


class CorrectionInit(Protocol):
    """The state of a correction before the first round."""

    def __call__(self, params: PyTree, /) -> PyTree:
        """``params`` are those of the initial model; () for no state."""


class CorrectionDirection(Protocol):
    """What a correction makes of a gradient."""

    def __call__(
        self,
        gradient: PyTree,
        params: PyTree,
        context: Context,
        client_state: PyTree,
        shared_state: PyTree,
        /,
    ) -> PyTree:
        """``[*p]``, in place of ``gradient [*p]``, which is that at the weights ``params``."""


class CorrectionFinish(Protocol):
    """The end of a local update."""

    def __call__(
        self,
        params: PyTree,
        context: Context,
        client_state: PyTree,
        shared_state: PyTree,
        done: Done,
        /,
    ) -> tuple[PyTree, PyTree]:
        """Returns what the client keeps and what it sends; () for nothing, but always two."""


class Correction(NamedTuple):
    """Changes every local gradient, mostly against client drift, with the state behind it.

    Attributes:
        client_state: what each client keeps, at the start.
        shared_state: what the server keeps and sends, at the start.
        direction: takes the gradient's place.
        finish: the client's next state and its message.
        reduce: makes the next shared state of the messages.
        path: whether ``finish`` needs ``Done.path``.
        follow: see :class:`LocalUpdate`.
        survey: what it asks before the training; None: nothing.
        anchored: whether the gradient that it is given is less that of the same samples at the
            received model, which costs a gradient more in every step.
        pull: μ, if all that it does is to add μ (w - w_recv) to the gradient; None: it does not.
        dual: α, if each client keeps an h_k from which it takes α (w_k - w_recv) at the end of a
            visit, as in FedDyn; None: it keeps none.
        needs: of the other parts.
        origin: the call that made it.
    """

    client_state: CorrectionInit
    shared_state: CorrectionInit
    direction: CorrectionDirection
    finish: CorrectionFinish
    reduce: Reduce
    path: bool = False
    follow: Follow | None = None
    survey: CorrectionSurvey | None = None
    anchored: bool = False
    pull: float | Array | None = None
    dual: float | Array | None = None
    needs: tuple[Need, ...] = ()
    origin: Origin | None = None

    def __repr__(self) -> str:
        return shown(self)


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
