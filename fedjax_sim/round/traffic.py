"""Bytes: what a model, a message and the start of a run weigh."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    FedState,
    Fragment,
    PyTree,
    SetupTraffic,
    Traffic,
    Variables,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import samples_of, visits
from fedjax_sim.round.exchanging import fragments, frozen, travelling
from fedjax_sim.round.finishing import told_bytes as told_at_the_end
from fedjax_sim.round.parts import Parts
from fedjax_sim.round.placement import Placed
from fedjax_sim.round.start import initial_state
from fedjax_sim.round.training import first_visit


def sizes(parts: Parts, variables: Variables, data: ClientData) -> Traffic:
    """Of everything that travels in a round; takes shapes and gives Python integers."""

    def besides(variables: Variables, data: ClientData) -> tuple[PyTree, PyTree]:
        state = initial_state(parts, variables, data)
        trained, answer, told, _ = first_visit(parts, state, data)
        sent = told if parts.local.told is None else parts.local.told(told)
        return (trained.message, answer), sent

    message, shared_state = map(tree.num_bytes, jax.eval_shape(besides, variables, data))
    return Traffic(
        upload_bytes(parts, variables),
        download_bytes(parts, variables, data.clients),
        message + told_bytes(parts),
        shared_state,
        fragment_bytes(parts, variables),
        told_at_the_end(parts, variables, data),
        answer_bytes(parts, variables, data),
    )


class Trips(NamedTuple):
    """Which models travel in a round, if nothing happens to them; ``[P]`` each.

    Attributes:
        visited: ``bool[P]``, the rows whose clients are there.
        uploads: ``bool[P]``, the rows whose model, or fragment of it, is sent.
        downloads: ``int32[P]``, the models sent to each client, if they come back in the round.
        fragments: ``bool[P]``, the rows that take a fragment instead.
    """

    visited: Array
    uploads: Array
    downloads: Array
    fragments: Array


def trips(parts: Parts, state: FedState, placed: Placed, due: Array, clients: int) -> Trips:
    """Of the rows ``placed``, of which ``due bool[P]`` are collected; ``clients`` is N."""
    visited = placed.slots.client < clients
    moved = visited & (not parts.selection.sticky)
    # A model that no client has trained has not been sent to one that slept.
    new = placed.fresh | (placed.slots.visits == 0)
    down = visited & (new | moved | parts.refresh.downloads) & (not parts.asynchronous)
    choice = parts.broadcast.offered
    offered = 1 if choice is None else jnp.where(placed.fresh, choice(state.broadcast), 1)
    in_part = visited & ~down if parts.exchange.fragments else jnp.zeros_like(visited)
    return Trips(visited, visited & (due | moved), jnp.where(down, offered, 0), in_part)


def by_row(parts: Parts, state: FedState, data: ClientData, trips: Trips) -> tuple[Array, Array]:
    """Bytes up and down of each row, ``f32[P]``."""
    size = sizes(parts, state.server, data)
    pieces = size.fragments or (Fragment(size.upload, 0),)
    piece_up, piece_down = (jnp.array(each, jnp.float32) for each in zip(*pieces, strict=True))
    turn = state.round
    visited, uploads, downloads, fragments = (a.astype(jnp.float32) for a in trips)
    up = uploads * piece_up[turn % len(pieces)] + visited * float(size.message)
    whole = downloads * float(size.download) + visited * float(size.shared_state)
    return up, whole + fragments * piece_down[(turn - 1) % len(pieces)]


def upload_bytes(parts: Parts, variables: Variables) -> int:
    """Of a model to a server that knows what the client received, or whole to other clients."""
    variables = travelling(parts, variables)
    whole = tree.num_bytes(variables) + 4 * parts.beside
    to_clients = parts.selection.sticky and parts.models_travel
    if parts.schedule.serverless or to_clients:
        return whole
    return min([whole, *(part.bytes(variables) for part in parts.sending if part.bytes)])


def download_bytes(parts: Parts, variables: Variables, clients: int) -> int:
    """Of a model to a client that has the server model of its last download, the mean time ago."""
    variables = travelling(parts, variables)
    others = parts.models_travel or parts.broadcast.offered is not None  # than the server's models
    first = bool(parts.exchange.fragments)  # a whole model goes to who has none
    if parts.server.download_bytes is None or others or first:
        return tree.num_bytes(variables) + 4 * parts.beside
    active = parts.selection.active or parts.slots
    every_round = parts.refresh.downloads or not parts.in_flight
    downloads = active * (parts.schedule.period if every_round else 1)  # in a period
    updates = len(parts.schedule.group_sizes)
    return parts.server.download_bytes(variables, math.ceil(clients * updates / downloads))


def fragment_bytes(parts: Parts, variables: Variables) -> tuple[Fragment, ...]:
    """Of each fragment; who takes one has that of the last turn."""
    out = []
    for mask in fragments(parts, variables):
        some = tree.only(mask, variables)
        whole = tree.num_bytes(some)
        coded = parts.server.download_bytes
        out.append(Fragment(whole, whole if coded is None else coded(some, 1)))
    return tuple(out)


def told_bytes(parts: Parts) -> int:
    """Of the numbers that a client reports in every visit, and of its choice of a model."""
    reads = {*parts.selection.reads, *(n for part in parts.preaggregation for n in part.reads)}
    return 4 * (len(reads) + (parts.broadcast.offered is not None))


def answer_bytes(parts: Parts, variables: Variables, data: ClientData) -> int:
    """Of what a client says that is asked before the draw."""
    selection = parts.selection
    if selection.poll is None:
        return 0
    said: PyTree = ()
    if (ask := selection.ask) is not None:

        def answer(variables: Variables, data: ClientData) -> PyTree:
            visit = tree.take(visits(data, jnp.zeros(1, jnp.int32)), jnp.int32(0))
            return ask(variables, visit.view(samples_of(data), data))

        said = jax.eval_shape(answer, variables, data)
    return tree.num_bytes(said) + 4 * selection.device_numbers


def setup_traffic(parts: Parts, variables: Variables, data: ClientData) -> SetupTraffic:
    """What travels once, before the first round."""
    counts = [parts.local.setup_traffic, parts.selection.setup_traffic, parts.server.setup_traffic]
    counts += [part.setup_traffic for part in parts.preaggregation]
    sent = [count(variables, data) for count in counts if count is not None]
    given = shared_bytes(data) + data.clients * tree.num_bytes(frozen(parts, variables))
    down = sum(s.down for s in sent) + given
    return SetupTraffic(sum(s.up for s in sent), down)


def shared_bytes(data: ClientData) -> int:
    """Of the samples that the clients were sent: inputs as they are stored, labels in 32 bits.

    >>> import numpy as np
    >>> x, lists = np.zeros((7, 2), np.uint8), (np.zeros(7), np.arange(7), np.arange(4))
    >>> shared_bytes(ClientData(x, *lists, capacity=3, sent=np.int32(5)))  # 3 clients, 6 bytes each
    90
    """
    if data.sent is None:
        return 0
    return data.clients * int(data.sent) * data.sample_bytes
