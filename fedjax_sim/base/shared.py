"""What clients tell the server beside their models, and what it keeps of that for all of them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from fedjax_sim.base.arrays import PyTree
from fedjax_sim.base.client import Follow, Reduce, StateInit, Told
from fedjax_sim.base.model import Context, Variables
from fedjax_sim.base.need import Need
from fedjax_sim.base.origin import Origin, shown


class SharedSend(Protocol):
    """What a client tells the server at the end of a visit."""

    def __call__(self, trained: Variables, context: Context, /) -> PyTree:
        """``trained`` is its model; ``context.client`` its samples."""


class Shared(NamedTuple):
    """What clients learn together beside the model, for their objective: class means, say.

    The server keeps it, and sends it along to every client that trains, whose objective finds it in
    ``Context.shared``. Both ways count as traffic.

    Attributes:
        init: at the start.
        send: what a client sends.
        reduce: makes the next of what the clients sent.
        follow: what the aggregate makes of it then; None: nothing.
        told: the part of it that is sent along, and that the objective may read; None: all of it.
        needs: of the other parts.
        origin: the call that made it.
    """

    init: StateInit
    send: SharedSend
    reduce: Reduce
    follow: Follow | None = None
    told: Told | None = None
    needs: tuple[Need, ...] = ()
    origin: Origin | None = None

    def __repr__(self) -> str:
        return shown(self)
