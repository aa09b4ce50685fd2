"""Before the draw: what the clock foresees, and what the selection asks some clients."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    Cohort,
    FedState,
    LocalInfo,
    Metrics,
    Outlook,
    PyTree,
    Variables,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import Visits, client_sizes, samples_of, visits
from fedjax_sim.engine.draws import is_in
from fedjax_sim.engine.streams import Round, stream
from fedjax_sim.round import placement, timing, traffic
from fedjax_sim.round.arrivals import Back, come_back
from fedjax_sim.round.exchanging import with_own
from fedjax_sim.round.parts import Parts

FORWARD = 1 / 3
"""Of a local step, what a pass forward takes: a pass backward costs two of them."""


class Asked(NamedTuple):
    """What became of a round's questions.

    Attributes:
        client: ``int32[K]``, those that have answered; N for the others.
        answers: ``int32[]``, how many they are.
        downloads: ``int32[]``, models that they were sent.
        seconds: ``f32[]``, until the last has answered; 0 without a clock.
        computing: ``f32[]``, the seconds that they computed; 0 without a clock.
        link: ``f32[]``, the seconds that they received or sent; 0 without a clock.
        waiting: ``f32[]``, the seconds that they waited for the last; 0 without a clock.
    """

    client: Array
    answers: Array
    downloads: Array
    seconds: Array
    computing: Array
    link: Array
    waiting: Array


def drawn(
    parts: Parts, key: Array, state: FedState, data: ClientData
) -> tuple[FedState, Asked | None, Back | None, placement.Placed, placement.Draw]:
    """Asks, then draws: the state before the draw, what was asked, who comes back, who trains."""
    state, told = asked(parts, key, state, data)
    back = come_back(parts, key, state, data, traffic.sizes)
    foreseen = outlook(parts, key, state, data)
    placed, draw = placement.place(parts, key, state, data, foreseen, back)
    return state._replace(redistribution=draw.redistribution), told, back, placed, draw


def outlook(parts: Parts, key: Array, state: FedState, data: ClientData) -> Outlook | None:
    """What the clock foresees; None without one."""
    clock, none = parts.clock, data.clients
    if clock is None:
        return None

    def seconds(client: Array, uploads: Array | int = 1) -> Array:
        size = traffic.sizes(parts, state.server, data)
        down = jnp.float32(size.download + size.shared_state)
        up = jnp.float32(size.upload + size.message)
        legs = timing.legs_of(parts, state, client, down, up, uploads)
        steps = parts.local.steps_for(client_sizes(data, client, state.round)).astype(jnp.float32)
        return legs.down + steps * legs.step + legs.up

    def awake(client: Array) -> Array:
        return placement.awake(parts, key, state, client, none) < none

    return Outlook(seconds, awake, math.inf if clock.deadline is None else clock.deadline)


def asked(
    parts: Parts, key: Array, state: FedState, data: ClientData
) -> tuple[FedState, Asked | None]:
    """The state in which the selection knows the answers, if it asks anything."""
    selection = parts.selection
    if selection.poll is None:
        return state, None
    whom = selection.poll(stream(key, Round.POLL), state.selection, data)
    client = placement.awake(parts, key, state, whom, data.clients)
    answers = _answers(parts, state, data, client)
    known = selection.record_answers(state.selection, client, answers)
    return state._replace(selection=known), _counted(parts, state, data, client)


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


def _counted(parts: Parts, state: FedState, data: ClientData, client: Array) -> Asked:
    """Counts answers, models and seconds."""
    ask = parts.selection.ask
    there = client < data.clients
    count = jnp.sum(there, dtype=jnp.int32)
    downloads = jnp.int32(0) if ask is None else count
    if parts.clock is None:
        return Asked(client, count, downloads, *4 * [jnp.float32(0)])
    size = traffic.sizes(parts, state.server, data)
    down = jnp.float32(0 if ask is None else size.download)
    legs = timing.legs_of(
        parts, state, client, down, jnp.float32(size.answer), jnp.maximum(count, 1)
    )
    work = jnp.zeros(len(client), jnp.float32)
    if ask is not None:
        batches = -(-visits(data, client).size // parts.local.batch_size)
        work = FORWARD * batches.astype(jnp.float32) * legs.step
    end = jnp.where(there, legs.down + work + legs.up, 0)
    seconds = jnp.max(end)
    each = work, legs.down + legs.up, seconds - end
    spent = (jnp.sum(jnp.where(there, of_client, 0)) for of_client in each)
    return Asked(client, count, downloads, seconds, *spent)


def trips(
    parts: Parts,
    state: FedState,
    placed: placement.Placed,
    due: Array,
    data: ClientData,
    asked: Asked | None,
) -> traffic.Trips:
    """Those of a round, without the models that clients have been sent before the draw."""
    plain = traffic.trips(parts, state, placed, due, data.clients)
    if asked is None:
        return plain
    has = is_in(placed.slots.client, asked.client) & (asked.downloads > 0)
    return plain._replace(downloads=jnp.where(has, 0, plain.downloads))


def waited(came: timing.Outcome, asked: Asked | None, back: Back | None) -> timing.Outcome:
    """What came of a round that had to wait for answers, or was over when some came back."""
    if back is not None:
        return came._replace(elapsed=back.elapsed)
    if asked is None or came.elapsed is None:
        return came
    before = came.elapsed
    longer = before._replace(
        seconds=before.seconds + asked.seconds,
        computing=before.computing + asked.computing,
        link=before.link + asked.link,
        waiting=before.waiting + asked.waiting,
    )
    return came._replace(elapsed=longer)


def with_answers(metrics: Metrics, asked: Asked | None) -> Metrics:
    """The report of a round with what was sent before the draw."""
    if asked is None:
        return metrics
    downloads = metrics.downloads + asked.downloads
    return metrics._replace(downloads=downloads, answers=asked.answers)


def measured(parts: Parts, info: LocalInfo, came: timing.Outcome) -> LocalInfo:
    """The reports with the visits' seconds, for a selection that learns of them."""
    if not parts.selection.times or came.end is None:
        return info
    return info._replace(extra={**info.extra, "seconds": came.end})


def learnt(
    parts: Parts, known: PyTree, cohort: Cohort, told: LocalInfo, sent: Array, after: PyTree
) -> PyTree:
    """The selection's state after a round.

    Args:
        parts: of the algorithm.
        known: its state.
        cohort: the rows.
        told: their reports ``[P]``.
        sent: ``bool[P]``, whose update the server has.
        after: the server model, and the updates ``[P, *p]`` if they are held.
    """
    known, see = parts.selection.update(known, cohort.client, told), parts.selection.see
    if see is None:
        return known
    server, updates = after
    client = jnp.where(sent, cohort.client, cohort.data.clients)
    return see(known, client, updates, tree.subtract(server, cohort.server))
