"""The clients' part of a round: local training and its state."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    ClientView,
    FedState,
    PyTree,
    Trained,
    TrainInSteps,
    Variables,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.chunks import Addend
from fedjax_sim.engine.clients import Visits, samples_of, state_rows, visits
from fedjax_sim.engine.lanes import InSteps
from fedjax_sim.engine.streams import Client, Round, stream
from fedjax_sim.round.collecting import expected_visits, weights_of
from fedjax_sim.round.exchanging import covered, returned, with_fragment, with_own
from fedjax_sim.round.exchanging import own as own_leaves
from fedjax_sim.round.parts import Parts
from fedjax_sim.round.placement import Placed


class _Common(NamedTuple):
    """Values that all rows share."""

    server: Variables
    server_samples: Array
    broadcast: PyTree
    shared_state: PyTree
    round: Array
    coin: Array


class _Own(NamedTuple):
    """The models of a row, and the state of its client."""

    model: PyTree
    client_state: PyTree
    left_with: PyTree
    leaves: PyTree


class _Task(NamedTuple):
    """Other values of a row."""

    key: Array
    visit: Visits
    fresh: Array
    tag: PyTree
    weight: PyTree
    share: PyTree
    limit: PyTree


class _Arrived(NamedTuple):
    """A model at a client."""

    client: ClientView  # the client
    # the model to train: the received one over its weight, with the client's own leaves
    used: Variables
    received: Variables  # the received model
    tag: PyTree  # tag of the broadcast
    origin: PyTree  # the model as it left the server; () if not needed
    round: Array  # int32[], number of the round


def _arrived(
    parts: Parts, data: ClientData, pixels: PyTree, common: _Common, own: _Own, task: _Task
) -> _Arrived:
    """Returns a row's model at its client before training."""
    client = task.visit.view(
        pixels, data, common.round, common.coin, task.limit, coverage=parts.exchange.coverage
    )
    send_key = stream(task.key, Client.BROADCAST)
    received, tag = parts.broadcast.send(send_key, common.broadcast, common.server, client)
    if parts.asynchronous:
        received, tag = own.model, task.tag
    origin = received if parts.remembers else ()
    if parts.in_flight:
        n_k = client.size if client.budget is None else client.budget
        n_k = n_k.astype(jnp.float32)
        server, corrected, refresh = common.server, own.model, parts.flight.refresh
        if refresh is not None:
            corrected = refresh.correct(server, common.server_samples, own.model, n_k)
        if parts.exchange.fragments:
            corrected = with_fragment(parts, common.round - 1, server, corrected)
        # An idle slot is not corrected: it has no samples to weigh against the server's.
        stays = tree.select(n_k > 0, corrected, own.model)
        received, tag, origin = tree.select(
            task.fresh, (received, tag, origin), (stays, task.tag, own.left_with)
        )
    received = covered(parts, received, task.visit.client, common.round)
    used = tree.scale(1 / task.weight, received) if parts.weighted else received
    return _Arrived(client, with_own(own.leaves, used), received, tag, origin, common.round)


def _inputs(
    parts: Parts,
    key: Array,
    state: FedState,
    data: ClientData,
    placed: Placed,
    share: PyTree = (),
    limit: Array | None = None,
) -> tuple[_Common, _Own, _Task]:
    """Returns the inputs of all rows; ``share f32[P]`` weighs updates that are summed."""
    slots = placed.slots
    local_key = stream(key, Round.CLIENTS)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(local_key, slots.client)
    visited = visits(data, slots.client, peers=parts.local.peers)
    tasks = _Task(keys, visited, placed.fresh, slots.tag, slots.weight, share, limit)
    rest = state.shared_state, state.round, stream(key, Round.COIN)
    common = _Common(state.server, state.server_samples, state.broadcast, *rest)
    kept = tree.take((state.client_state, state.own), state_rows(data, slots.client))
    own = _Own(slots.variables, kept[0], slots.received, kept[1])
    return common, own, parts.execution.replicate(tasks)


