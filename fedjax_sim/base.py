"""Types and protocols that every other module speaks in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

Array = jax.Array
PyTree = Any
"""A nested container of arrays; ``[S, *p]`` marks a stack of S of them on a leading axis."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClientData:
    """Pooled samples and a ragged (CSR) list of the samples that each client owns.

    Samples are stored once; a partition is only integers, so a batch of partitions (one per seed)
    shares ``x``, ``y`` and ``index`` and differs in ``start`` alone.

    Attributes:
        x: ``[n_total, *feature]``, any dtype; uint8 images stay uint8.
        y: ``int32[n_total]``, class labels.
        index: ``int32[nnz]``, rows of ``x`` grouped by client.
        start: ``int32[N + 1]``; client k owns ``index[start[k]:start[k + 1]]``.
        capacity: the largest client's number of samples (static: it sizes the shuffle buffer).
        budget: ``int32[N]``, the samples that count as one epoch of client k, and as its n_k in
          every weight; None: all that it owns. Less where some are copies (FedAug), so that every
          method takes as many steps and trusts a client as much.
        root: ``int32[2]``, the server's own samples are ``index[root[0]:root[1]]``; None: it has
          none.
        copies: whether ``index`` may have entries from n_total on (static): such an entry is a copy
          of row ``entry - n_total``, to be altered in every step by the local update's transforms.
    """

    x: Array
    y: Array
    index: Array
    start: Array
    capacity: int = dataclasses.field(metadata={"static": True})
    budget: Array | None = None
    root: Array | None = None
    copies: bool = dataclasses.field(default=False, metadata={"static": True})


class MissingRootError(ValueError):
    """A method needs samples of the server's own, and the data have none."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ClientView:
    """One client: the pooled arrays of :class:`ClientData` and where its list lies in them.

    Attributes:
        x: ``[n_total, *feature]``.
        y: ``int32[n_total]``.
        index: ``int32[nnz]``.
        start: ``int32[]``, the first entry of the client in ``index``.
        size: ``int32[]``, n_k.
        capacity: the largest client's n_k (static).
        id: ``int32[]``, k; None for the server's own samples.
        budget: ``int32[]``, the samples that count as one epoch; None: n_k.
        starts: ``int32[N + 1]`` of all clients, for a local update with ``peers``; else None.
        copies: see :class:`ClientData` (static).
    """

    x: Array
    y: Array
    index: Array
    start: Array
    size: Array
    capacity: int = dataclasses.field(metadata={"static": True})
    id: Array | None = None
    budget: Array | None = None
    starts: Array | None = None
    copies: bool = dataclasses.field(default=False, metadata={"static": True})


class Batch(NamedTuple):
    """A minibatch of one client.

    Attributes:
        x: ``[B, *feature]``.
        y: ``int32[B]``.
        mask: ``bool[B]``, False for padding.
        copy: ``bool[B]``, whether a row is one of the copies of :class:`ClientData`; None where the
          data have none.
        peer: what other clients gave for this step (FedMix: the means x̄ and ȳ); else None.
    """

    x: Array
    y: Array
    mask: Array
    copy: Array | None = None
    peer: PyTree = None


class Transform(Protocol):
    """Changes a minibatch before the step: augmentation, poisoned labels, a peer's means."""

    def __call__(self, key: Array, batch: Batch, client: ClientView, /) -> Batch:
        """``key`` is the step's own."""


class Variables(NamedTuple):
    """A model: trainable ``params`` and ``state`` (BatchNorm statistics and the like)."""

    params: PyTree
    state: PyTree


class Model(NamedTuple):
    """A pair of pure functions; see :mod:`fedjax_sim.models` for adapters.

    Attributes:
        init: ``(key) -> Variables``.
        apply: ``(variables, x [B, *feature], *, train, mask=None, key=None) ->
          (logits f32[B, M], state)``. ``mask bool[B]`` marks the real rows of a padded minibatch:
          padding must not reach the state. ``key`` feeds dropout.
    """

    init: ModelInit
    apply: ModelApply


