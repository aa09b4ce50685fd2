"""The server: weighting, aggregation, the step of the server model, and the last exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.client import Aggregator, SetupTrafficOf
from fedjax_sim.base.cohort import Cohort, Gathered
from fedjax_sim.base.data import ClientData, ClientView
from fedjax_sim.base.model import Leaves, Variables
from fedjax_sim.base.parts import Part
from fedjax_sim.base.plan import Participation


class Weighting(Protocol):
    """Computes the weight of each collected model.

    If a part has ``per_visit = True``, its weights are divided by
    :attr:`Selection.expected_visits <fedjax_sim.base.Selection.expected_visits>`.
    """

    def __call__(self, samples: Array, samples_visited: Array, /) -> Array:
        """``a_k f32[P]``, at least 0.

        Args:
            samples: ``int32[P]``, n_k of the client visited last.
            samples_visited: ``int32[P]``, the samples of all clients that trained the model since
                it left the server.
        """


DownloadBytes: TypeAlias = Callable[[Variables, int], int]
"""Counts the bytes of the server model for a client that has the one of n updates ago."""


class MechanismEpsilon(Protocol):
    """Computes the ε of a private mechanism's noise."""

    def __call__(
        self,
        *,
        clients: int,
        clients_per_round: float,
        rounds: int,
        delta: float,
        sampling: Participation,
        slots: int,
    ) -> float:
        """Returns ε; takes the arguments of :func:`fedjax_sim.privacy.epsilon`."""


class PreAggregation(Part):
    """Changes the collected updates or their weights before they are aggregated.

    Normalisation, staleness and trust need all updates at once and reduce nothing. Parts are
    applied in order. A change of each message on its own is a :class:`Sending`.
    """

    def init(self, variables: Variables, data: ClientData, /) -> PyTree:
        """Returns the state before the first round; () for no state."""
        return ()

    def apply(
        self, key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort, /
    ) -> tuple[Variables, Array, PyTree]:
        """Returns the new updates ``[P, *p]``, the new weights ``f32[P]`` and the new state.

        An update is what a client sent: the change of its model from ``cohort.received``. A row of
        weight 0 is absent, even if it holds NaN.
        """
        raise NotImplementedError

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the numbers in a client's report that it reads, see :class:`LocalInfo`.

        Each costs 4 bytes in every visit, except n_k, which is constant and known to the server.
        """
        return ()

    @property
    def setup_traffic(self) -> SetupTrafficOf | None:
        """Counts the traffic before the first round; None if there is none."""
        return None

    @property
    def mixes(self) -> Callable[[int], int] | None:
        """Maps the number of rows to the number after mixing; None if rows are not mixed."""
        return None

    @property
    def epsilon(self) -> MechanismEpsilon | None:
        """Computes ε of its noise if the server uses only the plain mean; None: not private."""
        return None

    drops = False
    """Whether it gives some rows the weight 0."""

    weighs = False
    """Whether it changes only the weights."""


class Broadcast(Part):
    """Chooses the model that a slot starts from when it leaves the server."""

    def init(self, variables: Variables, data: ClientData, /) -> PyTree:
        """Returns the state before the first round; () for no state."""
        return ()

    def send(
        self, key: Array | None, state: PyTree, server: Variables, client: ClientView, /
    ) -> tuple[Variables, PyTree]:
        """Returns the model for one client and a tag; ``key`` None: the model to evaluate."""
        raise NotImplementedError

    def update(
        self, state: PyTree, server: Variables, gathered: Gathered, aggregator: Aggregator, /
    ) -> PyTree:
        """Returns the new state, after the server has moved to ``server``."""
        return state

    @property
    def offered(self) -> Callable[[PyTree], Array] | None:
        """Maps the state to the number of models that a client downloads, ``int32[]``.

        None: one model is sent. Several are sent uncompressed, and the client chooses or mixes.
        """
        return None

    @property
    def numbers(self) -> int:
        """The count of 4-byte numbers that a client sends back about the offered models."""
        return 0

    by_client = False
    """Whether each client is sent a model of its own; clients that never trained have none."""

    several = False
    """Whether slots that leave together may start from different models.

    The received models are then kept: one more stack of models.
    """

    tags = ""
    """The meaning of the tag in one word ("staleness"); "" if there is no tag."""

    @property
    def reads_updates(self) -> bool:
        """Whether ``update`` reads ``gathered.updates``, see :class:`Server`."""
        return True


class Server(Part):
    """Moves the server model, given the aggregate of the updates."""

    def init(self, variables: Variables, /) -> PyTree:
        """Returns the state before the first round; () for no state."""
        return ()

    def update(
        self, key: Array, step: Variables, server: Variables, state: PyTree, gathered: Gathered, /
    ) -> tuple[Variables, PyTree]:
        """Returns the step w_{t+1} - w_t and the new state.

        Leaves that do not travel, see :class:`fedjax_sim.base.Exchange`, are None in all models.

        Args:
            key: the server's key in this round.
            step: the aggregate of the updates, or the step of an earlier server update.
            server: w_t.
            state: the previous state.
            gathered: the updates behind the aggregate; ``gathered.cohort.data`` is the population.
        """
        raise NotImplementedError

    @property
    def download_bytes(self) -> DownloadBytes | None:
        """Counts the bytes of the server model on its way down; None: all of it."""
        return None

    @property
    def setup_traffic(self) -> SetupTrafficOf | None:
        """Counts the traffic before the first round; None if there is none."""
        return None

    @property
    def reads_updates(self) -> bool:
        """Whether ``update`` reads ``gathered.updates``.

        If no part reads the updates and the aggregator is the mean, they are summed as clients
        finish, and a cohort of any size needs the memory of one update.
        """
        return True

    replaces = False
    """Whether the server model becomes the aggregate."""

    @property
    def moves(self) -> Leaves | None:
        """Leaves that it changes although no client sends them; None: no leaf.

        The exchange freezes them. Clients receive them in every round. They are None in the step
        that the server is given, and are part of the step that it returns.
        """
        return None

    @property
    def dual(self) -> float | Array | None:
        """α, if its state is the mean of the h_k of ``Correction.dual``; else None."""
        return None


class Diagnostic(Part):
    """Measures a round and changes nothing."""

    def init(self, variables: Variables, data: ClientData, /) -> PyTree:
        """Returns the state before the first round; () for no state."""
        return ()

    def measure(
        self, key: Array, state: PyTree, server: Variables, models: Variables, cohort: Cohort, /
    ) -> tuple[Mapping[str, Array], PyTree]:
        """Returns ``f32[]`` by name, and the new state.

        Args:
            key: the diagnostic's key in this round.
            state: the previous state.
            server: the server model after the round.
            models: ``[P, *p]``, as they were sent, or as trained if they were not sent.
            cohort: the round; ``cohort.present`` marks the rows that trained.
        """
        raise NotImplementedError


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
