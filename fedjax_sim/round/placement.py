"""Slots and rows: which slot visits which client, and on which device.

A *slot* is a model in flight: between two rounds the state lists them by their number. A *row* is a
line of the stack that is trained: rows are dealt to the devices so that all have equal work, and
each device has as many, so that some rows may hold no slot. Nothing that a round hands on knows
rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import (
    Array,
    ClientData,
    FedState,
    LearnedRedistribution,
    LocalInfo,
    Moves,
    Outlook,
    PyTree,
    Slots,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import client_sizes
from fedjax_sim.engine.execution import Execution
from fedjax_sim.engine.streams import Round, stream
from fedjax_sim.round.arrivals import Back
from fedjax_sim.round.parts import Parts


class Placed(NamedTuple):
    """The models of a round by row, before or after they are trained.

    Attributes:
        slots: ``[P]``, the slots in their rows.
        slot: ``int32[P]``, the slot's number; S for a padding row.
        fresh: ``bool[P]``, whether the slot leaves the server in this round.
        samples: ``int32[P]``, n_k of the client visited; 0 if there is none.
    """

    slots: Slots
    slot: Array
    fresh: Array
    samples: Array


class Draw(NamedTuple):
    """What the plan of a round gives besides.

    Attributes:
        selection: the state of the selection.
        redistribution: that of the redistribution.
        exchanged: ``int32[]``, models that went from client to client between the rounds.
        sent: ``int32[]``, models that were sent to clients who may come back in a later round.
        lost: ``int32[]``, clients of such models that were lost.
        client: ``int32[S]``, the client of each slot; N for none.
        assigned: ``int32[S]``, the same with those that are asleep.
        source: ``int32[S]``, the slot whose model each slot took over.
    """

    selection: PyTree
    redistribution: PyTree
    exchanged: Array
    sent: Array
    lost: Array
    client: Array
    assigned: Array
    source: Array


def fitted(parts: Parts, data: ClientData, runs: int) -> Execution:
    """The execution with as many lanes as the sizes of ``data`` keep busy, unless it has some.

    Args:
        parts: of the algorithm.
        data: the clients, concrete; ``start`` may have an axis of runs.
        runs: how many runs one program has.
    """
    if parts.execution.lanes is not None:
        return parts.execution
    steps = np.broadcast_to(client_steps(parts, data), (runs, data.clients))
    return parts.execution.fitted(steps, parts.slots)


def client_steps(parts: Parts, data: ClientData) -> NDArray[np.integer[Any]]:
    """Returns the local steps of a visit to each client, ``[N]`` or ``[R, N]``.

    Args:
        parts: of the algorithm.
        data: the clients, concrete; ``start`` may have an axis of runs.
    """
    sizes = np.diff(data.start) if data.budget is None else np.asarray(data.budget)
    sizes = np.minimum(sizes, data.samples_per_round or data.capacity)
    return np.asarray(parts.local.steps_for(sizes.astype(np.int32)))


def place(
    parts: Parts,
    key: Array,
    state: FedState,
    data: ClientData,
    outlook: Outlook | None = None,
    back: Back | None = None,
) -> tuple[Placed, Draw]:
    """Draws a client for every slot, or takes those that come back; deals the slots to rows.

    Args:
        parts: of the algorithm.
        key: of the round.
        state: before it.
        data: the clients.
        outlook: what the clock foresees.
        back: those that come back; None if the round waits for those that it sends.
    """
    if back is not None:
        return _came(parts, state, data, back)
    count, none = parts.slots, data.clients
    by_slot = jnp.arange(count, dtype=jnp.int32)
    fresh = parts.schedule.due(state.round - 1) | (state.round == 0)
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
        if parts.selection.sticky:  # else every model travels, whatever its slot is
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
    assigned = _met(parts, key, clients, fresh, none)
    clients = by_number = awake(parts, key, state, assigned, none)
    samples = client_sizes(data, clients, state.round)
    row = _rows(parts, samples)
    carry = _empty(row) if flying is None else moves.take(flying, row)
    placed = _dealt(parts, row, clients, none, fresh, samples, carry)
    nobody = jnp.int32(0)
    return placed, Draw(chosen, remembered, exchanged, nobody, nobody, by_number, assigned, source)


def _moves(parts: Parts, key: Array, state: FedState, flying: Slots) -> tuple[Moves, PyTree]:
    """Where models go, and what is remembered of them."""
    redistribution = parts.redistribution
    if not isinstance(redistribution, LearnedRedistribution):
        return redistribution(key, parts.slots), state.redistribution
    moved: tuple[Moves, PyTree] = redistribution.move(key, state.redistribution, flying)
    return parts.execution.replicate(moved)


def _came(parts: Parts, state: FedState, data: ClientData, back: Back) -> tuple[Placed, Draw]:
    """Those that come back, with the models that they were sent."""
    samples = client_sizes(data, back.client)
    row = _rows(parts, samples)
    here = jnp.minimum(row, parts.slots - 1)
    models = tree.take(back.models, here)
    carry = _empty(row)._replace(variables=models, tag=back.age[here])
    fresh = jnp.ones(parts.slots, bool)
    placed = _dealt(parts, row, back.client, data.clients, fresh, samples, carry)
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
    """The slot of each row, ``int32[P]``, so that the devices have equal work; S for padding."""
    if parts.execution.rows_are_tasks:
        return jnp.arange(parts.slots, dtype=jnp.int32)
    return parts.execution.deal(samples)


def _empty(row: Array) -> Slots:
    """Slots of which nothing outlives a round."""
    zero = jnp.zeros_like(row)
    return Slots((), zero, zero, zero, LocalInfo(zero, zero, zero), (), ())


def _dealt(
    parts: Parts, row: Array, clients: Array, none: int, fresh: Array, samples: Array, carry: Slots
) -> Placed:
    """What is known of the slots, ``[S]``, in the rows ``int32[P]`` of these; ``carry`` is."""
    held = row < parts.slots
    clients, samples = (
        jnp.where(held, a[row], absent) for a, absent in ((clients, none), (samples, 0))
    )
    row, clients, fresh, samples = parts.execution.replicate((row, clients, fresh[row], samples))
    weight = jax.tree.map(lambda w: jnp.where(fresh, 1, w), carry.weight)
    return Placed(carry._replace(client=clients, weight=weight), row, fresh, samples)


def _met(parts: Parts, key: Array, clients: Array, fresh: Array, none: int) -> Array:
    """The cohort ``int32[S]`` in an order that does not show how it was drawn.

    It must not, not even in the last bit of a sum. A slot that is to be idle stays so. Models in
    flight meet the next clients at random: in the order of the clients' numbers, a slot that keeps
    its model would meet low or high ones only.
    """
    group = jnp.asarray(parts.schedule.group)
    by: tuple[Array, ...] = clients == none, group
    if parts.in_flight and not parts.selection.sticky:
        luck = jax.random.uniform(stream(key, Round.DEAL), (len(clients),), jnp.float32)
        by = jnp.where(fresh, 0, luck), *by
    slots = jnp.lexsort(by)
    return clients.at[slots].set(clients[jnp.lexsort((clients, group))])


def awake(parts: Parts, key: Array, state: FedState, clients: Array, none: int) -> Array:
    """The cohort ``int32[S]`` without those that are asleep: their slots are idle."""
    if parts.clock is None or parts.clock.available is None:
        return clients
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(stream(key, Round.AWAKE), clients)
    return jnp.where(parts.clock.available(keys, clients, state.clock), clients, none)


def to_slots(parts: Parts, placed: Placed, draw: Draw) -> Slots:
    """The slots in the order of their numbers, ``[S]``."""
    slots = placed.slots
    if not parts.execution.rows_are_tasks:
        here = jnp.arange(len(placed.slot), dtype=jnp.int32)
        row = jnp.zeros(parts.slots, jnp.int32).at[placed.slot].set(here, mode="drop")
        slots = tree.take(slots, row)
    if parts.loses and parts.selection.sticky:  # a slot keeps a client that was not there
        slots = slots._replace(client=draw.assigned)
    return slots


def at_rest(parts: Parts, state: FedState, info: LocalInfo, tag: PyTree) -> Slots:
    """The slots before the first round, in which all are fresh; ``info`` and ``tag`` are shapes."""
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