class ModelInit(Protocol):
    """Draws a model."""

    def __call__(self, key: Array, /) -> Variables:
        """Returns fresh variables."""


class ModelApply(Protocol):
    """Evaluates a model on a minibatch."""

    def __call__(
        self,
        variables: Variables,
        x: Array,
        /,
        *,
        train: bool,
        mask: Array | None = None,
        key: Array | None = None,
    ) -> tuple[Array, PyTree]:
        """Returns logits ``f32[B, M]`` and the new state."""


class LossFn(Protocol):
    """A per-sample loss."""

    def __call__(self, logits: Array, labels: Array, /) -> Array:
        """``f32[B, M]``, ``int32[B]`` -> ``f32[B]``."""


class Objective(Protocol):
    """What a client minimises on one minibatch."""

    def __call__(
        self, params: PyTree, state: PyTree, received: PyTree, batch: Batch, key: Array, /
    ) -> tuple[Array, PyTree]:
        """Returns the scalar loss and the new state.

        Args:
            params: the weights w_k being trained.
            state: the model's other variables.
            received: w_recv, the weights as this client received them.
            batch: the samples.
            key: for dropout.
        """


class LocalInfo(NamedTuple):
    """What one client reports of its local update.

    Attributes:
        loss: ``f32[]``, mean training loss over the samples visited.
        steps: ``int32[]``, T_k, the minibatches it took.
        samples: ``int32[]``, the samples it visited.
        extra: ``f32[]`` by name, what wrappers of a local update measured. It leaves the client,
          and counts as traffic, where a selection or screen ``reads`` it.
    """

    loss: Array
    steps: Array
    samples: Array
    extra: dict[str, Array] = {}  # noqa: RUF012 (a NamedTuple's default, never changed)


class Trained(NamedTuple):
    """What one local update gives.

    Attributes:
        variables: the trained model, as it is sent.
        memory: what the client keeps for its next visit.
        message: what it sends beside the model; () for nothing.
        info: its report.
    """

    variables: Variables
    memory: PyTree
    message: PyTree
    info: LocalInfo


class Opening(NamedTuple):
    """What travels once, before the first round.

    Attributes:
        up: bytes sent by all clients together.
        down: bytes sent to them.
    """

    up: int
    down: int


class LocalUpdate(NamedTuple):
    """Trains one model on one client; ``compose`` batches it over a cohort.

    A wrapper (compression, a personal model) replaces the functions that it changes.

    Attributes:
        memory: ``(variables) -> pytree``, what each client keeps between its visits, at the start;
          () for nothing.
        shared: ``(variables) -> pytree``, what the server keeps and sends along with every model,
          at the start; () for nothing.
        train: ``(key, variables, client: ClientView, memory, shared) -> Trained``; ``key`` is the
          client's own for this round.
        absorb: ``(shared, messages [P, *], samples int32[P], clients: int) -> shared``, after every
          round; a row of 0 samples (n_k) is absent; ``clients`` is N.
        change: ``(**settings) -> LocalUpdate``, the same with some settings of
          :func:`fedjax_sim.local.local_sgd` replaced, but ``drift`` and ``transforms`` added at the
          end; ``drift`` None drops the terms that are there. A wrapper changes what it wraps and
          wraps it again.
        upload_bytes: ``(variables, visits: int) -> int``, bytes of a model on its way up, after so
          many visits to the client that sends it since it left the server. It is asked where the
          server knows what the client received; other clients, who do not, are sent all of it.
        epochs: E.
        batch_size: B.
        peers: whether ``train`` needs ``ClientView.starts``.
        opening: ``(variables, data) -> Opening``, of shapes and one run's ``start`` (concrete);
          None: nothing.
    """

    memory: Callable[[Variables], PyTree]
    shared: Callable[[Variables], PyTree]
    train: Callable[..., Trained]
    absorb: Callable[..., PyTree]
    change: Callable[..., LocalUpdate]
    upload_bytes: Callable[[Variables, int], int]
    epochs: float
    batch_size: int
    peers: bool = False
    opening: Callable[[Variables, ClientData], Opening] | None = None


