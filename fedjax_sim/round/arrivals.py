"""The models that return to the server in an asynchronous round.

The duration of a visit is known when it begins. So a round first simulates the events with integers
and times, and then trains all clients that return together, each from the model that it received.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import (
    Array,
    AtWork,
    ClientData,
    Elapsed,
    FedState,
    Now,
    PyTree,
    Traffic,
    Variables,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.streams import Dispatch, Round, stream
from fedjax_sim.round import timing
from fedjax_sim.round.parts import Parts
from fedjax_sim.round.placement import Arrivals

_NEVER = np.iinfo(np.int32).max


class _Progress(NamedTuple):
    """Progress of a round."""

    turn: Array  # int32[], number of the event
    now: Now  # time of the event
    at: AtWork  # clients in flight, without their models
    client: Array  # int32[K], clients that have returned, in the order of time
    update: Array  # int32[K], rounds in which they were sent, see :class:`AtWork`
    row: Array  # int32[K], rows of their models
    found: Array  # int32[], number of clients that have returned
    sent: Array  # int32[], number of models sent
    asleep: Array  # int32[], number of clients that were asleep
    lost: Array  # int32[], number of clients that were lost
    computing: Array  # f32[], seconds that clients that have returned computed
    link: Array  # f32[], seconds of their transfers
    waiting: Array  # f32[], seconds that clients without a model waited
    over: Array  # bool[], whether the round is over


def next_arrivals(
    parts: Parts, key: Array, state: FedState, data: ClientData, size: Traffic
) -> Arrivals:
    """Returns the clients whose updates arrive in this round, given the bytes of messages."""
    at: AtWork = state.at_work
    places, count = len(at.client), parts.slots
    busy = at.client < data.clients
    rows = jnp.where(busy, at.row, places + 1)
    taken_rows = jnp.zeros(places + 1, bool).at[rows].set(True, mode="drop")
    row = jnp.argmin(taken_rows).astype(jnp.int32)
    none, zero = jnp.full(count, data.clients, jnp.int32), jnp.int32(0)
    nothing: PyTree = ()
    taken = _Progress(
        turn=zero,
        now=state.clock,
        at=at._replace(models=nothing),
        client=none,
        update=jnp.broadcast_to(state.round, (count,)),
        row=jnp.zeros(count, jnp.int32),
        found=zero,
        sent=zero,
        asleep=zero,
        lost=zero,
        computing=jnp.float32(0),
        link=jnp.float32(0),
        waiting=jnp.float32(0),
        over=jnp.array(False),
    )
    events = _Events(parts, key, state, data, size, row)
    taken = jax.lax.while_loop(lambda taken: ~taken.over, events.next, taken)
    order = jnp.argsort(taken.client)
    models, others = _exchanged(at.models, state.server, taken.row[order], taken.found, row)
    seconds = _between(state.clock, taken.now)
    still = taken.at.client < data.clients
    left = _between(taken.now, taken.at.back)
    each = _compute_and_transfer(taken.at.down, taken.at.seconds, taken.at.length - left, seconds)
    computing, link = (jnp.sum(jnp.where(still, of_client, 0)) for of_client in each)
    elapsed = Elapsed(
        seconds=seconds,
        computing=taken.computing + computing,
        link=taken.link + link,
        waiting=taken.waiting,
        asleep=taken.asleep,
        lost=taken.lost,
        late=zero,
        silent=taken.lost,
    )
    return Arrivals(
        client=taken.client[order],
        age=state.round - taken.update[order],
        models=models,
        at_work=taken.at._replace(models=others),
        sent=taken.sent,
        now=taken.now,
        elapsed=elapsed,
    )


def _exchanged(
    models: Variables, server: Variables, came: Array, found: Array, row: Array
) -> tuple[Variables, Variables]:
    """Reads the rows ``came int32[K]`` of ``models``, then writes ``server`` to their ``row``.

    XLA only writes in place after all reads, else it copies all models in flight: with 100 MLPs
    that took 25 times the rest of a round. The loop enforces this order: the place of the write
    depends on its end, and the compiler does not know its length, or it would unroll it.
    """

    def read(i: Array, carry: tuple[Variables, Array]) -> tuple[Variables, Array]:
        taken, place = carry
        one = tree.select(came[i] == row, server, tree.take(models, came[i]))
        return jax.tree.map(lambda a, w: a.at[i].set(w), taken, one), jnp.minimum(place, row)

    start = tree.stack_copies(server, len(came)), row
    taken, place = jax.lax.fori_loop(0, found, read, start)
    return taken, jax.tree.map(lambda a, w: a.at[place].set(w), models, server)


class _Events(NamedTuple):
    """Simulation of a round by events; ``row int32[]`` is the row of the model that it sends."""

    parts: Parts
    key: Array
    state: FedState
    data: ClientData
    size: Traffic
    row: Array

    def next(self, taken: _Progress) -> _Progress:
        """Handles the next event: the server sends a model, a client returns, or the round ends."""
        at, period = taken.at, self.parts.flight.seconds
        place, awaited = _first(at), ~at.idle
        then = Now(*(a[place] for a in at.back))
        here = jnp.any(awaited) & _same(then, taken.now)
        busy = jnp.concatenate([at.client, taken.client])
        sends = jnp.any(at.idle) & jnp.any(self._free(busy)) & ~here
        ends = ~jnp.any(awaited)
        if period is not None:
            sends = sends & _same(taken.now, self.state.clock)
            ends = ends | ~_no_later(then, add_seconds(self.state.clock, jnp.float32(period)))
        what = jnp.where(sends, 0, jnp.where(ends, 1, 2))
        taken = taken._replace(turn=taken.turn + 1)
        return jax.lax.switch(
            what,
            [
                lambda taken: self._send(taken, busy),
                self._end,
                lambda taken: self._come(taken, place, then),
            ],
            taken,
        )

    def _free(self, busy: Array) -> Array:
        """Returns whether any client is neither in flight nor has returned in this round."""
        return jnp.sum(busy < self.data.clients) < self.data.clients

    def _send(self, taken: _Progress, busy: Array) -> _Progress:
        """Sends the server model to a client, if it is awake."""
        clock, none = self.parts.clock, self.data.clients
        assert clock is not None
        own = jax.random.fold_in(stream(self.key, Round.DISPATCH), taken.turn)
        another = self.parts.selection.another
        assert another is not None
        draw_key = stream(own, Dispatch.CLIENT)
        client = another(draw_key, self.state.selection, self.data, busy)
        awake = jnp.array(True)
        if clock.available is not None:
            keys = stream(own, Dispatch.AWAKE)[None]
            awake = clock.available(keys, client[None], taken.now)[0]
        before, work, after = (
            seconds[0]
            for seconds in timing.forecast(
                self.parts, self.state._replace(clock=taken.now), self.data, self.size, client[None]
            )
        )
        length, lost = before + work + after, jnp.array(False)
        if clock.failures:
            luck = jax.random.uniform(stream(own, Dispatch.LOST), (2,), jnp.float32)
            lost = awake & (luck[0] < clock.failures)
            length = jnp.where(lost, luck[1] * length, length)
        then = add_seconds(taken.now, jnp.where(awake, length, clock.idle))
        at, place = taken.at, jnp.argmax(taken.at.idle)
        changed = at._replace(
            client=jnp.where(awake, client, none),
            back=then,
            lost=lost,
            down=before,
            seconds=jnp.clip(length - before, 0, work),
            length=length,
            idle=jnp.array(False),
            update=self.state.round,
            row=self.row,
        )
        at = jax.tree.map(lambda a, new: a.at[place].set(new.astype(a.dtype)), at, changed)
        return taken._replace(
            at=at,
            sent=taken.sent + awake.astype(jnp.int32),
            asleep=taken.asleep + (~awake).astype(jnp.int32),
        )

    def _come(self, taken: _Progress, place: Array, then: Now) -> _Progress:
        """Handles a client that returns or was lost, or a time to try sleeping clients again."""
        at, none = taken.at, self.data.clients
        asks = at.client[place] == none
        comes = ~asks & ~at.lost[place]
        # All clients that were asleep at the same time are tried again at the same time.
        freed = asks & ~at.idle & (at.client == none) & _same(at.back, then)
        freed = freed.at[place].set(True)
        alone = jnp.all((at.client == none) | freed)
        visit = at.down[place], at.seconds[place], at.length[place]
        each = _compute_and_transfer(*visit, _between(self.state.clock, then))
        computing, link = (jnp.where(asks, 0, seconds) for seconds in each)
        found = taken.found + comes.astype(jnp.int32)
        over = (found == len(taken.client)) | (asks & alone)
        over = over & (self.parts.flight.seconds is None)  # else it ends after its period
        here = jnp.where(comes, taken.found, len(taken.client))
        return taken._replace(
            now=then,
            at=at._replace(idle=at.idle | freed, client=jnp.where(freed, none, at.client)),
            client=taken.client.at[here].set(at.client[place], mode="drop"),
            update=taken.update.at[here].set(at.update[place], mode="drop"),
            row=taken.row.at[here].set(at.row[place], mode="drop"),
            found=found,
            lost=taken.lost + (~asks & at.lost[place]).astype(jnp.int32),
            computing=taken.computing + computing,
            link=taken.link + link,
            waiting=taken.waiting + self._waited(taken, then),
            over=over,
        )

    def _end(self, taken: _Progress) -> _Progress:
        """Ends the round: its period is over, or no client is in flight."""
        period = self.parts.flight.seconds
        then = taken.now
        if period is not None:
            then = add_seconds(self.state.clock, jnp.float32(period))
        waiting = taken.waiting + self._waited(taken, then)
        return taken._replace(now=then, waiting=waiting, over=jnp.array(True))

    def _waited(self, taken: _Progress, then: Now) -> Array:
        """Returns the seconds that clients without a model wait from now until then."""
        idle = jnp.sum(taken.at.idle).astype(jnp.float32)
        return idle * _between(taken.now, then)


def _first(at: AtWork) -> Array:
    """Returns the place of the next event; ties go to the lower client."""
    among = ~at.idle
    for values in (at.back.seconds, at.back.fraction, at.client):
        least = jnp.min(jnp.where(among, values, values.dtype.type(_NEVER)))
        among = among & (values == least)
    return jnp.argmax(among)


def add_seconds(now: Now, seconds: Array) -> Now:
    """Returns the moment ``seconds f32[]`` later."""
    total = now.fraction + jnp.minimum(seconds, 2**30)  # the most that is added at once
    whole = jnp.floor(total)
    return Now(now.seconds + whole.astype(jnp.int32), total - whole)


def _between(start: Now, end: Now) -> Array:
    """Returns the seconds from one moment to another, ``f32[]``."""
    return (end.seconds - start.seconds).astype(jnp.float32) + (end.fraction - start.fraction)


def _same(a: Now, b: Now) -> Array:
    """Returns whether two moments are equal; any shapes that broadcast."""
    return (a.seconds == b.seconds) & (a.fraction == b.fraction)


def _no_later(a: Now, b: Now) -> Array:
    """Returns whether ``a`` is before ``b`` or equal."""
    return (a.seconds < b.seconds) | ((a.seconds == b.seconds) & (a.fraction <= b.fraction))


def _compute_and_transfer(
    down: Array, work: Array, age: Array, seconds: Array
) -> tuple[Array, Array]:
    """Splits the last seconds of a visit into computation and transfers; any shapes.

    After a download of ``down`` seconds come ``work`` seconds; the visit began ``age`` seconds ago.

    >>> [a.item() for a in _compute_and_transfer(*map(jnp.float32, (2, 5, 6, 5)))]
    [4.0, 1.0]
    """
    age = jnp.maximum(age, 0)
    before = jnp.maximum(age - seconds, 0)
    computing = jnp.clip(age - down, 0, work) - jnp.clip(before - down, 0, work)
    return computing, age - before - computing