def survey_clients(
    parts: Parts, key: Array, state: FedState, data: ClientData, placed: Placed
) -> FedState:
    """Surveys the clients before training, if the local update needs it; returns the state."""
    survey = parts.local.survey
    if survey is None:
        return state

    def answer(pixels: PyTree, common: _Common, own: _Own, task: _Task) -> PyTree:
        at = _arrived(parts, data, pixels, common, own, task)
        return survey.ask(task.key, at.used, at.client, own.client_state, common.shared_state)

    inputs = _inputs(parts, key, state, data, placed)
    answers = parts.execution.run(answer, samples_of(data), *inputs)
    present = placed.slots.client < data.clients
    weights = weights_of(parts, placed.samples, placed.samples, present)
    # An empty cohort (Poisson sampling may draw one) has no effect.
    aggregate = parts.aggregator(answers, jnp.where(jnp.any(weights > 0), weights, 1))
    return state._replace(shared_state=survey.tell(state.shared_state, aggregate))


class Work(NamedTuple):
    """The result of local training."""

    # [P], results of the clients; in place of models, unless these stay in flight, updates
    # (exact, as computed at the client), or their mean [*p] if not stored
    trained: Trained
    own: PyTree  # [P, *p], the leaves that stay with the clients
    placed: Placed  # the rows, with the broadcast's tags
    start: PyTree  # [P, *p], the models before training, if they are needed; else ()
    executed: Array  # int32[], the steps that the devices ran or waited


def train(
    parts: Parts,
    key: Array,
    state: FedState,
    data: ClientData,
    placed: Placed,
    due: Array,
    limit: Array | None,
) -> Work:
    """Runs one local update per row, ``[P]``.

    The state is that after :func:`survey_clients`; the server collects the rows ``due bool[P]``.
    ``limit int32[P]`` is the maximum number of steps of each row; None without a limit.
    """
    summed = not parts.holds_updates

    def outputs(arrived: _Arrived, task: _Task, trained: Trained) -> PyTree:
        received, tag, origin = arrived.received, arrived.tag, arrived.origin
        mine = own_leaves(parts, trained.variables)
        model = trained.variables
        if parts.weighted:  # a model moves as far as the trained one did
            model = tree.add(model, tree.subtract(received, arrived.used))
        model = returned(parts, model, received)
        update = model if parts.in_flight else tree.subtract(model, received)
        update = covered(parts, update, task.visit.client, arrived.round)
        asked = (parts.sending and parts.models_travel) or (parts.in_flight and parts.loses)
        start = received if asked else ()
        if not summed:
            return trained._replace(variables=update), mine, tag, origin, start
        nothing: PyTree = ()
        rest = trained._replace(variables=nothing), mine, tag, origin, start
        return rest, Addend(task.share, update)

    def visit(pixels: PyTree, common: _Common, own: _Own, task: _Task) -> PyTree:
        at = _arrived(parts, data, pixels, common, own, task)
        trained = parts.local.train(
            task.key, at.used, at.client, own.client_state, common.shared_state
        )
        return outputs(at, task, trained)

    slots = placed.slots
    share: PyTree = ()
    if summed:
        counted = due & (slots.client < data.clients)
        weights = weights_of(parts, placed.samples, placed.samples, counted)
        weights = weights / expected_visits(parts, state, data, slots.client)
        share = weights / tree.row_sum(weights)
    inputs = _inputs(parts, key, state, data, placed, share, limit)
    ran = None
    run = functools.partial(parts.execution.run, cost=placed.samples, summed=summed)
    if isinstance(parts.local.train, TrainInSteps):
        in_steps = _in_steps(parts, data, parts.local.train, visit, outputs)
        out, ran = run(in_steps, samples_of(data), *inputs)
    else:
        out = run(visit, samples_of(data), *inputs)
    out, total = out if summed else (out, None)
    trained, mine, tag, received, start = out
    if summed:
        mean = jax.tree.map(lambda a, w: tree.in_dtype(a, w.dtype), total, state.server)
        trained = trained._replace(variables=mean)
    # Every device needs all reports, for the metrics at least.
    trained = trained._replace(info=parts.execution.gather(trained.info))
    placed = placed._replace(slots=slots._replace(tag=tag, received=received))
    ran = parts.execution.executed(trained.info.steps) if ran is None else ran
    return Work(trained, mine, placed, start, jnp.sum(ran, dtype=jnp.int32))