class Drift(NamedTuple):
    """A term added to every local gradient against client drift, and the state behind it.

    Attributes:
        memory: ``(params) -> pytree``, what each client keeps, at the start; () for nothing.
        shared: ``(params) -> pytree``, what the server keeps and sends, at the start.
        gradient: ``(params, received, memory, shared) -> [*p]``, the term.
        finish: ``(params, received, memory, shared, done: Done) -> (memory, message)``, always two:
          what the client keeps, as ``memory`` has it, and what it sends, () for nothing.
        absorb: ``(shared, messages [P, *], samples int32[P], clients: int) -> shared``; see
          :class:`LocalUpdate`.
        path: whether ``finish`` needs ``Done.path``.
    """

    memory: Callable[[PyTree], PyTree]
    shared: Callable[[PyTree], PyTree]
    gradient: Callable[[PyTree, PyTree, PyTree, PyTree], PyTree]
    finish: Callable[..., tuple[PyTree, PyTree]]
    absorb: Callable[[PyTree, PyTree, Array, int], PyTree]
    path: bool = False


class Done(NamedTuple):
    """A local update at its end, for :class:`Drift`.

    Attributes:
        info: its report.
        gradient: ``() -> [*p]``, the gradient of the client's whole loss at the received model,
          which costs a pass over its samples.
        path: ``[*p]``, the mean of the minibatch gradients along its steps, without the drift
          terms; None unless a drift asked for it.
    """

    info: LocalInfo
    gradient: Callable[[], PyTree]
    path: PyTree


class Aggregator(Protocol):
    """Reduces a stack of models to one."""

    def __call__(self, stacked: PyTree, weights: Array, /) -> PyTree:
        """``[S, *p]``, ``f32[S]`` -> ``[*p]``.

        A row of weight 0 is absent, even if it holds NaN: a slot that is not due, or an empty
        place on a device (there are some where S is no multiple of the devices). The result does
        not depend on the order of rows, is the common row if all are equal, and keeps the dtypes.
        At least one weight is positive.
        """


class Cohort(NamedTuple):
    """What is known of the models that meet at the server; rows are places.

    Attributes:
        server: the server model w_t, as it was at the start of the round.
        received: ``[P, *p]`` or ``[1, *p]``, what the models' changes are measured from: the server
          model, or what each slot left the server with where that may be another one.
        client: ``int32[P]``, k; N where nobody was visited.
        samples: ``int32[P]``, n_k; 0 of nobody.
        info: ``[P]``, the clients' reports.
        tag: ``[P]``, what the dispatch said of the model that was received: its staleness, say.
        data: the population.
    """

    server: Variables
    received: Variables
    client: Array
    samples: Array
    info: LocalInfo
    tag: PyTree
    data: ClientData


class Screen(NamedTuple):
    """Changes the collected models or their weights before they are aggregated.

    Defences and attacks, normalisation, staleness: whatever needs the server model, or the whole
    stack, but is no reduction. Screens are applied in order.

    Attributes:
        init: ``(variables, data) -> state``.
        apply: ``(key, state, models [P, *p], weights f32[P], cohort: Cohort) ->
          (models, weights, state)``; a row of weight 0 is absent, even if it holds NaN.
        reads: the numbers of ``LocalInfo`` or its ``extra`` that it needs, by name: 4 bytes each in
          every visit. n_k is not one of them: it does not change, and the server knows it.
    """

    init: Callable[[Variables, ClientData], PyTree]
    apply: Callable[..., tuple[PyTree, Array, PyTree]]
    reads: tuple[str, ...] = ()


