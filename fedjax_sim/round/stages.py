"""The five stages of a round: plan, train, deliver, collect, report.

In this folder ``parts`` are the algorithm's, ``key`` is the key of the round, ``state`` the state
before it, ``data`` the clients, ``placed`` the rows with their clients, and ``trained [P]`` the
results of training.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    Cohort,
    FedState,
    LocalInfo,
    Metrics,
    PyTree,
    Slots,
    Trained,
    Variables,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.streams import Round, stream
from fedjax_sim.round import collecting, placement, polling, timing, traffic, training
from fedjax_sim.round import sending as sendings
from fedjax_sim.round.arrivals import add_seconds, next_arrivals
from fedjax_sim.round.parts import Parts


def step(parts: Parts, key: Array, state: FedState, data: ClientData) -> tuple[FedState, Metrics]:
    """Runs one round; returns the state after it, and its metrics."""
    planned = plan(parts, key, state, data)
    before, placed, due, limit = planned.state, planned.placed, planned.due, planned.limit
    work = training.train(parts, key, before, data, placed, due, limit)
    delivery = deliver(parts, key, data, planned, work)
    collection = collect(parts, key, data, planned, delivery)
    return report(parts, key, planned, work, delivery, collection)


class Plan(NamedTuple):
    """The clients that train and their models, with transfers and durations."""

    state: FedState  # before training, with what polled and surveyed clients answered
    placed: placement.Placed
    draw: placement.Draw
    due: Array  # bool[P], the rows that the server collects
    transfers: traffic.Transfers
    durations: timing.Durations | None  # None without a clock
    limit: Array | None  # int32[P], the most steps of each row; None: no limit
    asked: polling.Poll | None  # the answers of polled clients
    back: placement.Arrivals | None  # the clients that return, if the algorithm is asynchronous


def plan(parts: Parts, key: Array, state: FedState, data: ClientData) -> Plan:
    """Polls clients, draws the cohort, and forecasts transfers and durations."""
    state, asked = polling.poll(parts, key, state, data)
    back = None
    if parts.asynchronous:
        size = traffic.sizes(parts, state.server, data)
        back = next_arrivals(parts, key, state, data, size)
    outlook = timing.outlook(parts, key, state, data)
    placed, draw = placement.place(parts, key, state, data, outlook, back)
    state = state._replace(redistribution=draw.redistribution)
    due = placed.slot < parts.slots
    if not parts.exchange.fragments:  # every slot delivers a fragment in every round
        due = parts.flight.due(state.round, parts.slots)[placed.slot] & due
    state = training.survey_clients(parts, key, state, data, placed)
    transfers = traffic.transfers(parts, state, placed, due, data.clients)
    if asked is not None:
        transfers = polling.without_polled(transfers, placed, asked)
    durations = timing.durations(parts, state, data, placed, transfers)
    limit = timing.limits(parts, durations)
    return Plan(state, placed, draw, due, transfers, durations, limit, asked, back)


class Delivery(NamedTuple):
    """The clients' messages, and the states that they keep."""

    placed: placement.Placed  # the rows after training
    trained: Trained  # [P], as it was sent
    messages: sendings.Messages
    outcome: timing.Outcome  # which visits count
    transfers: traffic.Transfers  # without uploads that are withheld
    skipped: Array  # bool[P], the rows whose clients were screened out
    client_state: PyTree
    own: PyTree
    shared_state: PyTree