def _in_steps(
    parts: Parts,
    data: ClientData,
    train: TrainInSteps,
    whole: Callable[..., PyTree],
    outputs: Callable[[_Arrived, _Task, Trained], PyTree],
) -> InSteps:
    """Splits ``whole``, a visit, into steps between which it can stop; ``outputs`` ends it."""

    def at(
        due: Array | bool,
        arrived: _Arrived,
        pixels: PyTree,
        common: _Common,
        own: _Own,
        task: _Task,
    ) -> tuple[PyTree, ...]:
        client = task.visit.view(
            pixels, data, common.round, common.coin, task.limit, coverage=parts.exchange.coverage
        )
        # Loops over the samples of clients that are not due are empty.
        client = dataclasses.replace(client, size=jnp.where(due, client.size, 0))
        return task.key, arrived.used, client, own.client_state, common.shared_state

    def begin(
        pixels: PyTree, common: _Common, own: _Own, task: _Task, due: Array
    ) -> tuple[PyTree, PyTree]:
        arrived = _arrived(parts, data, pixels, common, own, task)
        plan, carry = train.begin(*at(due, arrived, pixels, common, own, task))
        nobody: PyTree = ()
        return (arrived._replace(client=nobody), plan), carry

    def stretch(*visit_due_and_state: PyTree) -> tuple[PyTree, Array]:
        *visit, due, (arrived, plan), carry = visit_due_and_state
        plan, steps = train.stretch(plan, carry, *at(due, arrived, *visit))
        return (arrived, plan), steps

    def step(*visit_and_state: PyTree) -> PyTree:
        *visit, (arrived, plan), carry = visit_and_state
        return train.step(plan, carry, *at(True, arrived, *visit))

    def end(*visit_due_and_state: PyTree) -> PyTree:
        *visit, due, (arrived, plan), carry = visit_due_and_state
        return outputs(arrived, visit[-1], train.end(plan, carry, *at(due, arrived, *visit)))

    return InSteps(begin, stretch, step, end, whole, lambda out: out[0].info.steps)


def after_training(parts: Parts, placed: Placed, trained: Trained, visited: Array) -> Placed:
    """Returns the slots after training; ``visited bool[P]`` had a client."""
    slots = placed.slots
    since = jnp.zeros_like(placed.samples)
    info = trained.info
    if parts.in_flight:
        since = jnp.where(placed.fresh, 0, 1)
        info = tree.select_rows(visited, info, slots.info)  # idle slots keep their last report
    slots = slots._replace(
        variables=trained.variables if parts.in_flight else (),
        visits=since * slots.visits + visited.astype(jnp.int32),
        samples_visited=since * slots.samples_visited + placed.samples,
        info=info,
    )
    return placed._replace(slots=slots)


def client_states(
    parts: Parts, state: FedState, data: ClientData, placed: Placed, trained: Trained, mine: PyTree
) -> tuple[PyTree, PyTree, PyTree]:
    """Returns the clients' states, their own leaves and the shared state after their visits.

    ``mine [P, *p]`` are the leaves that stay with the clients.
    """
    row = state_rows(data, placed.slots.client)
    kept, own = jax.tree.map(
        lambda all_, rows: all_.at[row].set(rows, mode="drop"),
        (state.client_state, state.own),
        (trained.client_state, mine),
    )
    weights = weights_of(parts, placed.samples, placed.samples, placed.samples > 0)
    shared = parts.local.reduce(
        state.shared_state, trained.message, weights, data.clients, parts.aggregator
    )
    return kept, own, shared