class Selection(NamedTuple):
    """Which client each slot visits.

    Attributes:
        init: ``(variables, data, execution) -> state``.
        draw: ``(key, state, data, held int32[S], vacant bool[S], visits int32[S]) ->
          (clients int32[S], state)``: gives every vacant slot a client that no other slot holds, or
          N, nobody: then the slot rests in this round. ``visits`` counts the clients that trained
          the slot's model since it left the server.
        held: whether a slot keeps its client until it is due (True) or moves every round.
        update: ``(state, client int32[P], info: LocalInfo [P]) -> state``, after the visits; client
          N is nobody.
        spare: whether there may be more slots than clients; some rest in every round then.
        active: the clients that train in a round, on average, where slots rest; None: one a slot.
        reads: what ``update`` needs of a client's report, see :class:`Screen`.
        opening: ``(variables, data) -> Opening``, see :class:`LocalUpdate`.
    """

    init: Callable[..., PyTree]
    draw: Callable[..., tuple[Array, PyTree]]
    held: bool
    update: Callable[[PyTree, Array, LocalInfo], PyTree] = lambda state, client, info: state
    spare: bool = False
    active: float | None = None
    reads: tuple[str, ...] = ()
    opening: Callable[[Variables, ClientData], Opening] | None = None


class Dispatch(NamedTuple):
    """Which model a slot starts from when it leaves the server.

    Attributes:
        init: ``(variables) -> state``.
        send: ``(key, state, server, client: ClientView) -> (variables, tag)``, for one client;
          ``key`` None asks for the model without chance, to evaluate it.
        absorb: ``(state, server, models [P, *p], weights f32[P], cohort: Cohort, aggregator) ->
          state``, after the server has moved to ``server``; a row of weight 0 is absent.
        offered: ``(state) -> int32[]``, where the client makes the choice: how many models of the
          dispatch's own it is sent, all of them whole; it tells its choice in 4 bytes. None: it is
          sent one, the server's of now or before.
        several: whether slots that leave together may start from different models; screens then
          cost a stack more, of what each received.
    """

    init: Callable[[Variables], PyTree]
    send: Callable[..., tuple[Variables, PyTree]]
    absorb: Callable[..., PyTree]
    offered: Callable[[PyTree], Array] | None = None
    several: bool = False


class Personal(Protocol):
    """The model that a client itself uses."""

    def __call__(
        self, key: Array, received: Variables, client: ClientView, memory: PyTree, /
    ) -> Variables:
        """Returns client k's own model.

        Args:
            key: the client's own.
            received: what the dispatch would send it now.
            client: its training samples.
            memory: what its local update keeps, see :class:`LocalUpdate`.
        """


class Probe(NamedTuple):
    """Measures a round and changes nothing.

    Attributes:
        init: ``(variables, data) -> state``.
        measure: ``(key, state, server, models [P, *p], cohort: Cohort) -> (f32[] by name, state)``:
          ``server`` after the round, ``models`` as trained; a place with id S or without client is
          told by ``cohort.client == N``.
    """

    init: Callable[[Variables, ClientData], PyTree]
    measure: Callable[..., tuple[dict[str, Array], PyTree]]


class Schedule(NamedTuple):
    """Which slots the server collects, and when.

    Attributes:
        period: the rounds that a model is in flight; 1 carries no slots from round to round.
        group: ``int32[S]`` (NumPy), the slots that are due together.
        due: ``(round int32[]) -> bool[S]``, by slot.
        never: whether nothing is ever due (gossip): the mean of the slots is evaluated.
    """

    period: int
    group: Any
    due: Any
    never: bool = False


class Redistribution(Protocol):
    """Where models go between two local rounds."""

    def __call__(self, key: Array, slots: int, /) -> Array:
        """Returns ``int32[S]``, the slot whose model slot i holds next, or a mixing matrix.

        A matrix W ``f32[S, S]`` with rows that sum to 1: slot i holds ``sum_j W[i, j] w_j``.
        """


class Receive(NamedTuple):
    """What a model that stays in flight takes from the new server model.

    Attributes:
        correct: ``(server [*p], server_samples f32[], local [*p], samples f32[]) -> [*p]``.
        downloads: whether it needs the server model (counted as traffic).
    """

    correct: Any
    downloads: bool


class Server(NamedTuple):
    """How the server model moves, given the aggregate.

    Attributes:
        init: ``(variables) -> state``.
        update: ``(key, aggregate, server, state, data) -> (server, state)``.
        download_bytes: ``(variables, updates: int) -> int``, bytes of the server model on its way
          down to a client that has the one of so many updates ago; None: all of it.
    """

    init: Callable[[Variables], PyTree]
    update: Callable[[Array, Variables, Variables, PyTree, ClientData], tuple[Variables, PyTree]]
    download_bytes: Callable[[Variables, int], int] | None = None


