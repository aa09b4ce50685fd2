"""Selections and flights: which clients train, and when models are collected."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.client import SetupTrafficOf
from fedjax_sim.base.cohort import LocalInfo
from fedjax_sim.base.data import ClientData, ClientView
from fedjax_sim.base.model import Variables
from fedjax_sim.base.parts import Part

if TYPE_CHECKING:
    from fedjax_sim.base.round import Slots


class PerClient(Protocol):
    """The method of an execution that a selection may call in its ``init``."""

    def per_client(
        self, fn: Callable[[PyTree, ClientView], PyTree], common: PyTree, data: ClientData
    ) -> PyTree:
        """Returns ``fn(common, client)`` for every client: ``[N, ...]``."""


class Outlook(NamedTuple):
    """A clock's forecast at the start of a round.

    Attributes:
        seconds: maps ``(client int32[K], uploads int32[K] | int)`` to the duration of a visit to
          each client, ``f32[K]``: the download, its local steps and the upload. ``uploads`` is the
          number of clients that share a shared uplink.
        awake: maps ``client int32[K]`` to ``bool[K]``; False for client N.
        deadline: seconds after which the round is closed; infinite without a deadline.
    """

    seconds: Callable[[Array, Array | int], Array]
    awake: Callable[[Array], Array]
    deadline: float


Participation = Literal["poisson", "fixed", "epochs", "cyclic"]
"""The distribution of cohorts, independent of the clients' samples and messages.

"poisson": every client joins independently in every round; random ones beyond the slots are left
out.
"fixed": a cohort of fixed size, drawn uniformly without replacement in every round.
"epochs": a client at most once in each epoch of ⌊N/S⌋ rounds, for S slots.
"cyclic": a client at most once in any ⌊N/S⌋ rounds.
"""


class Selection(Part):
    """Chooses the client that each slot visits."""

    def init(self, variables: Variables, data: ClientData, execution: PerClient, /) -> PyTree:
        """Returns the state before the first round; () for no state."""
        return ()

    def draw(
        self, key: Array, state: PyTree, data: ClientData, clients: Array, free: Array,
        visits: Array, /
    ) -> tuple[Array, PyTree]:  # fmt: skip
        """Returns ``int32[S]``, a client for each slot, and the new state.

        Args:
            key: the key of the draw.
            state: the previous state.
            data: the population.
            clients: ``int32[S]``, the client that each slot visited last.
            free: ``bool[S]``, the slots that need a client: one that no other slot visits, or N to
              leave the slot idle in this round. The others keep their clients.
            visits: ``int32[S]``, the number of clients that trained the slot's model since it left
                the server.
        """
        raise NotImplementedError

    sticky = False
    """Whether a slot keeps its client until it is due; else all slots are always free."""

    def update(self, state: PyTree, client: Array, info: LocalInfo, /) -> PyTree:
        """Returns the new state, given ``client int32[P]`` (N: none) and its report ``[P]``."""
        return state

    repeats = False
    """Whether several slots may visit one client in a round; their updates are then the same.

    It needs clients that keep nothing between their visits.
    """

    may_idle = False
    """Whether there may be more slots than clients; some slots are then always idle."""

    @property
    def expected_visits(self) -> Callable[[PyTree, ClientData, int], Array] | None:
        """Maps ``(state, data, slots)`` to the expected visits of each client, ``f32[N]``.

        It is the probability that the client is drawn, given the state before the draw; a client
        that several slots may visit counts for each. None: unknown.
        """
        return None

    @property
    def active(self) -> float | None:
        """Expected number of clients that train in a round, if slots idle; None: one per slot."""
        return None

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the numbers in a client's report that ``update`` reads, 4 bytes each."""
        return ()

    @property
    def setup_traffic(self) -> SetupTrafficOf | None:
        """Counts the traffic before the first round; None if there is none."""
        return None

    everyone = False
    """Whether there must be a slot for every client."""

    @property
    def another(self) -> Callable[[Array, PyTree, ClientData, Array], Array] | None:
        """Maps ``(key, state, data, taken)`` to one client, for a model that is sent by itself.

        The client ``int32[]`` is not one of ``taken int32[T]``, in which N stands for no client,
        and is distributed like a cohort of one. None: clients cannot be drawn one by one.
        """
        return None

    @property
    def timed(self) -> Callable[..., tuple[Array, PyTree]] | None:
        """The draw on a clock: ``draw`` with a last argument :class:`Outlook`; None: ``draw``."""
        return None

    @property
    def poll(self) -> Callable[[Array, PyTree, ClientData], Array] | None:
        """Maps ``(key, state, data)`` to the clients to poll before the draw, ``int32[K]``.

        They are all different; N stands for no client. On a clock the draw waits for the slowest
        answer. A client that answers about the model has downloaded it, and is not sent it again if
        it trains. None: no client is polled.
        """
        return None

    @property
    def ask(self) -> Callable[[Variables, ClientView], PyTree] | None:
        """Maps the server model, with the client's own leaves, and a client to its answer.

        The answer is small arrays; it costs a forward pass over the client's samples, and the model
        is sent to all polled clients. None: the poll concerns only their devices.
        """
        return None

    device_numbers = 0
    """How many numbers of 4 bytes each polled client sends about its device."""

    def record_answers(self, state: PyTree, client: Array, answers: PyTree, /) -> PyTree:
        """Returns the state for the draw, given the answers ``[K, ...]`` of ``client int32[K]``.

        N marks a client that is asleep or not polled; ``answers`` is () without ``ask``.
        """
        return state

    times = False
    """Whether ``update`` reads the measured seconds in ``info.extra["seconds"]``.

    It needs a clock.
    """

    @property
    def see(self) -> Callable[[PyTree, Array, Variables, Variables], PyTree] | None:
        """Maps ``(state, client, updates, moved)`` to the state after the round's models returned.

        ``client int32[P]`` are the clients of the updates; N for a row without one, which may hold
        NaN. ``updates [P, *p]`` are measured from the server model before the round, ``moved
        [*p]`` is the change of the server model since then. None: no update.
        """
        return None

    @property
    def participation(self) -> Participation | None:
        """The distribution of the cohorts, which private mechanisms rely on; None: unknown."""
        return None


