"""Who trains, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

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
    """What a selection needs of the execution: a function of every client."""

    def per_client(
        self, fn: Callable[[PyTree, ClientView], PyTree], common: PyTree, data: ClientData
    ) -> PyTree:
        """``fn(common, client)`` for every client: ``[N, ...]``."""


class Outlook(NamedTuple):
    """What a clock foresees of the clients as a round begins.

    Attributes:
        seconds: ``(client int32[K], uploads int32[K] | int) -> f32[K]``, of a whole visit to each:
          the download, its local steps and the upload. ``uploads`` says how many share the uplink,
          if it is shared.
        awake: ``(client int32[K]) -> bool[K]``; client N is not.
        deadline: the seconds of a round at most; infinite for any number.
    """

    seconds: Callable[[Array, Array | int], Array]
    awake: Callable[[Array], Array]
    deadline: float


class SelectionNext(Protocol):
    """Draws one client, for a model that leaves the server alone."""

    def __call__(self, key: Array, state: PyTree, data: ClientData, taken: Array, /) -> Array:
        """``int32[]``, none of ``taken int32[T]``, in which N stands for none."""


class SelectionSee(Protocol):
    """Updates the state of a selection with the models of a round."""

    def __call__(
        self, state: PyTree, client: Array, updates: Variables, moved: Variables, /
    ) -> PyTree:
        """Returns the new state.

        Args:
            state: after ``Selection.update``.
            client: ``int32[P]``, the clients of the updates; N for a row without one, which may
                hold NaN.
            updates: ``[P, *p]``, measured from the server model before the round.
            moved: ``[*p]``, the change of the server model since then.
        """


class SelectionTimed(Protocol):
    """Draws the clients of a round on a clock."""

    def __call__(
        self, key: Array, state: PyTree, data: ClientData, clients: Array, free: Array,
        visits: Array, outlook: Outlook, /,
    ) -> tuple[Array, PyTree]:  # fmt: skip
        """As :meth:`Selection.draw`, given the clock's forecast."""


class Poll(NamedTuple):
    """Questions to some clients before the clients of a round are drawn.

    On a clock the draw waits for the slowest answer. A client that was asked about the model has
    downloaded it, and is not sent it again if it trains.

    Attributes:
        whom: ``(key, state, data) -> int32[K]``, the different clients to ask; N for nobody.
        tell: ``(state, client int32[K], answers [K, ...]) -> state``, the state with which the
          round's clients are drawn. N marks a client that is asleep or nobody; ``answers`` is () if
          nothing was asked about the model.
        ask: ``(variables, client) -> small arrays``, one client's answer to the server model, with
          the client's own leaves; it costs a forward pass over its samples, and the model is sent
          to all who are asked. None: they are asked about their devices only.
        numbers: how many numbers of 4 bytes each client sends about its device.
    """

    whom: Callable[[Array, PyTree, ClientData], Array]
    tell: Callable[[PyTree, Array, PyTree], PyTree]
    ask: Callable[[Variables, ClientView], PyTree] | None = None
    numbers: int = 0


Participation = Literal["poisson", "fixed", "epochs", "cyclic"]
"""How clients take part, whatever their samples are and whatever they sent before.

"poisson": every client by its own coin in every round, those beyond the slots left out at random.
"fixed": a cohort of fixed size, drawn uniformly without replacement in every round.
"epochs": a client at most once in each epoch of ⌊N/S⌋ rounds, for S slots.
"cyclic": a client at most once in any ⌊N/S⌋ rounds.
"""


