"""The server's part of a round: weights, aggregation and the server update."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    Cohort,
    FedState,
    Gathered,
    PyTree,
    Slots,
    Variables,
    shown,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import client_sizes
from fedjax_sim.engine.needs import per_visit
from fedjax_sim.engine.streams import Round, stream
from fedjax_sim.engine.vmapped import everywhere
from fedjax_sim.round.exchanging import fragments, over_covered, received, travels
from fedjax_sim.round.parts import Parts

CLIENTS = (
    "selection",
    "client_state",
    "own",
    "sending",
    "shared_state",
    "diagnostics",
    "clock",
    "at_work",
)
"""Fields of a state that the server does not change, except by ``follow`` of a local update."""


def cohort_of(
    parts: Parts, state: FedState, slots: Slots, samples: Array, data: ClientData
) -> Cohort:
    """Returns the cohort; ``samples int32[P]`` are the clients' n_k."""
    return Cohort(
        server=state.server,
        received=measured_from(parts, state, slots),
        client=slots.client,
        present=slots.client < data.clients,
        samples=samples,
        info=slots.info,
        tag=slots.tag,
        data=data,
    )


def expected_visits(parts: Parts, state: FedState, data: ClientData, clients: Array) -> Array:
    """Returns the expected visits that divide each client's weight, ``f32[P]``; 1 if none do."""
    stated = parts.selection.expected_visits
    if not per_visit(parts) or stated is None:
        return jnp.ones(len(clients), jnp.float32)
    visits = stated(state.selection, data, parts.slots)
    if visits.shape != (data.clients,):
        raise ValueError(
            f"selection {shown(parts.selection)} must state the expected visits of each of the "
            f"{data.clients} clients, got the shape {visits.shape}"
        )
    return visits.at[clients].get(mode="fill", fill_value=1)


def with_chances(parts: Parts, state: FedState, cohort: Cohort, chance: Array | None) -> Cohort:
    """Adds the probabilities that divide the weights, and the weight of all possible senders.

    ``chance f32[P]`` is the probability with which each row sends; None: 1.
    """
    everyone, data = per_visit(parts), cohort.data
    if chance is None and not everyone:
        return cohort
    visits = expected_visits(parts, state, data, cohort.client)
    if everyone:
        samples = client_sizes(data, jnp.arange(data.clients, dtype=jnp.int32), state.round)
        whole = jnp.sum(parts.weighting(samples, samples))
    else:
        weights = parts.weighting(cohort.samples, cohort.samples)
        whole = tree.row_sum(jnp.where(cohort.present, weights, 0))
    chance = visits if chance is None else visits * chance
    return cohort._replace(chance=chance, whole=parts.execution.replicate(whole))


def measured_from(parts: Parts, state: FedState, slots: Slots) -> Variables:
    """Returns the models that updates are relative to: ``[P, *p]``, or ``[1, *p]`` for all."""
    model: Variables = slots.received if parts.remembers else tree.stack_copies(state.server, 1)
    return model


def weights_of(parts: Parts, samples: Array, visited: Array, counted: Array) -> Array:
    """Returns the weight of each update, ``f32[P]``; 0 outside ``counted bool[P]``.

    ``samples int32[P]`` is n_k, ``visited int32[P]`` the number that each model was trained on.
    """
    weights = parts.weighting(samples, visited)
    return parts.execution.replicate(jnp.where(counted, weights, 0))


def absorb(
    parts: Parts,
    key: Array,
    state: FedState,
    slots: Slots,
    cohort: Cohort,
    due: Array,
    updates: PyTree = None,
) -> FedState:
    """Aggregates the models ``due bool[P]``, if any, and updates the server.

    The messages have changed the shared state in ``state``. ``updates`` are the sent updates,
    ``[P, *p]``, if ``parts.holds_updates``, else their mean, ``[*p]``; None: the models in
    ``slots``, after training, minus ``cohort.received``.
    """
    # Without the clients' fields, which lax.cond would copy through both branches.
    none: dict[str, Any] = dict.fromkeys(CLIENTS, ())
    if parts.local.follow is not None:
        del none["shared_state"]
    state = state._replace(slots=None, **none)

    def take_due(_: None) -> FedState:
        counted = due & (slots.visits > 0)
        weights = weights_of(parts, cohort.samples, slots.samples_visited, counted)
        if cohort.chance is not None:
            weights = weights / jnp.where(counted, cohort.chance, 1)
        held: PyTree = updates if parts.holds_updates else ()
        if updates is None:
            held = tree.subtract(slots.variables, cohort.received)
        gathered, after = _preaggregate(parts, key, state, Gathered(held, weights, cohort))
        own_key, opt_state, shared = stream(key, Round.SERVER), state.opt_state, state.shared_state
        sent = received(parts, state.server)
        if parts.exchange.fragments:
            taken, opt_state = _fragment_moves(parts, own_key, state.round, opt_state, gathered)
        else:
            if parts.holds_updates:
                step = aggregate(parts, gathered)
            else:
                step = _over_whole(updates, gathered)
            step = over_covered(parts, step, gathered, state.round)
            masks = travels(parts, state.server), sent
            taken, opt_state, shared = _server_moves(
                parts, own_key, step, opt_state, shared, gathered, *masks
            )
        moved = tree.filled(tree.only(sent, tree.add(state.server, taken)), state.server)
        broadcast = parts.broadcast.update(state.broadcast, moved, gathered, parts.aggregator)
        new = state._replace(
            server=moved,
            server_samples=jnp.sum(jnp.where(counted, cohort.samples, 0)).astype(jnp.float32),
            opt_state=opt_state,
            shared_state=shared,
            broadcast=broadcast,
            preaggregation=after,
        )
        # An empty cohort (Poisson sampling may draw one) changes nothing.
        return tree.select(jnp.any(gathered.weights > 0), new, state)

    if not parts.in_flight:
        return take_due(None)
    nobody = everywhere(~jnp.any(due))
    return jax.lax.cond(nobody, lambda _: state, take_due, None)


