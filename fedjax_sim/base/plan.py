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
from fedjax_sim.base.need import Need
from fedjax_sim.base.origin import Origin, shown

if TYPE_CHECKING:
    from fedjax_sim.base.round import Slots


class PerClient(Protocol):
    """What a selection needs of the execution: a function of every client."""

    def per_client(
        self, fn: Callable[[PyTree, ClientView], PyTree], common: PyTree, data: ClientData
    ) -> PyTree:
        """``fn(common, client)`` for every client: ``[N, ...]``."""


class SelectionInit(Protocol):
    """The state of a selection before the first round."""

    def __call__(self, variables: Variables, data: ClientData, execution: PerClient, /) -> PyTree:
        """() for no state."""


class SelectionDraw(Protocol):
    """Draws the clients of a round."""

    def __call__(
        self, key: Array, state: PyTree, data: ClientData, clients: Array, free: Array,
        visits: Array, /,
    ) -> tuple[Array, PyTree]:  # fmt: skip
        """Returns ``int32[S]``, a client for each slot, and the new state.

        Args:
            key: of the draw.
            state: of the selection.
            data: the population.
            clients: ``int32[S]``, the client that each slot visited last.
            free: ``bool[S]``, the slots that need a client: one that no other slot visits, or N,
                and the slot is idle in this round. The others keep theirs.
            visits: ``int32[S]``, the clients that trained the slot's model since it left the
                server.
        """


class SelectionNext(Protocol):
    """Draws one client, for a model that leaves the server alone."""

    def __call__(self, key: Array, state: PyTree, data: ClientData, taken: Array, /) -> Array:
        """``int32[]``, none of ``taken int32[T]``, in which N stands for none."""


class SelectionUpdate(Protocol):
    """What a selection learns of a round."""

    def __call__(self, state: PyTree, client: Array, info: LocalInfo, /) -> PyTree:
        """Returns the new state, given ``client int32[P]`` (N: none) and its report ``[P]``."""


class SelectionSee(Protocol):
    """What a selection learns of the models of a round."""

    def __call__(
        self, state: PyTree, client: Array, updates: Variables, moved: Variables, /
    ) -> PyTree:
        """Returns the new state.

        Args:
            state: after :class:`SelectionUpdate`.
            client: ``int32[P]``, whose updates the server has; N for a row without one, which may
                hold NaN.
            updates: ``[P, *p]``, from the server model as it was before the round.
            moved: ``[*p]``, how far the server model has gone since.
        """


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


class SelectionTimed(Protocol):
    """Draws the clients of a round on a clock."""

    def __call__(
        self, key: Array, state: PyTree, data: ClientData, clients: Array, free: Array,
        visits: Array, outlook: Outlook, /,
    ) -> tuple[Array, PyTree]:  # fmt: skip
        """As :class:`SelectionDraw`, and it may look at ``outlook``."""


class PollWhom(Protocol):
    """Whom the server asks in a round."""

    def __call__(self, key: Array, state: PyTree, data: ClientData, /) -> Array:
        """``int32[K]``, different clients; N for nobody."""


class PollAsk(Protocol):
    """What one client answers."""

    def __call__(self, variables: Variables, client: ClientView, /) -> PyTree:
        """Small arrays; ``variables`` are those of the server model, with the client's own leaves.

        It costs a pass forward over the client's samples.
        """


class PollTell(Protocol):
    """What a selection learns of the answers."""

    def __call__(self, state: PyTree, client: Array, answers: PyTree, /) -> PyTree:
        """Returns the state with which the round's clients are drawn.

        Args:
            state: of the selection.
            client: ``int32[K]``, those that have answered; N for who is asleep, or nobody.
            answers: ``[K, ...]``; () if nothing was asked about the model.
        """


class Poll(NamedTuple):
    """Questions to some clients before the clients of a round are drawn.

    On a clock the draw waits for the slowest answer. Whoever is asked about the model has it, and
    is not sent it again if it trains.

    Attributes:
        whom: those who are asked.
        tell: what the selection learns.
        ask: the answer of one client to the server model, which is sent to all who are asked; None:
          they are asked about their devices alone.
        numbers: what each says of its device, 4 bytes each.
    """

    whom: PollWhom
    tell: PollTell
    ask: PollAsk | None = None
    numbers: int = 0


Participation = Literal["poisson", "fixed", "epochs", "cyclic"]
"""How clients take part, whatever their samples are and whatever they sent before.

"poisson": every client by its own coin in every round, those beyond the slots left out at random.
"fixed": a cohort of fixed size, drawn uniformly without replacement in every round.
"epochs": a client at most once in each epoch of ⌊N/S⌋ rounds, for S slots.
"cyclic": a client at most once in any ⌊N/S⌋ rounds.
"""


