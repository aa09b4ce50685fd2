"""The state between rounds, and the metrics of a round."""

from __future__ import annotations

from typing import NamedTuple

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.brief import brief_fields
from fedjax_sim.base.clock import Elapsed, Now
from fedjax_sim.base.cohort import LocalInfo
from fedjax_sim.base.model import Variables


class Slots(NamedTuple):
    """Models in flight: ``[S]`` by slot between two rounds, ``[P]`` by row inside one.

    Attributes:
        variables: ``[S, *p]``.
        client: ``int32[S]``, the client visited last; N if the slot was idle.
        visits: ``int32[S]``, the clients that trained this model since it left the server.
        samples_visited: ``int32[S]``, the sum of their n_k.
        info: ``[S]``, the last client's report.
        tag: ``[S]``, the broadcast's tag of the model.
        received: ``[S, *p]``, the models as they left the server; () if no part needs them.
        weight: ``f32[S]``, the push-sum weight that divides a model before it is used; () without.
    """

    variables: PyTree
    client: Array
    visits: Array
    samples_visited: Array
    info: LocalInfo
    tag: PyTree
    received: PyTree
    weight: PyTree = ()


class AtWork(NamedTuple):
    """The models that C clients have in an asynchronous flight.

    A client's training is computed when it returns, from the model that it received: the result is
    the same, and clients that have not returned by the end of a run are never trained.

    Attributes:
        client: ``int32[C]``; N for a place without a client.
        back: ``[C]``, when the client returns; without a client, when the server draws again.
        lost: ``bool[C]``, whether the client is lost and returns no model.
        down: ``f32[C]``, the seconds of its download.
        seconds: ``f32[C]``, the seconds of its computation.
        length: ``f32[C]``, the seconds from the start of the download to the end of the upload.
        idle: ``bool[C]``, whether the place has no client, and no time of the next draw.
        update: ``int32[C]``, the round in which the model was sent.
        row: ``int32[C]``, index into ``models`` of the model that the client received.
        models: ``[C + 1, *p]``, the server models that clients have; one row is always free.
    """

    client: Array
    back: Now
    lost: Array
    down: Array
    seconds: Array
    length: Array
    idle: Array
    update: Array
    row: Array
    models: PyTree


class FedState(NamedTuple):
    """The state between two rounds, of the same shapes on any number of devices.

    Attributes:
        round: ``int32[]``, rounds done.
        server: the server model w_t.
        server_samples: ``f32[]``, N_t, the samples behind w_t (0 at the start).
        opt_state: the server's state; a tuple with one per fragment, if fragments travel in turn.
        slots: the models in flight; None if none outlives a round.
        selection: the state of the selection.
        client_state: ``[N, *]``, the clients' states of the local update.
        own: ``[N, *p]``, the leaves that stay with each client; None in place of the others, () if
          all travel.
        sending: ``[N, *]`` for each part, the clients' states of the sending parts.
        shared_state: the state that local updates share through the server.
        broadcast: the state of the broadcast.
        preaggregation: the states of the pre-aggregations.
        diagnostics: the states of the diagnostics.
        clock: the simulated time, see :class:`fedjax_sim.base.Now`; () without a clock.
        at_work: see :class:`AtWork`; () unless the flight is asynchronous.
        redistribution: the state of the redistribution; () without one.
    """

    round: Array
    server: Variables
    server_samples: Array
    opt_state: PyTree
    slots: Slots | None
    selection: PyTree
    client_state: PyTree
    own: PyTree
    sending: PyTree
    shared_state: PyTree
    broadcast: PyTree
    preaggregation: PyTree
    diagnostics: PyTree
    clock: PyTree = ()
    at_work: PyTree = ()
    redistribution: PyTree = ()

    def __repr__(self) -> str:
        return brief_fields(self)


class Fragment(NamedTuple):
    """Bytes of a part of a model that travels in turn, see :class:`fedjax_sim.base.Exchange`.

    Attributes:
        upload: bytes from a client.
        download: bytes to a client that has the rest.
    """

    upload: int
    download: int


class Traffic(NamedTuple):
    """Bytes of each kind of message.

    Attributes:
        upload: a model sent by a client; the maximum, if a part of ``sending`` is ``measured``.
        download: a model sent to a client.
        message: a client's message, in every round in which it trains: the change of SCAFFOLD's
          control variate, its answer before it trains, the numbers that a part ``reads``.
        shared_state: the shared state that the server sends, in every such round.
        fragments: each fragment, if models travel in fragments; then no model is uploaded whole.
        finish: a client's message after the last round, see :class:`fedjax_sim.base.Finish`.
        answer: the answer of a client that is polled before the draw, see
          :attr:`fedjax_sim.base.Selection.poll`.
    """

    upload: int
    download: int
    message: int
    shared_state: int
    fragments: tuple[Fragment, ...] = ()
    finish: int = 0
    answer: int = 0


class SlotBytes(NamedTuple):
    """Bytes of the models that each slot's client sent and received in a round.

    Attributes:
        up: ``int32[S]``.
        down: ``int32[S]``; None if all downloads are of one size.
    """

    up: Array
    down: Array | None


class Metrics(NamedTuple):
    """Metrics of one round, summed over its slots.

    Attributes:
        loss: ``f32[]``, mean training loss per sample visited; 0 if no client trained.
        samples: ``int32[]``, training samples visited.
        steps: ``int32[]``, local steps that trained.
        executed: ``int32[]``, local steps that the devices ran or waited for: the number of devices
          times the steps of the busiest.
        uploads: ``int32[]``, models sent by clients, or their fragments whose turn it is.
        downloads: ``int32[]``, models sent to clients.
        fragments: ``int32[]``, fragments sent to clients, whose turn was the last round.
        visits: ``int32[]``, clients that trained.
        skipped: ``int32[]``, clients whose update a part of ``sending`` rejected; ``loss`` excludes
          them, and is NaN if all were rejected.
        client: ``int32[S]``, the client that trained each slot's model; N for an idle slot.
        source: ``int32[S]``, the slot whose model each slot took over before it trained.
        diagnostics: ``f32[]`` by name.
        time: the times of the clock; None without one.
        answers: ``int32[]``, clients that answered a poll before the draw; None without a poll.
        bytes: bytes of the models that clients sent and received; None if all are of one size.
    """

    loss: Array
    samples: Array
    steps: Array
    executed: Array
    uploads: Array
    downloads: Array
    fragments: Array
    visits: Array
    skipped: Array
    client: Array
    source: Array
    diagnostics: dict[str, Array]
    time: Elapsed | None = None
    answers: Array | None = None
    bytes: SlotBytes | None = None

    def __repr__(self) -> str:
        return brief_fields(self)
