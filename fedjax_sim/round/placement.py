"""Slots and rows: the client that each slot visits, and the device.

A *slot* is a model in flight; between two rounds the state lists them by number. A *row* is an
entry of the stack that is trained: rows are dealt to the devices for equal work, equally many to
each, so some rows may hold no slot. Rows only exist within a round.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import (
    Array,
    AtWork,
    ClientData,
    Elapsed,
    FedState,
    LearnedRedistribution,
    LocalInfo,
    Model,
    Moves,
    Now,
    Outlook,
    PyTree,
    Slots,
    TrainInSteps,
    Variables,
    shown,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import client_sizes
from fedjax_sim.engine.device import launch_price
from fedjax_sim.engine.execution import Execution
from fedjax_sim.engine.streams import Round, stream
from fedjax_sim.plan.moves import Gather
from fedjax_sim.round.parts import Parts


class Arrivals(NamedTuple):
    """The clients whose updates arrive in a round, in the order of their numbers."""

    client: Array  # int32[K]; N for an empty place
    age: Array  # int32[K], rounds since the client's model was sent
    models: Variables  # [K, *p], the models that the clients received
    at_work: AtWork  # clients still in flight, including those sent in this round
    sent: Array  # int32[], number of models that the server sent
    now: Now  # the end of the round
    elapsed: Elapsed  # times of the round


class Placed(NamedTuple):
    """The models of a round by row, before or after training."""

    slots: Slots  # [P], the slots in their rows
    slot: Array  # int32[P], number of the slot; S for a padding row
    fresh: Array  # bool[P], whether the slot leaves the server in this round
    samples: Array  # int32[P], n_k of the visited client; 0 without a client


class Draw(NamedTuple):
    """States and counts of a round's plan."""

    selection: PyTree  # state of the selection
    redistribution: PyTree  # state of the redistribution
    exchanged: Array  # int32[], models that moved from client to client between the rounds
    sent: Array  # int32[], models sent to clients that may return in a later round
    lost: Array  # int32[], clients with such models that were lost
    client: Array  # int32[S], client of each slot; N for an empty slot
    assigned: Array  # int32[S], client of each slot, including sleeping clients
    source: Array  # int32[S], slot whose model each slot took over


def fitted(parts: Parts, model: Model, data: ClientData, runs: int) -> Execution:
    """Returns the execution with as many lanes as the sizes of ``data`` keep busy, unless given.

    The data are concrete; ``start`` may have an axis of runs.
    """
    if parts.execution.lanes is not None or not isinstance(parts.local.train, TrainInSteps):
        return parts.execution
    steps = np.broadcast_to(client_steps(parts, data), (runs, data.clients))
    key = jax.eval_shape(lambda: jax.random.key(0))
    variables = jax.eval_shape(model.init, key)
    size = parts.local.batch_size
    batch = tree.row_shapes(data.x, size)

    def forward(variables: Variables, x: PyTree, key: Array) -> PyTree:
        return model.apply(variables, x, train=True, mask=jnp.ones(size, bool), key=key)

    traced = jax.make_jaxpr(forward)(variables, batch, key).jaxpr
    price = launch_price(traced, tree.num_bytes(variables.params))
    return parts.execution.fitted(steps, parts.slots, price)


def with_size_range(data: ClientData, execution: Execution) -> ClientData:
    """Returns the data with the range of the clients' sizes, if clients train under vmap.

    Where they train one after another, loops of traced length skip clients without samples.
    """
    if execution.differentiable or (execution.chunk == 1 and not execution.lanes):
        return data
    sizes = np.diff(data.start)
    sizes = sizes[sizes > 0]
    known = (int(sizes.min()), int(sizes.max())) if sizes.size else None
    return dataclasses.replace(data, size_range=known)


def client_steps(parts: Parts, data: ClientData) -> NDArray[np.integer[Any]]:
    """Returns the local steps of a visit to each client of concrete data, ``[N]`` or ``[R, N]``."""
    sizes = np.diff(data.start) if data.budget is None else np.asarray(data.budget)
    sizes = np.minimum(sizes, data.samples_per_round or data.capacity)
    sizes = sizes.astype(np.int32)
    clients = np.broadcast_to(np.arange(data.clients), sizes.shape)
    return np.asarray(parts.local.steps_for(sizes, clients))


