"""The five stages of a round: plan, train, deliver, collect, report.

In this folder ``parts`` are the algorithm's, ``key`` is the key of the round, ``state`` the state
before it, ``data`` the clients, ``placed`` the rows with their clients, and ``trained [P]`` the
results of training.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    Cohort,
    FedState,
    LocalInfo,
    Metrics,
    PyTree,
    Trained,
    Variables,
)
from fedjax_sim.round import collecting, measuring, placement, polling, timing, traffic, training
from fedjax_sim.round import sending as sendings
from fedjax_sim.round.arrivals import Arrivals
from fedjax_sim.round.parts import Parts
from fedjax_sim.round.traffic import Transfers


def step(parts: Parts, key: Array, state: FedState, data: ClientData) -> tuple[FedState, Metrics]:
    """Runs one round; returns the state after it, and its metrics."""
    planned = plan(parts, key, state, data)
    work = train(parts, key, data, planned)
    delivery = deliver(parts, key, data, planned, work)
    collection = collect(parts, key, data, planned, work, delivery)
    return report(parts, key, planned, work, delivery, collection)


class Plan(NamedTuple):
    """Which clients train which models, and what that takes.

    Attributes:
        state: the state before training, with the answers of polled and surveyed clients.
        placed: the rows, one for each slot.
        draw: the clients of the slots.
        due: ``bool[P]``, the rows that the server collects.
        transfers: the transfers of each row.
        durations: the seconds of each row's visit; None without a clock.
        limit: ``int32[P]``, the most steps of each row; None: no limit.
        asked: the answers of polled clients; None if nobody was asked.
        back: the clients that return, if the algorithm is asynchronous; else None.
    """

    state: FedState
    placed: placement.Placed
    draw: placement.Draw
    due: Array
    transfers: Transfers
    durations: timing.Durations | None
    limit: Array | None
    asked: polling.Poll | None
    back: Arrivals | None


def plan(parts: Parts, key: Array, state: FedState, data: ClientData) -> Plan:
    """Polls clients, draws the cohort, and forecasts transfers and durations."""
    state, asked, back, placed, draw = polling.plan_draw(parts, key, state, data)
    due = placed.slot < parts.slots
    if not parts.exchange.fragments:  # every slot delivers a fragment in every round
        due = parts.flight.due(state.round, parts.slots)[placed.slot] & due
    state = training.survey_clients(parts, key, state, data, placed)
    transfers = polling.transfers(parts, state, placed, due, data, asked)
    durations = timing.durations(parts, state, data, placed, transfers)
    limit = timing.limits(parts, durations)
    return Plan(state, placed, draw, due, transfers, durations, limit, asked, back)


class Work(NamedTuple):
    """The result of local training.

    Attributes:
        trained: ``[P]``, the models or updates, states, messages and reports of the clients.
        own: ``[P, *p]``, the leaves that stay with the clients.
        placed: the rows, with what the broadcast sent.
        start: ``[P, *p]``, the models before training, if they are needed; else ().
        executed: ``int32[]``, the steps that the devices ran or waited.
    """

    trained: Trained
    own: PyTree
    placed: placement.Placed
    start: PyTree
    executed: Array


def train(parts: Parts, key: Array, data: ClientData, plan: Plan) -> Work:
    """Trains the model of every row on its client."""
    return Work(*training.train(parts, key, plan.state, data, plan.placed, plan.due, plan.limit))


class Delivery(NamedTuple):
    """What has left the clients, and what they keep.

    Attributes:
        outcome: which visits count, and the seconds of the round.
        transfers: the transfers of each row, without uploads that are withheld.
        bytes: ``int32[P]``, the bytes of each row's update; None if these are known beforehand.
        placed: the rows after training.
        trained: ``[P]``, as it was sent.
        sent: ``bool[P]``, the rows that sent an update.
        chance: ``f32[P]``, the probability with which each row was to send; None if all were.
        skipped: ``bool[P]``, the rows whose clients were screened out.
        sending: the clients' states of the sending parts.
        client_state: the clients' states of the local update.
        own: the leaves that stay with the clients.
        shared_state: the shared state, reduced from the clients' messages.
    """

    outcome: timing.Outcome
    transfers: Transfers
    bytes: Array | None
    placed: placement.Placed
    trained: Trained
    sent: Array
    chance: Array | None
    skipped: Array
    sending: PyTree
    client_state: PyTree
    own: PyTree
    shared_state: PyTree


def deliver(parts: Parts, key: Array, data: ClientData, plan: Plan, work: Work) -> Delivery:
    """Sends the updates through all sending parts, and stores what the clients keep.

    Visits count if they are in time, which is known before the updates are sent unless the uploads
    depend on them.
    """
    state, transfers, due = plan.state, plan.transfers, plan.due
    placed, trained, start = work.placed, work.trained, work.start
    most = traffic.largest_upload(parts, state.server)
    if parts.timed_later:
        ready = timing.ready(parts, key, plan.limit, placed, transfers.visited)
        slots = placed.slots._replace(client=jnp.where(ready, placed.slots.client, data.clients))
        given = sendings.send(parts, key, state, data, slots, trained, start, due, most)
        # The visit of a client that is lost would have had an upload.
        transfers = transfers._replace(uploads=transfers.uploads & (given.sent | ~ready))
        lasts = timing.durations(parts, state, data, placed, transfers, given.bytes)
        outcome = _outcome(parts, key, plan, work, lasts, transfers)
        arrived = outcome.arrived
        given = sendings.drop_late(state, data, slots, given, arrived)
        placed, trained = timing.drop_lost(parts, data, placed, given.trained, start, arrived)
    else:
        outcome = _outcome(parts, key, plan, work, plan.durations, transfers)
        arrived = outcome.arrived
        placed, trained = timing.drop_lost(parts, data, placed, trained, start, arrived)
        given = sendings.send(parts, key, state, data, placed.slots, trained, start, due, most)
        trained = given.trained
    slots, sent = placed.slots, given.sent
    skipped = sendings.skipped(parts, arrived, sent)
    trained, own = sendings.restore_skipped(parts, state, data, slots, skipped, trained, work.own)
    client_state, own, shared_state = training.client_states(
        parts, state, data, placed, trained, own
    )
    placed = training.after_training(parts, placed, trained, arrived)
    return Delivery(
        outcome, transfers, given.bytes, placed, trained, sent, given.chance, skipped, given.kept,
        client_state, own, shared_state,
    )  # fmt: skip


def _outcome(
    parts: Parts,
    key: Array,
    plan: Plan,
    work: Work,
    durations: timing.Durations | None,
    transfers: Transfers,
) -> timing.Outcome:
    """Returns which visits are in time, given what each of them takes and transfers."""
    asleep = jnp.sum(plan.draw.client != plan.draw.assigned, dtype=jnp.int32)
    given = plan.limit, work.trained.info.steps, work.placed, transfers, asleep
    outcome = timing.outcome(parts, key, durations, *given)
    return polling.with_waiting(outcome, plan.asked, plan.back)


class Collection(NamedTuple):
    """The server after the round.

    Attributes:
        state: the state with the new server model.
        cohort: what is known of the rows.
        updates: ``[P, *p]``, the updates, if they are held; else None.
    """

    state: FedState
    cohort: Cohort
    updates: Variables | None


def collect(
    parts: Parts, key: Array, data: ClientData, plan: Plan, work: Work, delivery: Delivery
) -> Collection:
    """Aggregates the updates that are due, and moves the server model."""
    state, slots = plan.state, delivery.placed.slots
    cohort = collecting.cohort_of(parts, state, slots, delivery.placed.samples, data)
    cohort = collecting.with_chances(parts, state, cohort, delivery.chance)
    updates, step = None, None
    if parts.in_flight:
        # A model in flight is due even if no client trained it now, unless its client is absent.
        absent = parts.loses and parts.selection.sticky
        due = plan.due & delivery.outcome.arrived if absent else plan.due
    else:
        due = plan.due & delivery.sent
        updates = delivery.trained.variables
    if not parts.holds_updates:
        updates, step = None, updates
    reduced = state._replace(shared_state=delivery.shared_state)
    new = collecting.absorb(parts, key, reduced, slots, cohort, due, updates, step)
    return Collection(new, cohort, updates)


def report(
    parts: Parts,
    key: Array,
    plan: Plan,
    work: Work,
    delivery: Delivery,
    collection: Collection,
) -> tuple[FedState, Metrics]:
    """Returns the state after the round, and its metrics."""
    before, new, cohort = plan.state, collection.state, collection.cohort
    draw, outcome, updates = plan.draw, delivery.outcome, collection.updates
    numbers, diagnostics = measuring.measure(
        parts, key, before, new, delivery.placed.slots, updates, cohort
    )
    info = delivery.trained.info
    selection = polling.update_selection(
        parts,
        draw.selection,
        cohort,
        polling.with_seconds(parts, info, outcome),
        delivery.sent,
        (new.server, updates),
    )
    back = plan.back
    state = new._replace(
        round=before.round + 1,
        slots=placement.to_slots(parts, delivery.placed, draw) if parts.in_flight else None,
        selection=selection,
        client_state=delivery.client_state,
        own=delivery.own,
        sending=delivery.sending,
        shared_state=delivery.shared_state if parts.local.follow is None else new.shared_state,
        diagnostics=diagnostics,
        clock=timing.advance_clock(before.clock, outcome.elapsed) if back is None else back.now,
        at_work=() if back is None else back.at_work,
    )
    metrics = metrics_of(plan, work, delivery, info, numbers)
    metrics = traffic.with_relays(parts, metrics, plan.placed, plan.due)
    uploaded = delivery.sent | outcome.dropped
    sent = traffic.by_slot(parts, before, plan.placed, uploaded, delivery.transfers, delivery.bytes)
    return state, metrics._replace(bytes=sent)


def metrics_of(
    plan: Plan, work: Work, delivery: Delivery, info: LocalInfo, numbers: dict[str, Array]
) -> Metrics:
    """Returns the metrics of a round, given the diagnostics' ``numbers``."""
    draw, transfers, trained = plan.draw, delivery.transfers, work.trained.info
    uploaded = delivery.sent | delivery.outcome.dropped
    metrics = Metrics(
        loss=measuring.loss(info, delivery.skipped),
        samples=jnp.sum(trained.samples, dtype=jnp.int32),
        steps=jnp.sum(trained.steps, dtype=jnp.int32),
        executed=work.executed,
        # A model that goes from client to client is one upload and one download.
        uploads=jnp.sum(uploaded & transfers.uploads, dtype=jnp.int32) + draw.exchanged,
        downloads=jnp.sum(transfers.downloads, dtype=jnp.int32) + draw.exchanged + draw.sent,
        fragments=jnp.sum(transfers.fragments, dtype=jnp.int32),
        visits=jnp.sum(transfers.visited, dtype=jnp.int32) + draw.lost,
        skipped=jnp.sum(delivery.skipped, dtype=jnp.int32),
        client=draw.client,
        source=draw.source,
        diagnostics=numbers,
        time=delivery.outcome.elapsed,
    )
    return polling.with_answers(metrics, plan.asked)