class Selection(Part):
    """Chooses the client that each slot visits."""

    HOOKS = (
        *("init", "draw", "sticky", "update", "may_idle", "active", "reads", "setup_traffic"),
        *("everyone", "another", "timed", "poll", "times", "see", "participation"),
    )

    def init(self, variables: Variables, data: ClientData, execution: PerClient, /) -> PyTree:
        """Returns the state before the first round; () for no state."""
        return ()

    def draw(
        self, key: Array, state: PyTree, data: ClientData, clients: Array, free: Array,
        visits: Array, /,
    ) -> tuple[Array, PyTree]:  # fmt: skip
        """Returns ``int32[S]``, a client for each slot, and the new state.

        Args:
            key: the key of the draw.
            state: the previous state.
            data: the population.
            clients: ``int32[S]``, the client that each slot visited last.
            free: ``bool[S]``, the slots that need a client: one that no other slot visits, or N,
                and the slot is idle in this round. The others keep their clients.
            visits: ``int32[S]``, the number of clients that trained the slot's model since it left
                the server.
        """
        raise NotImplementedError

    @property
    def sticky(self) -> bool:
        """Whether a slot keeps its client until it is due; else all slots are always free."""
        return False

    def update(self, state: PyTree, client: Array, info: LocalInfo, /) -> PyTree:
        """Returns the new state, given ``client int32[P]`` (N: none) and its report ``[P]``."""
        return state

    @property
    def may_idle(self) -> bool:
        """Whether there may be more slots than clients; some slots are then always idle."""
        return False

    @property
    def active(self) -> float | None:
        """Expected number of clients that train in a round, if slots idle; None: one a slot."""
        return None

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the numbers in a client's report that ``update`` reads, 4 bytes each."""
        return ()

    @property
    def setup_traffic(self) -> SetupTrafficOf | None:
        """Counts the traffic before the first round; None if there is none."""
        return None

    @property
    def everyone(self) -> bool:
        """Whether there must be a slot for every client."""
        return False

    @property
    def another(self) -> SelectionNext | None:
        """Draws one client, as ``draw`` draws a cohort of one; None: it cannot."""
        return None

    @property
    def timed(self) -> SelectionTimed | None:
        """The draw on a clock; None: ``draw``."""
        return None

    @property
    def poll(self) -> Poll | None:
        """The questions to clients before the draw; None if there are none."""
        return None

    @property
    def times(self) -> bool:
        """Whether ``update`` reads the measured seconds in ``info.extra["seconds"]``.

        It needs a clock.
        """
        return False

    @property
    def see(self) -> SelectionSee | None:
        """Updates the state with the models that returned in the round; None: no update."""
        return None

    @property
    def participation(self) -> Participation | None:
        """The distribution of the cohorts, which private mechanisms rely on; None: unknown."""
        return None


class Schedule(Part):
    """Determines which slots the server collects, and when."""

    HOOKS = (
        *("period", "group", "due", "serverless", "round_factor", "at_work", "seconds"),
        "one_round",
    )

    @property
    def period(self) -> int:
        """The rounds that a model is in flight; with 1 no model outlives a round."""
        return 1

    @property
    def group(self) -> NDArray[np.int32]:
        """``int32[S]``: slots of one group are due together."""
        raise NotImplementedError

    def due(self, t: Array, /) -> Array:
        """Returns ``bool[S]``, the slots collected at the end of round ``t int32[]``.

        Rounds count from 0; -1 is before the first.
        """
        raise NotImplementedError

    @property
    def serverless(self) -> bool:
        """Whether nothing is ever due (gossip): the mean of the slots is evaluated."""
        return False

    @property
    def round_factor(self) -> float:
        """The rounds to run for each round of FedAvg that the user budgets."""
        return 1.0

    @property
    def at_work(self) -> int | None:
        """The number of models in flight, if a round collects the first ones that return.

        None: a round collects the models that it sent.
        """
        return None

    @property
    def seconds(self) -> float | None:
        """The fixed duration of a round; None: it ends when its slots are full."""
        return None

    @property
    def one_round(self) -> bool:
        """Whether no model outlives a round, whatever the settings are."""
        return False

    @property
    def group_sizes(self) -> list[int]:
        """The number of slots in each group."""
        return np.unique(self.group, return_counts=True)[1].tolist()


class Moves(Protocol):
    """How models move between slots in one round."""

    def take(self, slots: Slots, order: Array) -> Slots:
        """The slots ``order int32[P]`` after the move, ``[P]``; S and above give any row."""

    def received(self) -> Array:
        """The models that each slot gets from other slots, ``int32[S]``."""


class Redistribution(Protocol):
    """Where models go between two local rounds."""

    def __call__(self, key: Array, slots: int, /) -> Moves:
        """The moves of S slots: mostly :class:`fedjax_sim.redistribution.Gather` or ``Mixing``."""


class LearnedRedistribution(Part):
    """A redistribution that depends on the models, and may keep a state."""

    HOOKS = ("init", "move", "reads", "beside")

    def init(self, slots: int, /) -> PyTree:
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
        """How many numbers of 4 bytes travel with every model between clients."""
        return 0


AnyRedistribution = Redistribution | LearnedRedistribution
"""What :func:`fedjax_sim.compose` takes as ``redistribution``: where models go, learned or not."""
