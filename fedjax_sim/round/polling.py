"""The selection's poll of clients before the draw, and its update after the round."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    Cohort,
    Elapsed,
    FedState,
    LocalInfo,
    PyTree,
    Variables,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import Visits, samples_of, visits
from fedjax_sim.engine.draws import is_in
from fedjax_sim.engine.streams import Round, stream
from fedjax_sim.round import placement, timing, traffic
from fedjax_sim.round.exchanging import with_own
from fedjax_sim.round.parts import Parts

FORWARD = 1 / 3
"""Cost of a forward pass as a share of a local step; a backward pass costs twice as much."""


class Poll(NamedTuple):
    """Result of a round's poll; seconds are 0 without a clock."""

    client: Array  # int32[K], clients that answered; N for the others
    answers: Array  # int32[], number of answers
    downloads: Array  # int32[], models sent to them
    seconds: Array  # f32[], seconds until the last answer
    computing: Array  # f32[], seconds of computation
    link: Array  # f32[], seconds of transfers
    waiting: Array  # f32[], seconds spent waiting for the last answer


def poll(
    parts: Parts, key: Array, state: FedState, data: ClientData
) -> tuple[FedState, Poll | None]:
    """Polls clients if the selection needs it; returns the state with their answers."""
    selection = parts.selection
    if selection.poll is None:
        return state, None
    whom = selection.poll(stream(key, Round.POLL), state.selection, data)
    client = placement.awake(parts, key, state, whom, data.clients)
    answers = _answers(parts, state, data, client)
    known = selection.record_answers(state.selection, client, answers)
    return state._replace(selection=known), _count_poll(parts, state, data, client)


def _answers(parts: Parts, state: FedState, data: ClientData, client: Array) -> PyTree:
    """Returns the clients' answers about the server model: ``[K, ...]``."""
    ask = parts.selection.ask
    if ask is None:
        return ()
    spare = parts.execution.rows(len(client)) - len(client)
    rows = jnp.pad(client, (0, spare), constant_values=data.clients)

    def answer(samples: PyTree, server: Variables, mine: PyTree, visit: Visits) -> PyTree:
        return ask(with_own(mine, server), visit.view(samples, data))

    tasks = parts.execution.replicate(visits(data, rows))
    out = parts.execution.run(
        answer, samples_of(data), state.server, tree.take(state.own, rows), tasks
    )
    return tree.take(parts.execution.replicate(out), jnp.arange(len(client), dtype=jnp.int32))


def _count_poll(parts: Parts, state: FedState, data: ClientData, client: Array) -> Poll:
    """Counts answers, models and seconds."""
    ask = parts.selection.ask
    there = client < data.clients
    count = jnp.sum(there, dtype=jnp.int32)
    downloads = jnp.int32(0) if ask is None else count
    if parts.clock is None:
        return Poll(client, count, downloads, *4 * [jnp.float32(0)])
    size = traffic.sizes(parts, state.server, data)
    down = jnp.float32(0 if ask is None else size.download)
    durations = timing.durations_of(
        parts, state, client, down, jnp.float32(size.answer), jnp.maximum(count, 1)
    )
    work = jnp.zeros(len(client), jnp.float32)
    if ask is not None:
        batches = -(-visits(data, client).size // parts.local.batch_size)
        work = FORWARD * batches.astype(jnp.float32) * durations.step
    end = jnp.where(there, durations.down + work + durations.up, 0)
    seconds = jnp.max(end)
    each = work, durations.down + durations.up, seconds - end
    spent = (jnp.sum(jnp.where(there, of_client, 0)) for of_client in each)
    return Poll(client, count, downloads, seconds, *spent)


def without_polled(
    transfers: traffic.Transfers, placed: placement.Placed, asked: Poll
) -> traffic.Transfers:
    """Returns the transfers of a round, without models that clients received in the poll."""
    has = is_in(placed.slots.client, asked.client) & (asked.downloads > 0)
    return transfers._replace(downloads=jnp.where(has, 0, transfers.downloads))


def with_poll(elapsed: Elapsed, asked: Poll) -> Elapsed:
    """Adds the times of the poll to the times of a round."""
    return elapsed._replace(
        seconds=elapsed.seconds + asked.seconds,
        computing=elapsed.computing + asked.computing,
        link=elapsed.link + asked.link,
        waiting=elapsed.waiting + asked.waiting,
    )


def update_selection(
    parts: Parts, known: PyTree, cohort: Cohort, told: LocalInfo, sent: Array, after: PyTree
) -> PyTree:
    """Returns the selection's state after a round.

    The clients reported ``told [P]``; the server received the updates of the rows ``sent bool[P]``.
    ``after`` has its model, and the updates ``[P, *p]`` if they are stored.
    """
    known, see = parts.selection.update(known, cohort.client, told), parts.selection.see
    if see is None:
        return known
    server, updates = after
    client = jnp.where(sent, cohort.client, cohort.data.clients)
    return see(known, client, updates, tree.subtract(server, cohort.server))
