"""The part of a model that travels, and changes of what clients send."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeAlias

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.data import ClientData
from fedjax_sim.base.model import Leaves, Variables
from fedjax_sim.base.parts import Part

SendTogether: TypeAlias = Callable[[Array, Variables, Array, Array], Variables]
"""Changes the updates of colluding clients: ``(key, updates, client, sends) -> updates``.

The updates are ``[P, *p]``, ``client`` is ``int32[P]`` and ``sends`` ``bool[P]``.
"""

Choose: TypeAlias = Callable[[Array, Variables, Array, Array, Array], tuple[Array, Array]]
"""Chooses who sends: ``(key, updates, weights, client, sends) -> sends, chance``.

The updates are ``[P, *p]``, ``weights f32[P]`` are the server's, ``client`` is ``int32[P]`` and
``sends`` ``bool[P]``; ``chance f32[P]`` is the probability with which each row was to send. Rows
that do not send may hold NaN.
"""


class Sent(NamedTuple):
    """One client's upload.

    Attributes:
        update: the change that the receiver adds to the model that the client received.
        message: the accompanying message, such as the change of a control variate; or ().
        kept: the client's new state.
        present: ``bool[]``, whether anything is sent; if not, it takes no bytes and no time.
        bytes: ``int32[]``, the bytes of the update; None if ``Sending.bytes`` counts them.
    """

    update: Variables
    message: PyTree
    kept: PyTree
    present: Array | bool = True
    bytes: Array | None = None


class Sending(Part):
    """Changes what clients send: compression, clipping, noise, an attack.

    It acts whenever a model is sent: at an upload, in every hop from client to client, to every
    neighbour in a graph. A model that stays in flight continues as it was sent.
    """

    def init(self, variables: Variables, data: ClientData, /) -> PyTree:
        """Returns the state of each client before it first sends; () for no state."""
        return ()

    def send(
        self, key: Array, kept: PyTree, update: Variables, message: PyTree, client: Array, /
    ) -> Sent:
        """Returns what one client sends.

        Args:
            key: the client's key for this round and part.
            kept: the client's state.
            update: the trained model minus the received model.
            message: the message that accompanies the model.
            client: ``int32[]``, k.
        """
        return Sent(update, message, kept)

    @property
    def together(self) -> SendTogether | None:
        """Changes the updates of all clients of a round, after ``send``; None: no change."""
        return None

    @property
    def choose(self) -> Choose | None:
        """Chooses which of the clients that trained will send, before ``send``; None: all.

        The server divides the weight of an update by its probability, so that the aggregate is an
        unbiased estimate of the aggregate of all that trained. Such a part ``withholds``.
        """
        return None

    @property
    def numbers(self) -> int:
        """The count of 4-byte numbers that each client that trained sends for ``choose``."""
        return 0

    @property
    def bytes(self) -> Callable[[Variables], int] | None:
        """Counts the bytes of an update for a receiver that knows w_recv; None: unchanged.

        If the part is ``measured``, this is the maximum.
        """
        return None

    @property
    def measured(self) -> bool:
        """Whether the bytes depend on the update: then ``Sent.bytes`` has them.

        They are summed on the device and known only after training. Until then the clock and
        :meth:`fedjax_sim.Algorithm.traffic` assume the maximum, as does the collection of models
        that are in flight at the end of a run. Models that go from client to client and fragments
        count whole, whatever the code.
        """
        return False

    withholds = False
    """Whether a client may send nothing."""

    screens = False
    """Whether a client that sends nothing because of this part has failed.

    It then restores its state from before the visit and is counted as skipped.
    """

    @property
    def hear(self) -> Callable[[PyTree, Variables], PyTree] | None:
        """Updates the client's state with the received model, before ``send``; None: no change."""
        return None

    messages = False
    """Whether it also changes the message sent along with the model."""

    forges = False
    """Whether it is an attack; honest clients send their true updates."""


class Coverage(Protocol):
    """Chooses the entries of a model that a client has."""

    def __call__(self, variables: Variables, client: Array, round: Array, /) -> PyTree:
        """Returns bools that broadcast to each leaf.

        Args:
            variables: the model; only shapes are known.
            client: ``int32[]``.
            round: ``int32[]``.
        """


class Exchange(Part):
    """Selects the leaves of a model that travel between clients and server."""

    @property
    def own(self) -> Leaves | None:
        """The leaves that stay with the clients, which each train their own; None: no leaf."""
        return None

    @property
    def frozen(self) -> Leaves | None:
        """The leaves that are not trained and that every client has; None: no leaf."""
        return None

    @property
    def fragments(self) -> tuple[Leaves, ...]:
        """The leaves of each fragment, if fragments travel in turn; (): all in every round.

        In round t the server collects fragment t mod P of all slots, and a slot that keeps its
        client replaces its own fragment by the new one.
        """
        return ()

    @property
    def coverage(self) -> Coverage | None:
        """The entries that each client receives, trains and sends; None: all entries.

        In the model that a client trains, the others are 0. The server averages each entry over the
        clients that have it, and keeps the entries that nobody has.
        """
        return None

    nothing = False
    """Whether no leaf travels."""
