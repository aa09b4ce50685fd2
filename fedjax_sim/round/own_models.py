"""Scores of the clients' personal models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, ClientData, ClientView, FedState, PyTree, Variables, shown
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import samples_of, visits
from fedjax_sim.engine.streams import Client, Round, stream
from fedjax_sim.round.exchanging import covered, with_own
from fedjax_sim.round.exchanging import own as own_leaves
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
    *,
    adapt: bool = False,
) -> PyTree:
    """Runs ``score(constants, variables, task)`` with each personal model; returns ``[K, ...]``.

    Clients train as in the last round. Without a server, a client starts from its own model.
    Clients that never trained have no state: if they ``adapt``, each first trains on ``data`` once,
    unknown to the server. ``tasks [K, ...]`` belong to the ``clients int32[K]``, N for an empty
    place, whose rows the state has in this order; None: all clients.

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
        (pixels, constants), (key, visit, task) = fixed, task
        server, sent, number, shared, coin = common
        client_state, mine, node = kept
        has = parts.exchange.coverage
        client = visit.view(pixels, data, number, coin, trains=False, coverage=has)
        received, _ = parts.broadcast.send(None, sent, server if node is None else node, client)
        if adapt:
            client_state, mine = _first_visit(parts, key, received, client, shared)
            client = dataclasses.replace(client, coin=None)  # from here on it is only scored
        used = with_own(mine, covered(parts, received, client.id, number))
        return score(constants, own_model(key, used, client, client_state), task)

    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(stream(key, Round.PERSONAL), client)
    tasks = tree.take(jax.tree.map(jnp.asarray, tasks), row)
    own = (keys, visits(data, client, peers=parts.local.peers), tasks)
    # All clients, but no more at once than a round trains.
    at_once = parts.execution.rows(parts.slots) // parts.execution.groups
    execution = dataclasses.replace(parts.execution, chunk=parts.execution.chunk or at_once)
    # As in the round that has ended: in the next, a learning rate may be 0, and samples not there.
    last = jnp.maximum(state.round - 1, 0)
    # A gather by number would make them whole on every device.
    padded = ((), ()) if adapt else tree.longer((state.client_state, state.own), rows - count)
    rest = (state.shared_state, stream(key, Round.COIN)) if adapt else (None, None)
    out = execution.run(
        one,
        (samples_of(data), constants),
        (server, state.broadcast, last, *rest),
        (*padded, _nodes(parts, server, state, client)),
        parts.execution.replicate(own),
    )
    return jax.tree.map(lambda a: a[:count], parts.execution.replicate(out))


def _first_visit(
    parts: Parts, key: Array, received: Variables, client: ClientView, shared: PyTree
) -> tuple[PyTree, PyTree]:
    """Returns the state and the own leaves that a new client keeps after one visit."""
    start, mine = parts.local.client_state(received), own_leaves(parts, received)
    if not jax.tree.leaves((start, mine)):
        return start, mine  # it keeps nothing: a visit would change nothing
    key = stream(key, Client.FIRST_VISIT)
    trained = parts.local.train(key, received, client, start, shared)
    return trained.client_state, own_leaves(parts, trained.variables)


def check_adapts(parts: Parts) -> None:
    """Rejects parts with which clients that never trained cannot get a personal model.

    Raises:
        ValueError: names the part.
    """
    unmade = {
        "flight": parts.flight.serverless,
        "broadcast": parts.broadcast.by_client,
        "exchange": parts.exchange.nothing,
        "local": parts.local.peers or parts.local.clients is not None,
    }
    for role, wrong in unmade.items():
        if wrong:
            raise ValueError(
                "clients that adapt need a personal model made from the server's model and their "
                f"own samples alone, {role} is {shown(getattr(parts, role))}: score clients that "
                "train"
            )


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