def deliver(
    parts: Parts, key: Array, data: ClientData, plan: Plan, work: training.Work
) -> Delivery:
    """Passes the updates through all sending parts, and stores the clients' states.

    Visits count if they are in time, which is known before the updates are sent unless the uploads
    depend on them.
    """
    state, transfers, due, limit = plan.state, plan.transfers, plan.due, plan.limit
    placed, trained, start = work.placed, work.trained, work.start
    steps, most = trained.info.steps, traffic.largest_upload(parts, state.server)
    asleep = jnp.sum(plan.draw.client != plan.draw.assigned, dtype=jnp.int32)
    if parts.timed_later:
        ready = timing.ready(parts, key, limit, placed, transfers.visited)
        slots = placed.slots._replace(client=jnp.where(ready, placed.slots.client, data.clients))
        trained, messages = sendings.send(parts, key, state, data, slots, trained, start, due, most)
        # The visit of a client that is lost would have had an upload.
        transfers = transfers._replace(uploads=transfers.uploads & (messages.sent | ~ready))
        lasts = timing.durations(parts, state, data, placed, transfers, messages.bytes)
        outcome = timing.outcome(parts, key, lasts, limit, steps, placed, transfers, asleep)
        arrived = outcome.arrived
        messages = sendings.drop_late(state, data, slots, messages, arrived)
        placed, trained = timing.drop_lost(parts, data, placed, trained, start, arrived)
    else:
        lasts = plan.durations
        outcome = timing.outcome(parts, key, lasts, limit, steps, placed, transfers, asleep)
        arrived = outcome.arrived
        placed, trained = timing.drop_lost(parts, data, placed, trained, start, arrived)
        trained, messages = sendings.send(
            parts, key, state, data, placed.slots, trained, start, due, most
        )
    if plan.back is not None:
        outcome = outcome._replace(elapsed=plan.back.elapsed)
    elif plan.asked is not None and outcome.elapsed is not None:
        outcome = outcome._replace(elapsed=polling.with_poll(outcome.elapsed, plan.asked))
    skipped = sendings.skipped(parts, arrived, messages.sent)
    trained, own = sendings.restore_skipped(
        parts, state, data, placed.slots, skipped, trained, work.own
    )
    kept = training.client_states(parts, state, data, placed, trained, own)
    placed = training.after_training(parts, placed, trained, arrived)
    return Delivery(placed, trained, messages, outcome, transfers, skipped, *kept)


class Collection(NamedTuple):
    """The server after the round."""

    state: FedState  # with the new server model
    cohort: Cohort
    updates: Variables | None  # [P, *p]; None if they are not held


def collect(
    parts: Parts, key: Array, data: ClientData, plan: Plan, delivery: Delivery
) -> Collection:
    """Aggregates the updates that are due, and moves the server model."""
    state, slots, messages = plan.state, delivery.placed.slots, delivery.messages
    cohort = collecting.cohort_of(parts, state, slots, delivery.placed.samples, data)
    cohort = collecting.with_chances(parts, state, cohort, messages.chance)
    updates = None
    if parts.in_flight:
        # A model in flight is due even if no client trained it now, unless its client is absent.
        absent = parts.loses and parts.selection.sticky
        due = plan.due & delivery.outcome.arrived if absent else plan.due
    else:
        due, updates = plan.due & messages.sent, delivery.trained.variables
    reduced = state._replace(shared_state=delivery.shared_state)
    new = collecting.absorb(parts, key, reduced, slots, cohort, due, updates)
    return Collection(new, cohort, updates if parts.holds_updates else None)