class Moves(Protocol):
    """The moves of models between slots in one round."""

    def take(self, slots: Slots, order: Array) -> Slots:
        """Returns the slots ``order int32[P]`` after the move; any row for S and above.

        ``slots.variables`` is () where only the clients of the slots are needed.
        """

    def received(self) -> Array:
        """Returns the number of models that each slot receives from others, ``int32[S]``."""


class Redistribution(Protocol):
    """Moves models between two local rounds."""

    def __call__(self, key: Array, slots: int, /) -> Moves:
        """Returns the moves of S slots, such as :class:`fedjax_sim.redistribution.Gather`."""


class LearnedRedistribution(Part):
    """A redistribution that depends on the models, and may keep a state."""

    def init(self, slots: int, data: ClientData, /) -> PyTree:
        """Returns the state before the first round, for S slots."""
        return ()

    def move(self, key: Array, state: PyTree, slots: Slots, /) -> tuple[Moves, PyTree]:
        """Returns the moves of the ``[S]`` slots of the last round, and the new state."""
        raise NotImplementedError

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the numbers in ``info.extra`` that it reads."""
        return ()

    @property
    def beside(self) -> int:
        """The count of 4-byte numbers that travel with every model between clients."""
        return 0

    @property
    def relays(self) -> int:
        """The number of intermediate servers between the clients and the server.

        Each sends one more model up when models are due, and receives one when models start.
        """
        return 0


AnyRedistribution = Redistribution | LearnedRedistribution
"""The types of a redistribution."""


class Refresh(Part):
    """Updates a model in flight from the new server model, which its client downloads."""

    def correct(
        self, server: Variables, server_samples: Array, local: Variables, samples: Array, /
    ) -> Variables:
        """Returns the model that continues.

        Args:
            server: w_t, the server model.
            server_samples: ``f32[]``, N_t, the number of samples behind it.
            local: w_k, the model in flight.
            samples: ``f32[]``, n_k.
        """
        raise NotImplementedError


Evaluated = Literal["server", "in_flight"]
"""The evaluated model: the server model, or the aggregate of the models in flight."""


class Flight(Part):
    """Determines when the server collects models, and how they move until then.

    ``slots`` is S, the number of models that train in a round.
    """

    @property
    def period(self) -> int:
        """The rounds that a model is in flight; with 1 no model outlives a round."""
        return 1

    def group(self, slots: int, /) -> NDArray[np.int32]:
        """Returns ``int32[S]``: slots of one group are due together; one group by default."""
        return np.zeros(slots, np.int32)

    def due(self, t: Array, slots: int, /) -> Array:
        """Returns ``bool[S]``, the slots collected after round ``t int32[]``; by default all.

        Rounds count from 0; -1 is before the first.
        """
        return jnp.ones(slots, bool)

    def collected(self, active: int, /) -> int:
        """Returns S, given the number of clients that train at once."""
        return active

    @property
    def redistribution(self) -> AnyRedistribution | None:
        """The moves of models between two rounds; None: they stay in their slots."""
        return None

    @property
    def refresh(self) -> Refresh | None:
        """The update of models in flight from the server model; None: no update."""
        return None

    @property
    def evaluated(self) -> Evaluated:
        """The evaluated model: the server model, or the aggregate of the models in flight."""
        return "server"

    serverless = False
    """Whether no model is ever due, as in gossip; the mean of the slots is then evaluated."""

    @property
    def round_factor(self) -> float:
        """The rounds to run for each round of FedAvg that the user budgets."""
        return 1.0

    asynchronous = False
    """Whether a round collects the first models that return, whenever they were sent."""

    @property
    def seconds(self) -> float | None:
        """The fixed duration of an asynchronous round; None: it ends when its slots are full."""
        return None
