"""Types and protocols that every other module speaks in."""

from __future__ import annotations

import dataclasses
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
    """

    x: Array
    y: Array
    index: Array
    start: Array
    capacity: int = dataclasses.field(metadata={"static": True})


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
    """

    x: Array
    y: Array
    index: Array
    start: Array
    size: Array
    capacity: int = dataclasses.field(metadata={"static": True})


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
        self,
        params: PyTree,
        state: PyTree,
        received: PyTree,
        x: Array,
        y: Array,
        mask: Array,
        key: Array,
        /,
    ) -> tuple[Array, PyTree]:
        """Returns the scalar loss and the new state.

        Args:
            params: the weights w_k being trained.
            state: the model's other variables.
            received: w_recv, the weights as this client received them.
            x: ``[B, *feature]``.
            y: ``int32[B]``.
            mask: ``bool[B]``, False for padding.
            key: for dropout.
        """


class LocalInfo(NamedTuple):
    """What one client reports of its local update.

    Attributes:
        loss: ``f32[]``, mean training loss over the samples visited.
        steps: ``int32[]``, T_k, the minibatches it took.
        samples: ``int32[]``, the samples it visited.
    """

    loss: Array
    steps: Array
    samples: Array


class LocalUpdate(Protocol):
    """Trains one model on one client; ``execution`` batches it over a cohort."""

    def __call__(
        self, key: Array, variables: Variables, client: ClientView, /
    ) -> tuple[Variables, LocalInfo]:
        """Returns the trained model. ``key`` is the client's own for this round."""


class Aggregator(Protocol):
    """Reduces a stack of models to one."""

    def __call__(self, stacked: PyTree, weights: Array, /) -> PyTree:
        """``[S, *p]``, ``f32[S]`` -> ``[*p]``.

        A row of weight 0 is absent, even if it holds NaN: a slot that is not due, or an empty
        place on a device (there are some where S is no multiple of the devices). The result does
        not depend on the order of rows, is the common row if all are equal, and keeps the dtypes.
        At least one weight is positive.
        """


class Selection(NamedTuple):
    """Which client each slot visits.

    Attributes:
        init: ``(data) -> state``.
        draw: ``(key, state, data, held int32[S], vacant bool[S]) -> (clients int32[S], state)``:
          gives every vacant slot a client that no other slot holds.
        held: whether a slot keeps its client until it is due (True) or moves every round.
    """

    init: Any
    draw: Any
    held: bool


class Schedule(NamedTuple):
    """Which slots the server collects, and when.

    Attributes:
        period: the rounds that a model is in flight; 1 carries no slots from round to round.
        group: ``int32[S]`` (NumPy), the slots that are due together.
        due: ``(round int32[]) -> bool[S]``, by slot.
    """

    period: int
    group: Any
    due: Any


class Redistribution(Protocol):
    """Where models go between two local rounds."""

    def __call__(self, key: Array, slots: int, /) -> Array:
        """Returns ``int32[S]``: the slot whose model slot i holds next."""


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
        init: ``(variables) -> opt_state``.
        update: ``(aggregate, server, opt_state) -> (server, opt_state)``.
    """

    init: Any
    update: Any


class Slots(NamedTuple):
    """Models in flight, at their places on the devices: P, at least S, as many on each device.

    Attributes:
        variables: ``[P, *p]``.
        id: ``int32[P]``, the slot's number: results follow it, never the place on a device; S
          where a place is empty.
        client: ``int32[P]``, the client visited last; N where a place is empty.
    """

    variables: Variables
    id: Array
    client: Array


class FedState(NamedTuple):
    """Everything that a round hands to the next.

    Attributes:
        round: ``int32[]``, rounds done.
        server: the server model w_t.
        server_samples: ``f32[]``, N_t, the samples behind w_t (0 at the start).
        opt_state: of the server.
        slots: the models in flight, or None where none outlives a round.
        selection: the state of the selection.
    """

    round: Array
    server: Variables
    server_samples: Array
    opt_state: PyTree
    slots: Slots | None
    selection: PyTree


class Metrics(NamedTuple):
    """What one round reports; sums over its slots.

    Attributes:
        loss: ``f32[]``, mean training loss per sample visited.
        samples: ``int32[]``, training samples visited.
        steps: ``int32[]``, local steps that did something.
        executed: ``int32[]``, local steps that the device ran (idle lanes included).
        uploads: ``int32[]``, models sent by clients.
        downloads: ``int32[]``, models sent to clients.
    """

    loss: Array
    samples: Array
    steps: Array
    executed: Array
    uploads: Array
    downloads: Array


class Algorithm(NamedTuple):
    """A federated algorithm as pure functions.

    Attributes:
        init: ``(key, variables, data) -> FedState``.
        step: ``(key, state, data) -> (FedState, Metrics)``, one local round.
        collect: ``(state, data) -> (Variables, uploads int32[])``: every model still in flight is
          uploaded and aggregated; the last act of a run.
        slots: S, the models in flight.
        tempo: rounds run for each round of FedAvg that the user budgets.
    """

    init: Any
    step: Any
    collect: Any
    slots: int
    tempo: float = 1.0