def _preaggregate(
    parts: Parts, key: Array, state: FedState, gathered: Gathered
) -> tuple[Gathered, tuple[PyTree, ...]]:
    """Applies the pre-aggregations; returns the result and their states."""
    # They must not change leaves that do not travel.
    updates, weights, cohort = _part_of(travels(parts, state.server), gathered)
    own_key = stream(key, Round.PREAGGREGATION)
    after = []
    for i, (part, kept) in enumerate(zip(parts.preaggregation, state.preaggregation, strict=True)):
        before = updates
        updates, weights, kept = part.apply(
            jax.random.fold_in(own_key, i), kept, updates, weights, cohort
        )
        _check_shapes(f"preaggregation {shown(part)} must return what travels", updates, before)
        after.append(kept)
    changes = tree.filled(updates, gathered.updates)
    return Gathered(changes, weights, gathered.cohort), tuple(after)


def _server_moves(
    parts: Parts,
    key: Array,
    step: Variables,
    opt_state: PyTree,
    shared_state: PyTree,
    gathered: Gathered,
    mask: PyTree,
    sent: PyTree,
) -> tuple[Variables, PyTree, PyTree]:
    """Returns the server's step, its state, and the shared state after the aggregate ``step``.

    ``mask`` are the leaves that travel, ``sent`` the leaves that clients receive.
    """
    server = gathered.cohort.server
    _check_shapes("aggregator must return what the server holds", step, server)
    if parts.local.follow is not None:
        shared_state = parts.local.follow(shared_state, step, gathered)
    # A code or a norm of the server only applies to leaves that it changes.
    some = _part_of(mask, gathered, sent)
    taken, opt_state = parts.server.update(
        key, tree.only(mask, step), some.cohort.server, opt_state, some
    )
    _check_shapes("server must return what the server holds", taken, some.cohort.server)
    return tree.filled(taken, jax.tree.map(jnp.zeros_like, server)), opt_state, shared_state


def _part_of(mask: PyTree, gathered: Gathered, models: PyTree | None = None) -> Gathered:
    """Selects some leaves of the gathered updates, and these or ``models`` of the models."""
    cohort, updates = gathered.cohort, gathered.updates
    kept = mask if models is None else models
    cohort = cohort._replace(
        server=tree.only(kept, cohort.server), received=tree.only(kept, cohort.received)
    )
    return gathered._replace(
        updates=tree.only(mask, updates) if isinstance(updates, Variables) else updates,
        cohort=cohort,
    )


def _fragment_moves(
    parts: Parts, key: Array, turn: Array, opt_state: PyTree, gathered: Gathered
) -> tuple[Variables, PyTree]:
    """Returns the server's step in the fragment ``turn int32[]``, and the state of each fragment.

    All fragments are computed: together they are as large as one model, and a switch under vmap
    (over seeds) would compute them too.
    """
    cohort, masks = gathered.cohort, fragments(parts, gathered.cohort.server)
    step, after = jax.tree.map(jnp.zeros_like, cohort.server), []
    for number, (mask, old) in enumerate(zip(masks, opt_state, strict=True)):
        part = _part_of(mask, gathered)
        all_ = jax.tree.map(lambda leaf: True, part.cohort.server)  # of a fragment
        mean = aggregate(parts, part)
        taken, new, _ = _server_moves(parts, key, mean, old, (), part, all_, all_)
        here = turn % len(masks) == number
        zero = jax.tree.map(jnp.zeros_like, taken)
        step = tree.filled(tree.select(here, taken, zero), step)
        after.append(tree.select(here, new, old))
    return step, tuple(after)


def aggregate(parts: Parts, gathered: Gathered) -> Variables:
    """Returns the aggregate of the updates, relative to the server model: ``[*p]``."""
    updates, cohort = gathered.updates, gathered.cohort
    if parts.remembers:
        updates = jax.tree.map(
            lambda update, start, w: update + (start - w[None]),
            updates,
            cohort.received,
            cohort.server,
        )
    step: Variables = parts.aggregator(updates, gathered.weights)
    return _over_whole(step, gathered)


def _over_whole(mean: Variables, gathered: Gathered) -> Variables:
    """Returns the weighted sum over the weight of all clients, or the mean if it is unknown."""
    whole = gathered.cohort.whole
    if whole is None:
        return mean
    share = tree.row_sum(gathered.weights) / whole
    return mean._replace(params=tree.scale(share, mean.params))


def evaluated(parts: Parts, state: FedState, data: ClientData) -> Variables:
    """Returns the model to evaluate: the server model, or the aggregate of those in flight."""
    slots = state.slots
    if slots is None or not (parts.flight.serverless or parts.flight.evaluated == "in_flight"):
        return state.server
    samples = client_sizes(data, slots.client, state.round - 1)
    weights = parts.weighting(samples, slots.samples_visited)
    weights = jnp.where(slots.visits > 0, weights, 0)
    changes = tree.subtract(slots.variables, tree.stack_copies(state.server, 1))
    step = parts.aggregator(changes, weights)
    mean: Variables = tree.select(jnp.any(weights > 0), tree.add(state.server, step), state.server)
    return mean


def _check_shapes(rule: str, found: PyTree, given: Variables) -> None:
    got, wanted = (
        jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", tree) for tree in (found, given)
    )
    if got != wanted:  # in full, unlike the repr of Variables
        got, wanted = (t._asdict() if isinstance(t, Variables) else t for t in (got, wanted))
        raise ValueError(f"{rule}, {wanted}, got {got}")