class Slots(NamedTuple):
    """Models in flight, at their places on the devices: P, at least S, as many on each device.

    Attributes:
        variables: ``[P, *p]``.
        id: ``int32[P]``, the slot's number: results follow it, never the place on a device; S
          where a place is empty.
        client: ``int32[P]``, the client visited last; N where a place is empty.
        visits: ``int32[P]``, the clients that trained this model since it left the server.
        seen: ``int32[P]``, the sum of their n_k.
        info: ``[P]``, the last client's report.
        tag: ``[P]``, the dispatch's.
        received: ``[P, *p]``, what they left the server with; () where nothing asks for it.
    """

    variables: Variables
    id: Array
    client: Array
    visits: Array
    seen: Array
    info: LocalInfo
    tag: PyTree
    received: PyTree


class FedState(NamedTuple):
    """Everything that a round hands to the next.

    Attributes:
        round: ``int32[]``, rounds done.
        server: the server model w_t.
        server_samples: ``f32[]``, N_t, the samples behind w_t (0 at the start).
        opt_state: of the server.
        slots: the models in flight, or None where none outlives a round.
        selection: the state of the selection.
        memory: ``[N, *]``, what each client keeps.
        shared: what the local updates share through the server.
        dispatch: the state of the dispatch.
        screens: the states of the screens.
        probes: the states of the probes.
    """

    round: Array
    server: Variables
    server_samples: Array
    opt_state: PyTree
    slots: Slots | None
    selection: PyTree
    memory: PyTree
    shared: PyTree
    dispatch: PyTree
    screens: PyTree
    probes: PyTree


class Traffic(NamedTuple):
    """Bytes of what travels.

    Attributes:
        upload: of a model sent by a client.
        download: of a model sent to a client.
        message: of what a client sends besides, in every round in which it trains: the change of
          SCAFFOLD's control variate, the numbers that a part ``reads``.
        shared: of what the server sends it besides, in every such round.
    """

    upload: int
    download: int
    message: int
    shared: int


class Metrics(NamedTuple):
    """What one round reports; sums over its slots.

    Attributes:
        loss: ``f32[]``, mean training loss per sample visited.
        samples: ``int32[]``, training samples visited.
        steps: ``int32[]``, local steps that did something.
        executed: ``int32[]``, local steps that the device ran (idle lanes included).
        uploads: ``int32[]``, models sent by clients.
        downloads: ``int32[]``, models sent to clients.
        visits: ``int32[]``, clients that trained.
        probes: ``f32[]`` by name.
    """

    loss: Array
    samples: Array
    steps: Array
    executed: Array
    uploads: Array
    downloads: Array
    visits: Array
    probes: dict[str, Array]


class Algorithm(NamedTuple):
    """A federated algorithm as pure functions.

    Attributes:
        init: ``(key, variables, data) -> FedState``.
        step: ``(key, state, data) -> (FedState, Metrics)``, one local round.
        collect: ``(key, state, data) -> (Variables, uploads int32[])``: every model still in flight
          is uploaded and aggregated; the last act of a run.
        evaluated: ``(key, state, data) -> Variables``, the model that is evaluated.
        traffic: ``(variables, data) -> Traffic``; takes shapes and gives Python integers.
        opening: ``(variables, data) -> Opening``; needs one run's ``start`` besides.
        slots: S, the models in flight.
        personal: ``(key, state, data, score, constants, tasks) -> [N, ...]``: calls
          ``score(constants, variables, task)`` with each client's own model; None where all
          clients use the evaluated one.
        tempo: rounds run for each round of FedAvg that the user budgets.
    """

    init: Any
    step: Any
    collect: Any
    evaluated: Callable[[Array, FedState, ClientData], Variables]
    traffic: Callable[[Variables, ClientData], Traffic]
    opening: Callable[[Variables, ClientData], Opening]
    slots: int
    personal: Any = None
    tempo: float = 1.0