def report(
    parts: Parts,
    key: Array,
    plan: Plan,
    work: training.Work,
    delivery: Delivery,
    collection: Collection,
) -> tuple[FedState, Metrics]:
    """Updates the selection and the diagnostics, and counts traffic and steps."""
    state, draw, asked, back = plan.state, plan.draw, plan.asked, plan.back
    new, cohort, updates = collection
    messages, outcome, transfers = delivery.messages, delivery.outcome, delivery.transfers
    elapsed, skipped, reports = outcome.elapsed, delivery.skipped, delivery.trained.info
    numbers, diagnostics = _measure(parts, key, state, new, delivery.placed.slots, updates, cohort)
    timed = reports
    if parts.selection.times and outcome.end is not None:
        timed = reports._replace(extra={**reports.extra, "seconds": outcome.end})
    selection = polling.update_selection(
        parts, draw.selection, cohort, timed, messages.sent, (new.server, updates)
    )
    now = state.clock if elapsed is None else add_seconds(state.clock, elapsed.seconds)
    after = new._replace(
        round=state.round + 1,
        slots=placement.to_slots(parts, delivery.placed, draw) if parts.in_flight else None,
        selection=selection,
        client_state=delivery.client_state,
        own=delivery.own,
        sending=messages.kept,
        shared_state=delivery.shared_state if parts.local.follow is None else new.shared_state,
        diagnostics=diagnostics,
        clock=now if back is None else back.now,
        at_work=() if back is None else back.at_work,
    )
    visits = work.trained.info  # also of clients whose visits do not count
    uploaded = messages.sent | outcome.dropped
    # A model that goes from client to client is one upload and one download.
    uploads = jnp.sum(uploaded & transfers.uploads, dtype=jnp.int32) + draw.exchanged
    downloads = jnp.sum(transfers.downloads, dtype=jnp.int32) + draw.exchanged + draw.sent
    if parts.relays:
        uploads += parts.relays * jnp.any(plan.due).astype(jnp.int32)
        downloads += parts.relays * jnp.any(plan.placed.fresh).astype(jnp.int32)
    metrics = Metrics(
        loss=_loss(reports, skipped),
        samples=jnp.sum(visits.samples, dtype=jnp.int32),
        steps=jnp.sum(visits.steps, dtype=jnp.int32),
        executed=work.executed,
        uploads=uploads,
        downloads=downloads if asked is None else downloads + asked.downloads,
        fragments=jnp.sum(transfers.fragments, dtype=jnp.int32),
        visits=jnp.sum(transfers.visited, dtype=jnp.int32) + draw.lost,
        skipped=jnp.sum(skipped, dtype=jnp.int32),
        client=draw.client,
        source=draw.source,
        diagnostics=numbers,
        time=elapsed,
        answers=None if asked is None else asked.answers,
        bytes=traffic.by_slot(parts, state, work.placed, uploaded, transfers, messages.bytes),
    )
    return after, metrics


def _measure(
    parts: Parts,
    key: Array,
    state: FedState,
    new: FedState,
    slots: Slots,
    updates: Variables | None,
    cohort: Cohort,
) -> tuple[dict[str, Array], PyTree]:
    """Returns the numbers of all diagnostics, and their states.

    ``new`` is the state after the round. ``slots [P]`` have the models in flight; without these,
    ``updates [P, *p]`` are the round's.

    Raises:
        ValueError: if two diagnostics report one name.
    """
    numbers: dict[str, Array] = {}
    states: dict[str, PyTree] = {}
    if not parts.diagnostics:
        return numbers, states
    models = slots.variables
    if updates is not None:
        models = jax.tree.map(jnp.add, cohort.received, updates)
    for i, (name, part) in enumerate(parts.diagnostics.items()):
        own_key = stream(key, Round.DIAGNOSTIC, i)
        found, states[name] = part.measure(
            own_key, state.diagnostics[name], new.server, models, cohort
        )
        if twice := found.keys() & numbers.keys():
            raise ValueError(
                f"diagnostics must report different names, {name!r} and an earlier one report "
                f"{min(twice)!r}"
            )
        numbers |= found
    return numbers, states


def _loss(info: LocalInfo, skipped: Array) -> Array:
    """Returns a round's mean loss over samples, without ``skipped bool[P]`` rows: ``f32[]``."""
    samples = jnp.where(skipped, 0, info.samples).astype(jnp.float32)
    # If every last batch is dropped, no sample is visited, which is not a divergence.
    mean = tree.row_sum(info.loss * samples) / jnp.maximum(tree.row_sum(samples), 1)
    nobody = jnp.any(skipped) & ~jnp.any(samples > 0)
    return jnp.where(nobody, jnp.nan, mean)
