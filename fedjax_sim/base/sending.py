"""What a client sends: a wrapper of one client's message, or of the stack of all."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.data import ClientData
from fedjax_sim.base.model import Variables
from fedjax_sim.base.need import Need
from fedjax_sim.base.origin import Origin, shown


class Sent(NamedTuple):
    """What leaves one client.

    Attributes:
        update: what the receiver adds to the model that it knows the client received.
        message: what is sent beside it: the change of a control variate, say; () for nothing.
        kept: what the client keeps for the next time.
        present: ``bool[]``, whether anything is sent at all.
    """

    update: Variables
    message: PyTree
    kept: PyTree
    present: Array | bool = True


class SendingInit(Protocol):
    """What each client keeps before it first sends."""

    def __call__(self, variables: Variables, data: ClientData, /) -> PyTree:
        """() for nothing; the same for all clients."""


class Send(Protocol):
    """What one client sends in place of what it would have sent."""

    def __call__(
        self, key: Array, kept: PyTree, update: Variables, message: PyTree, client: Array, /
    ) -> Sent:
        """Returns what is sent.

        Args:
            key: the client's own for this round and part.
            kept: what it keeps.
            update: the model that it trained, less the one that it received.
            message: what it sends besides.
            client: ``int32[]``, k.
        """


class Hear(Protocol):
    """What a client keeps of the model that it was sent."""

    def __call__(self, kept: PyTree, received: Variables, /) -> PyTree:
        """What it keeps now, at the end of every visit, before it sends.

        Args:
            kept: what it kept so far.
            received: the model that it was sent, from which its update is measured.
        """


class SendTogether(Protocol):
    """What clients that know each other send."""

    def __call__(self, key: Array, updates: Variables, client: Array, sends: Array, /) -> Variables:
        """``updates [P, *p]``, ``client int32[P]``, ``sends bool[P]`` -> ``[P, *p]``."""


class SentBytes(Protocol):
    """The size of what is sent."""

    def __call__(self, variables: Variables, /) -> int:
        """Bytes of the update of a model of these shapes."""


def _as_it_is(
    key: Array, kept: PyTree, update: Variables, message: PyTree, client: Array, /
) -> Sent:
    return Sent(update, message, kept)


class Sending(NamedTuple):
    """A change of what clients send: a code, a clip, noise, an attack.

    It acts whenever a model is sent: at an upload, in every hop from client to client, to every
    neighbour of a graph. A model that stays in flight goes on as it was sent.

    Attributes:
        init: what each client keeps at the start.
        send: what one client sends.
        together: what all clients of a round send, after ``send``; None: each for itself.
        bytes: the size of an update on its way to a receiver that knows the model that the client
          received; None: as before.
        withholds: whether a client may send nothing.
        screens: whether a client that sends nothing for this part's sake has failed: it keeps what
          it had before its visit, and is counted among the skipped.
        hear: what each client keeps of the model that it was sent, before ``send``; None: nothing.
        messages: whether it acts on what is sent beside the model, too.
        forges: whether it is an attack: honest clients send what they made.
        needs: of the other parts, see :mod:`fedjax_sim.engine.needs`.
        origin: the call that made it.
    """

    init: SendingInit
    send: Send = _as_it_is
    together: SendTogether | None = None
    bytes: SentBytes | None = None
    withholds: bool = False
    screens: bool = False
    hear: Hear | None = None
    messages: bool = False
    forges: bool = False
    needs: tuple[Need, ...] = ()
    origin: Origin | None = None

    def __repr__(self) -> str:
        return shown(self)