def place(
    parts: Parts,
    key: Array,
    state: FedState,
    data: ClientData,
    outlook: Outlook | None,
    back: Arrivals | None,
) -> tuple[Placed, Draw]:
    """Draws a client for every slot, or takes returning clients; deals the slots to rows.

    ``outlook`` is the clock's forecast; ``back`` are the clients that return, None if rounds are
    synchronous.
    """
    if back is not None:
        return _place_arrivals(parts, state, data, back)
    count, none = parts.slots, data.clients
    by_slot = jnp.arange(count, dtype=jnp.int32)
    fresh = parts.flight.due(state.round - 1, count) | (state.round == 0)
    flying, remembered = state.slots, state.redistribution
    if flying is None:
        clients, visits, exchanged = by_slot, jnp.zeros(count, jnp.int32), jnp.int32(0)
        source = by_slot
    else:
        clients = flying.client
        moves, remembered = _moves(parts, stream(key, Round.REDISTRIBUTION), state, flying)
        numbered = flying._replace(variables=(), received=(), client=by_slot)
        moved = moves.take(numbered, by_slot)
        visits, source = moved.visits, moved.client
        exchanged = jnp.int32(0)
        if parts.selection.sticky:  # else every model travels
            exchanged = jnp.sum(jnp.where(fresh, 0, moves.received()), dtype=jnp.int32)
    given = (
        stream(key, Round.SELECTION),
        state.selection,
        data,
        clients,
        fresh if parts.selection.sticky else jnp.ones(count, bool),
        jnp.where(fresh, 0, visits),
    )
    timed = parts.selection.timed
    if timed is None or outlook is None:
        clients, chosen = parts.selection.draw(*given)
    else:
        clients, chosen = timed(*given, outlook)
    if jnp.shape(clients) != (count,) or not jnp.issubdtype(clients.dtype, jnp.integer):
        raise ValueError(
            f"selection {parts.selection} must draw int32[{count}], a client for each slot, got "
            f"{shown(clients)}"
        )
    assigned = _order_cohort(parts, key, clients, fresh, none)
    clients = by_number = awake(parts, key, state, assigned, none)
    samples = client_sizes(data, clients, state.round)
    row = _rows(parts, samples)
    carry = _empty(row) if flying is None else moves.take(flying, row)
    placed = _deal(parts, row, clients, none, fresh, samples, carry)
    nobody = jnp.int32(0)
    return placed, Draw(chosen, remembered, exchanged, nobody, nobody, by_number, assigned, source)


def _moves(parts: Parts, key: Array, state: FedState, flying: Slots) -> tuple[Moves, PyTree]:
    """Returns the moves of models, and the state of the redistribution."""
    redistribution = parts.flight.redistribution
    if redistribution is None:
        return Gather(jnp.arange(parts.slots, dtype=jnp.int32)), state.redistribution
    if not isinstance(redistribution, LearnedRedistribution):
        return redistribution(key, parts.slots), state.redistribution
    moved: tuple[Moves, PyTree] = redistribution.move(key, state.redistribution, flying)
    return parts.execution.replicate(moved)


def _place_arrivals(
    parts: Parts, state: FedState, data: ClientData, back: Arrivals
) -> tuple[Placed, Draw]:
    """Places the clients that return, with the models that they received."""
    samples = client_sizes(data, back.client)
    row = _rows(parts, samples)
    here = jnp.minimum(row, parts.slots - 1)
    models = tree.take(back.models, here)
    carry = _empty(row)._replace(variables=models, tag=back.age[here])
    fresh = jnp.ones(parts.slots, bool)
    placed = _deal(parts, row, back.client, data.clients, fresh, samples, carry)
    by_slot = jnp.arange(parts.slots, dtype=jnp.int32)
    draw = Draw(
        selection=state.selection,
        redistribution=state.redistribution,
        exchanged=jnp.int32(0),
        sent=back.sent,
        lost=back.elapsed.lost,
        client=back.client,
        assigned=back.client,
        source=by_slot,
    )
    return placed, draw


