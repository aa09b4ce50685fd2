"""The steps after the last round: collecting models in flight, and the finish."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, ClientData, FedState, Finish, PyTree, Variables
from fedjax_sim.engine import tree
from fedjax_sim.engine.chunks import Addend
from fedjax_sim.engine.clients import Visits, client_sizes, samples_of, visits
from fedjax_sim.engine.streams import Round, stream
from fedjax_sim.round import collecting
from fedjax_sim.round import sending as sendings
from fedjax_sim.round.parts import Parts


def collect(parts: Parts, key: Array, state: FedState, data: ClientData) -> tuple[Variables, Array]:
    """Aggregates all models in flight; returns the server model and the uploads ``int32[]``."""
    if state.slots is None or parts.exchange.fragments:
        return state.server, jnp.int32(0)
    slots, due = state.slots, parts.flight.due(state.round - 1, parts.slots)
    samples = client_sizes(data, slots.client, state.round - 1)
    slots = sendings.send_rest(parts, key, state, data, slots, ~due)

    def absorb_all() -> Variables:
        cohort = collecting.cohort_of(parts, state, slots, samples, data)
        return collecting.absorb(parts, key, state, slots, cohort, jnp.ones_like(due)).server

    # If all were due, the server has just aggregated them.
    server = jax.lax.cond(jnp.all(due), lambda: state.server, absorb_all)
    # A model that no client has trained, because all that were chosen slept, is at no client.
    uploads = jnp.sum(~due & parts.selection.sticky & (slots.visits > 0), dtype=jnp.int32)
    return server, uploads + parts.relays * jnp.any(~due).astype(jnp.int32)


def finish(parts: Parts, key: Array, server: Variables, data: ClientData) -> Variables:
    """Returns the final model, after the finish on all clients' samples."""
    part = parts.finish
    if part is None:
        return server
    clients = jnp.minimum(
        jnp.arange(parts.execution.rows(data.clients), dtype=jnp.int32), data.clients
    )

    def one(samples: PyTree, server: Variables, own: PyTree, visit: Visits) -> PyTree:
        client = visit.view(samples, data)
        nothing: PyTree = ()
        return nothing, Addend((client.size > 0).astype(jnp.float32), part.tell(server, client))

    # All clients, but no more at once than a round trains.
    at_once = parts.execution.rows(parts.slots) // parts.execution.groups
    execution = dataclasses.replace(parts.execution, chunk=parts.execution.chunk or at_once)
    tasks = execution.replicate(visits(data, clients))
    _, total = execution.run(one, samples_of(data), server, (), tasks, summed=True)
    typed = jax.tree.map(
        lambda a, told: tree.in_dtype(a, told.dtype), total, _message_shapes(part, server, data)
    )
    return part.move(stream(key, Round.FINISH), server, typed)


def finish_bytes(parts: Parts, variables: Variables, data: ClientData) -> int:
    """Returns the bytes that a client sends after the last round; takes arrays or shapes."""
    if parts.finish is None:
        return 0
    return tree.num_bytes(_message_shapes(parts.finish, variables, data))


def _message_shapes(part: Finish, variables: Variables, data: ClientData) -> PyTree:
    """Returns shapes and dtypes of a client's message."""

    def tell(variables: Variables, data: ClientData) -> PyTree:
        task = visits(data, jnp.zeros(1, jnp.int32))
        client = tree.take(task, jnp.int32(0)).view(samples_of(data), data)
        return part.tell(variables, client)

    return jax.eval_shape(tell, variables, data)
