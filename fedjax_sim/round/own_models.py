"""Scores of the clients' personal models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, ClientData, FedState, PyTree, Variables
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import samples_of, visits
from fedjax_sim.engine.streams import Round, stream
from fedjax_sim.round.exchanging import with_own
from fedjax_sim.round.parts import Parts


def score_own(
    parts: Parts,
    key: Array,
    server: Variables,
    state: FedState,
    data: ClientData,
    score: Callable[[PyTree, Variables, PyTree], PyTree],
    constants: PyTree,
    tasks: PyTree,
    clients: Array | None = None,
) -> PyTree:
    """Runs ``score(constants, variables, task)`` with each personal model; returns ``[K, ...]``.

    Without a server, a client starts from its own model.

    Args:
        parts: parts of the algorithm.
        key: key of the evaluation.
        server: the model that the server broadcasts.
        state: state after a round.
        data: the clients.
        score: function to compute.
        constants: values that all clients share.
        tasks: ``[K, ...]``.
        clients: ``int32[K]``, N for an empty place; the state has their rows, in this order. None:
            all.

    Raises:
        ValueError: if the algorithm has no personal models.
    """
    own_model = parts.personal
    if own_model is None:
        raise ValueError("the algorithm has no personal models, see personal of compose")
    # In their order, not dealt by size: each device scores the clients whose states it has.
    if clients is None:
        clients = jnp.arange(data.clients, dtype=jnp.int32)
    count, rows = len(clients), parts.execution.rows(len(clients))
    row = jnp.minimum(jnp.arange(rows, dtype=jnp.int32), count)
    client = jnp.pad(clients, (0, rows - count), constant_values=data.clients)

    def one(fixed: PyTree, common: PyTree, kept: PyTree, task: PyTree) -> PyTree:
        (pixels, constants), (server, sent, number), (key, visit, task) = fixed, common, task
        client_state, mine, node = kept
        client = visit.view(pixels, data, number, trains=False)
        received, _ = parts.broadcast.send(None, sent, server if node is None else node, client)
        used = with_own(mine, received)
        return score(constants, own_model(key, used, client, client_state), task)

    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(stream(key, Round.PERSONAL), client)
    own = (keys, visits(data, client, peers=parts.local.peers), tree.take(tasks, row))
    # All clients, but no more at once than a round trains.
    at_once = parts.execution.rows(parts.slots) // len(parts.execution.devices)
    execution = dataclasses.replace(parts.execution, chunk=parts.execution.chunk or at_once)
    # A gather by number would make them whole on every device.
    padded = tree.longer((state.client_state, state.own), rows - count)
    out = execution.run(
        one,
        (samples_of(data), constants),
        (server, state.broadcast, state.round),
        (*padded, _nodes(parts, server, state, client)),
        parts.execution.replicate(own),
    )
    return jax.tree.map(lambda a: a[:count], parts.execution.replicate(out))


def _nodes(parts: Parts, mean: Variables, state: FedState, client: Array) -> PyTree:
    """Returns the models of ``client int32[P]`` if there is no server: ``[P, *p]``, else None.

    A client without a model starts from ``mean``.
    """
    slots = state.slots
    if slots is None or not parts.flight.serverless:
        return None
    models = slots.variables
    if parts.weighted:
        models = jax.vmap(tree.scale)(1 / slots.weight, models)
    hits = client[:, None] == slots.client[None]
    mine = tree.take(models, jnp.argmax(hits, axis=1).astype(jnp.int32))
    return jax.vmap(lambda has, own: tree.select(has, own, mean))(jnp.any(hits, axis=1), mine)