def _rows(parts: Parts, samples: Array) -> Array:
    """Returns the slot of each row, ``int32[P]``, dealt for equal work; S for padding."""
    if parts.execution.rows_are_tasks:
        return jnp.arange(parts.slots, dtype=jnp.int32)
    return parts.execution.deal(samples)


def _empty(row: Array) -> Slots:
    """Returns empty slots, for models that do not stay in flight."""
    zero = jnp.zeros_like(row)
    return Slots((), zero, zero, zero, LocalInfo(zero, zero, zero), (), ())


def _deal(
    parts: Parts, row: Array, clients: Array, none: int, fresh: Array, samples: Array, carry: Slots
) -> Placed:
    """Deals the values of slots, ``[S]``, to rows ``int32[P]``; ``carry`` is already by row."""
    held = row < parts.slots
    clients, samples = (
        jnp.where(held, a[row], absent) for a, absent in ((clients, none), (samples, 0))
    )
    row, clients, fresh, samples = parts.execution.replicate((row, clients, fresh[row], samples))
    weight = jax.tree.map(lambda w: jnp.where(fresh, 1, w), carry.weight)
    return Placed(carry._replace(client=clients, weight=weight), row, fresh, samples)


def _order_cohort(parts: Parts, key: Array, clients: Array, fresh: Array, none: int) -> Array:
    """Orders the cohort ``int32[S]`` independently of the order of the draw.

    No result depends on that order, not even in the last bit of a sum. Idle slots stay idle. Models
    in flight get random next clients: in the order of the clients' numbers, a slot that keeps its
    model would only get low or high ones.
    """
    group = jnp.asarray(parts.group)
    by: tuple[Array, ...] = clients == none, group
    if parts.in_flight and not parts.selection.sticky:
        luck = jax.random.uniform(stream(key, Round.DEAL), (len(clients),), jnp.float32)
        by = jnp.where(fresh, 0, luck), *by
    slots = jnp.lexsort(by)
    return clients.at[slots].set(clients[jnp.lexsort((clients, group))])


def awake(parts: Parts, key: Array, state: FedState, clients: Array, none: int) -> Array:
    """Returns the cohort ``int32[S]`` without sleeping clients, whose slots are idle."""
    if parts.clock is None or parts.clock.available is None:
        return clients
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(stream(key, Round.AWAKE), clients)
    return jnp.where(parts.clock.available(keys, clients, state.clock), clients, none)


def to_slots(parts: Parts, placed: Placed, draw: Draw) -> Slots:
    """Returns the slots in the order of their numbers, ``[S]``."""
    slots = placed.slots
    if not parts.execution.rows_are_tasks:
        here = jnp.arange(len(placed.slot), dtype=jnp.int32)
        row = jnp.zeros(parts.slots, jnp.int32).at[placed.slot].set(here, mode="drop")
        slots = tree.take(slots, row)
    if parts.loses and parts.selection.sticky:  # a slot keeps a client that did not arrive
        slots = slots._replace(client=draw.assigned)
    return slots


def initial_slots(parts: Parts, state: FedState, info: LocalInfo, tag: PyTree) -> Slots:
    """Returns the slots before the first round; ``info`` and ``tag`` are shapes."""
    none = jnp.zeros(parts.slots, jnp.int32)
    info, tag = jax.tree.map(lambda a: jnp.zeros((parts.slots, *a.shape), a.dtype), (info, tag))
    copies = tree.stack_copies(state.server, parts.slots)
    return Slots(
        variables=copies,
        client=jnp.arange(parts.slots, dtype=jnp.int32),
        visits=none,
        samples_visited=none,
        info=info,
        tag=tag,
        received=copies if parts.remembers else (),
        weight=jnp.ones(parts.slots, jnp.float32) if parts.weighted else (),
    )
