"""What the server does with the models that it collects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.client import Aggregator, SetupTrafficOf, StateInit
from fedjax_sim.base.cohort import Cohort, Gathered
from fedjax_sim.base.data import ClientData, ClientView
from fedjax_sim.base.model import Variables
from fedjax_sim.base.need import Need
from fedjax_sim.base.origin import Origin, shown
from fedjax_sim.base.plan import Participation


class PartInit(Protocol):
    """The state of a part before the first round."""

    def __call__(self, variables: Variables, data: ClientData, /) -> PyTree:
        """() for no state."""


class Weighting(Protocol):
    """How much each collected model counts."""

    def __call__(self, samples: Array, samples_visited: Array, /) -> Array:
        """``a_k f32[P]``, at least 0.

        Args:
            samples: ``int32[P]``, n_k of the client visited last.
            samples_visited: ``int32[P]``, the samples of all clients that trained the model since
                it left the server.
        """


class PreAggregationApply(Protocol):
    """Changes the collected updates or their weights."""

    def __call__(
        self, key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort, /
    ) -> tuple[Variables, Array, PyTree]:
        """``updates [P, *p]``, ``weights f32[P]`` -> the new ones, and the new state.

        An update is what a client sent: the change of its model from ``cohort.received``.

        A row of weight 0 is absent, even if it holds NaN.
        """


class RowsLeft(Protocol):
    """How many rows are left of those that meet."""

    def __call__(self, rows: int, /) -> int:
        """Of ``rows``, which hold a model each."""


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
        """Returns ε; the arguments are those of :func:`fedjax_sim.privacy.epsilon`."""


class PreAggregation(NamedTuple):
    """Changes the collected updates or their weights before they are aggregated.

    Normalisation, staleness, trust: all that needs the whole stack, but reduces nothing. Applied in
    order. What acts on each message alone is a :class:`Sending`.

    Attributes:
        init: makes the state.
        apply: the change.
        reads: the names of the numbers in a client's report that it needs, see :class:`LocalInfo`:
          4 bytes each in every visit. n_k is not one of them: it does not change, and the server
          knows it.
        setup_traffic: what travels before the first round; None: nothing.
        mixes: if a row that leaves it is made of several clients' updates: how many rows there are.
          None: every row stays one client's.
        epsilon: the ε of its noise, if the plain mean of its rows is all that the server uses;
          None: it is not a private mechanism.
        drops: whether it gives some rows the weight 0.
        weighs: whether it changes the weights alone: every row stays what its client sent.
        needs: of the other parts.
        origin: the call that made it.
    """

    init: PartInit
    apply: PreAggregationApply
    reads: tuple[str, ...] = ()
    setup_traffic: SetupTrafficOf | None = None
    mixes: RowsLeft | None = None
    epsilon: MechanismEpsilon | None = None
    drops: bool = False
    weighs: bool = False
    needs: tuple[Need, ...] = ()
    origin: Origin | None = None

    def __repr__(self) -> str:
        return shown(self)


class BroadcastSend(Protocol):
    """The model that one client is sent."""

    def __call__(
        self, key: Array | None, state: PyTree, server: Variables, client: ClientView, /
    ) -> tuple[Variables, PyTree]:
        """Returns the model and a tag; ``key`` None asks for the one to evaluate, undrawn."""


class BroadcastUpdate(Protocol):
    """What the server keeps for its next broadcasts."""

    def __call__(
        self, state: PyTree, server: Variables, gathered: Gathered, aggregator: Aggregator, /
    ) -> PyTree:
        """Returns the new state, after the server has moved to ``server``."""


class Offered(Protocol):
    """How many models a client chooses among."""

    def __call__(self, state: PyTree, /) -> Array:
        """``int32[]``."""


class Broadcast(NamedTuple):
    """Which model a slot starts from when it leaves the server.

    Attributes:
        init: makes the state.
        send: the model for one client.
        update: the state after the server has moved.
        offered: if the client chooses among several models: their number. Each is downloaded
          uncompressed, and the choice costs 4 bytes up. None: the client is sent one model.
        several: whether slots that leave together may start from different models; what each
          received is then kept, a stack of models more.
        tags: what its tag says, in a word ("staleness"); "" if it has none.
        needs: of the other parts.
        origin: the call that made it.
        reads_updates: whether ``update`` reads ``gathered.updates``, see :class:`Server`.
    """

    init: StateInit
    send: BroadcastSend
    update: BroadcastUpdate
    offered: Offered | None = None
    several: bool = False
    tags: str = ""
    needs: tuple[Need, ...] = ()
    origin: Origin | None = None
    reads_updates: bool = True

    def __repr__(self) -> str:
        return shown(self)


class RefreshCorrect(Protocol):
    """Brings a model in flight up to date."""

    def __call__(
        self, server: Variables, server_samples: Array, local: Variables, samples: Array, /
    ) -> Variables:
        """The model that the client goes on with.

        Args:
            server: the server model w_t.
            server_samples: ``f32[]``, N_t, the samples behind it.
            local: the model in flight w_k.
            samples: ``f32[]``, n_k.
        """


class Refresh(NamedTuple):
    """What a model that stays in flight takes from the new server model.

    Attributes:
        correct: the model that goes on; None: the one in flight, unchanged.
        downloads: whether it needs the server model (counted as traffic).
        needs: of the other parts.
        origin: the call that made it.
    """

    correct: RefreshCorrect | None
    downloads: bool
    needs: tuple[Need, ...] = ()
    origin: Origin | None = None

    def __repr__(self) -> str:
        return shown(self)


class ServerUpdate(Protocol):
    """Decides how far the server model moves."""

    def __call__(
        self,
        key: Array,
        step: Variables,
        server: Variables,
        state: PyTree,
        gathered: Gathered,
        /,
    ) -> tuple[Variables, PyTree]:
        """Returns the step that is taken, w_{t+1} - w_t, and the new state.

        Leaves that do not travel, see :class:`fedjax_sim.base.Exchange`, are None in all models.

        Args:
            key: of the server in this round.
            step: the aggregate of the updates, or what an earlier server update made of it.
            server: w_t.
            state: the one before.
            gathered: the updates behind the aggregate; ``gathered.cohort.data`` is the population.
        """


class DownloadBytes(Protocol):
    """The size of the server model on its way down."""

    def __call__(self, variables: Variables, updates: int, /) -> int:
        """Bytes to a client that has the server model of ``updates`` updates ago."""


class Server(NamedTuple):
    """How the server model moves, given the aggregate of the updates.

    Attributes:
        init: makes the state.
        update: the move.
        download_bytes: bytes of the server model on its way down; None: all of it.
        needs: of the other parts.
        setup_traffic: what travels before the first round; None: nothing.
        origin: the call that made it.
        reads_updates: whether ``update`` reads ``gathered.updates``. If no part reads the updates
          and the aggregator is the mean, they are summed as the clients finish, and a cohort of any
          size takes the memory of one update.
        replaces: whether the server model becomes the aggregate.
        dual: α, if its state is the mean of the h_k that clients keep for
          :attr:`fedjax_sim.base.Correction.dual`; None: it is not.
    """

    init: StateInit
    update: ServerUpdate
    download_bytes: DownloadBytes | None = None
    needs: tuple[Need, ...] = ()
    setup_traffic: SetupTrafficOf | None = None
    origin: Origin | None = None
    reads_updates: bool = True
    replaces: bool = False
    dual: float | Array | None = None

    def __repr__(self) -> str:
        return shown(self)


class Measure(Protocol):
    """Measures a round."""

    def __call__(
        self, key: Array, state: PyTree, server: Variables, models: Variables, cohort: Cohort, /
    ) -> tuple[Mapping[str, Array], PyTree]:
        """Returns ``f32[]`` by name, and the new state.

        Args:
            key: of the diagnostic in this round.
            state: of the diagnostic.
            server: the server model after the round.
            models: ``[P, *p]``, as they were sent, or trained if they were not.
            cohort: the round; ``cohort.present`` says which rows trained.
        """


class Diagnostic(NamedTuple):
    """Measures a round and changes nothing.

    Attributes:
        init: makes the state.
        measure: the numbers of a round.
        needs: of the other parts.
        origin: the call that made it.
    """

    init: PartInit
    measure: Measure
    needs: tuple[Need, ...] = ()
    origin: Origin | None = None

    def __repr__(self) -> str:
        return shown(self)