def _learns_nothing(state: PyTree, client: Array, info: LocalInfo, /) -> PyTree:
    return state


class Selection(NamedTuple):
    """Which client each slot visits.

    Attributes:
        init: makes the state.
        draw: the clients of a round.
        sticky: whether a slot keeps its client until it is due; if not, every slot is free in every
          round.
        update: the state after the visits.
        may_idle: whether there may be more slots than clients; some are idle in every round then.
        active: the clients that train in a round, on average, if slots are idle; None: one a slot.
        reads: the names of the numbers in a client's report that ``update`` needs, see
          :class:`LocalInfo`: 4 bytes each in every visit.
        setup_traffic: what travels before the first round; None: nothing.
        everyone: whether there must be a slot for every client.
        another: draws one client, as ``draw`` would draw a cohort of one; None: it cannot.
        timed: the draw on a clock; None: ``draw``.
        poll: what clients are asked before the draw; None: nothing.
        times: whether ``update`` finds the seconds of each visit in ``info.extra["seconds"]``, as
          the server has measured them. It needs a clock.
        see: what it learns of the models after the round, which must have come back by then; None:
          nothing.
        participation: the law of the cohorts, which private mechanisms count on; None: not known.
        needs: of the other parts.
        origin: the call that made it.
    """

    init: SelectionInit
    draw: SelectionDraw
    sticky: bool
    update: SelectionUpdate = _learns_nothing
    may_idle: bool = False
    active: float | None = None
    reads: tuple[str, ...] = ()
    setup_traffic: SetupTrafficOf | None = None
    everyone: bool = False
    another: SelectionNext | None = None
    timed: SelectionTimed | None = None
    poll: Poll | None = None
    times: bool = False
    see: SelectionSee | None = None
    participation: Participation | None = None
    needs: tuple[Need, ...] = ()
    origin: Origin | None = None

    def __repr__(self) -> str:
        return shown(self)


class Due(Protocol):
    """Which slots the server collects at the end of a round."""

    def __call__(self, t: Array, /) -> Array:
        """``bool[S]`` of round ``t int32[]``, which counts from 0; -1 is before the first."""


class Schedule(NamedTuple):
    """Which slots the server collects, and when.

    Attributes:
        period: the rounds that a model is in flight; with 1 no model outlives a round.
        group: ``int32[S]`` (NumPy), the slots that are due together.
        due: the slots that are due.
        serverless: whether nothing is ever due (gossip): the mean of the slots is evaluated.
        round_factor: the rounds to run for each round of FedAvg that the user budgets.
        at_work: the models that are with clients at once, of which a round takes those that come
            back first, one a slot; None: a round takes those that it sent.
        seconds: of each round, if that is what ends it; None: it ends when its slots are full.
        one_round: whether no model outlives a round, whatever the settings are.
        needs: of the other parts.
        origin: the call that made it.
    """

    period: int
    group: NDArray[np.int32]
    due: Due
    serverless: bool = False
    round_factor: float = 1.0
    at_work: int | None = None
    seconds: float | None = None
    one_round: bool = False
    needs: tuple[Need, ...] = ()
    origin: Origin | None = None

    @property
    def group_sizes(self) -> list[int]:
        """How many slots are due together, for each group."""
        return np.unique(self.group, return_counts=True)[1].tolist()

    def __repr__(self) -> str:
        return shown(self)


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


class LearnedInit(Protocol):
    """What a redistribution knows before the first round."""

    def __call__(self, slots: int, /) -> PyTree:
        """Its state, for S slots."""


class LearnedMove(Protocol):
    """Where models go between two local rounds, by what they are."""

    def __call__(self, key: Array, state: PyTree, slots: Slots, /) -> tuple[Moves, PyTree]:
        """The moves of the ``[S]`` slots as the last round left them, and the new state."""


class LearnedRedistribution(NamedTuple):
    """A redistribution that looks at the models, and may remember something of them.

    Attributes:
        init: its state before the first round.
        move: where models go.
        reads: the numbers of ``info.extra`` that it looks at.
        beside: how many numbers, of 4 bytes each, travel with every model between clients.
        needs: of the other parts.
        origin: the call that made it.
    """

    init: LearnedInit
    move: LearnedMove
    reads: tuple[str, ...] = ()
    beside: int = 0
    needs: tuple[Need, ...] = ()
    origin: Origin | None = None

    def __repr__(self) -> str:
        return shown(self)


AnyRedistribution = Redistribution | LearnedRedistribution
"""What :func:`fedjax_sim.compose` takes as ``redistribution``: where models go, learned or not."""
