"""Bytes of models, messages and the start of a run."""

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
    SlotBytes,
    Traffic,
    Variables,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import samples_of, visits
from fedjax_sim.round.exchanging import (
    constant,
    covered_bytes,
    fragments,
    received,
    travelling,
    travels,
)
from fedjax_sim.round.finishing import finish_bytes
from fedjax_sim.round.parts import Parts
from fedjax_sim.round.placement import Placed
from fedjax_sim.round.start import first_visit, initial_state


def sizes(parts: Parts, variables: Variables, data: ClientData) -> Traffic:
    """Returns the bytes of the messages in a round, as integers; takes arrays or shapes."""

    def besides(variables: Variables, data: ClientData) -> tuple[PyTree, PyTree]:
        state = initial_state(parts, variables, data)
        trained, answer, shared, _ = first_visit(parts, state, data)
        sent = shared if parts.local.downloaded is None else parts.local.downloaded(shared)
        return (trained.message, answer), sent

    message, shared_state = map(tree.num_bytes, jax.eval_shape(besides, variables, data))
    return Traffic(
        upload_bytes(parts, variables),
        download_bytes(parts, variables, data.clients),
        message + report_bytes(parts),
        shared_state,
        fragment_bytes(parts, variables),
        finish_bytes(parts, variables, data),
        answer_bytes(parts, variables, data),
    )


class Transfers(NamedTuple):
    """Transfers of a round, if none is lost; ``[P]`` each."""

    visited: Array  # bool[P], rows whose clients are available
    uploads: Array  # bool[P], rows whose model, or fragment of it, is uploaded
    downloads: Array  # int32[P], models sent to each client, in synchronous rounds
    fragments: Array  # bool[P], rows that download a fragment instead


def transfers(parts: Parts, state: FedState, placed: Placed, due: Array, clients: int) -> Transfers:
    """Returns the transfers of the rows ``placed``; ``due bool[P]`` are collected."""
    visited = placed.slots.client < clients
    moved = visited & (not parts.selection.sticky)
    # A model that no client has trained was not sent to its sleeping client.
    new = placed.fresh | (placed.slots.visits == 0)
    down = visited & (new | moved | (parts.flight.refresh is not None)) & (not parts.asynchronous)
    choice = parts.broadcast.offered
    offered = 1 if choice is None else jnp.where(placed.fresh, choice(state.broadcast), 1)
    stays = bool(parts.exchange.fragments) and parts.in_flight
    in_part = visited & ~down if stays else jnp.zeros_like(visited)
    return Transfers(visited, visited & (due | moved), jnp.where(down, offered, 0), in_part)


def share_of(
    parts: Parts, server: Variables, clients: Array, round: Array, *, sent: bool = False
) -> Array | float:
    """Returns the share of the model that each client ``int32[K]`` has, in bytes; 1 if all.

    ``sent`` counts only the leaves that travel.
    """
    if parts.exchange.coverage is None:
        return 1.0
    leaves = travels(parts, server) if sent else jax.tree.map(lambda _: True, server)
    part = covered_bytes(parts, server, clients, round, leaves)
    return part.astype(jnp.float32) / tree.num_bytes(tree.only(leaves, server))


def by_slot(
    parts: Parts,
    state: FedState,
    placed: Placed,
    sent: Array,
    transfers: Transfers,
    measured: Array | None,
) -> SlotBytes | None:
    """Returns the bytes of models sent by and to each slot's client; None: all are of one size.

    The rows ``sent bool[P]`` sent an update, of ``measured int32[P]`` bytes if these vary.
    """

    def of_slots(part: Array, times: Array) -> Array:
        return (
            jnp.zeros(parts.slots, jnp.int32)
            .at[placed.slot]
            .set(part * times.astype(jnp.int32), mode="drop")
        )

    uploads = sent & transfers.uploads
    if measured is not None:
        return SlotBytes(of_slots(measured, uploads), None)
    if parts.exchange.coverage is None:
        return None
    sent_leaves = travels(parts, state.server)
    part = covered_bytes(parts, state.server, placed.slots.client, state.round, sent_leaves)
    return SlotBytes(of_slots(part, uploads), of_slots(part, transfers.downloads))


def by_row(
    parts: Parts,
    state: FedState,
    data: ClientData,
    placed: Placed,
    transfers: Transfers,
    measured: Array | None,
) -> tuple[Array, Array]:
    """Returns the bytes up and down of each row, ``f32[P]``; see :func:`by_slot`."""
    part = share_of(parts, state.server, placed.slots.client, state.round, sent=True)
    size = sizes(parts, state.server, data)
    pieces = size.fragments or (Fragment(size.upload, 0),)
    piece_up, piece_down = (jnp.array(each, jnp.float32) for each in zip(*pieces, strict=True))
    turn = state.round
    visited, uploads, downloads, fragments = (a.astype(jnp.float32) for a in transfers)
    piece = piece_up[turn % len(pieces)] * part
    if measured is not None:
        piece = measured.astype(jnp.float32)
    up = uploads * piece + visited * float(size.message)
    whole = downloads * float(size.download) * part + visited * float(size.shared_state)
    return up, whole + fragments * piece_down[(turn - 1) % len(pieces)]


def upload_bytes(parts: Parts, variables: Variables) -> int:
    """Returns the bytes of an upload: of an update, or of a whole model."""
    variables = travelling(parts, variables)
    whole = tree.num_bytes(variables) + 4 * parts.beside
    if parts.whole_uploads:
        return whole
    return min([whole, *(part.bytes(variables) for part in parts.sending if part.bytes)])


def largest_upload(parts: Parts, variables: Variables) -> int | None:
    """Returns the maximum bytes of an upload; None if all are of one size.

    Raises:
        ValueError: if they are too many for the integers of the device.
    """
    if not parts.measured:
        return None
    most = upload_bytes(parts, variables)
    if most >= 2**31:
        part = next(part for part in parts.sending if part.measured)
        raise ValueError(f"sending {part} needs a model of less than 2 GiB, got {most:,} bytes")
    return most


def download_bytes(parts: Parts, variables: Variables, clients: int) -> int:
    """Returns the bytes of a download, if the client has a server model of average age."""
    variables = tree.only(received(parts, variables), variables)
    others = (
        parts.models_travel or parts.broadcast.offered is not None
    )  # not only the server's models
    first = bool(parts.exchange.fragments)  # clients without a model get a whole one
    if parts.server.download_bytes is None or others or first:
        return tree.num_bytes(variables) + 4 * parts.beside
    active = parts.selection.active or parts.slots
    every_round = parts.flight.refresh is not None or not parts.in_flight
    downloads = active * (parts.flight.period if every_round else 1)  # per period
    updates = len(parts.group_sizes)
    return parts.server.download_bytes(variables, math.ceil(clients * updates / downloads))


def fragment_bytes(parts: Parts, variables: Variables) -> tuple[Fragment, ...]:
    """Returns the bytes of each fragment, for clients that have its last version."""
    out = []
    for mask in fragments(parts, variables):
        some = tree.only(mask, variables)
        whole = tree.num_bytes(some)
        coded = parts.server.download_bytes
        out.append(Fragment(whole, whole if coded is None else coded(some, 1)))
    return tuple(out)


def report_bytes(parts: Parts) -> int:
    """Returns the bytes of the numbers that a client reports, and of its answer to a broadcast."""
    reads = {*parts.selection.reads, *(n for part in parts.preaggregation for n in part.reads)}
    numbers = sum(part.numbers for part in parts.sending) + parts.broadcast.numbers
    return 4 * (len(reads) + numbers)


def answer_bytes(parts: Parts, variables: Variables, data: ClientData) -> int:
    """Returns the bytes of a client's answer to the poll."""
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
    """Returns the bytes sent before the first round."""
    counts = [parts.local.setup_traffic, parts.selection.setup_traffic, parts.server.setup_traffic]
    counts += [part.setup_traffic for part in parts.preaggregation]
    sent = [count(variables, data) for count in counts if count is not None]
    given = shared_bytes(data) + data.clients * tree.num_bytes(constant(parts, variables))
    down = sum(s.down for s in sent) + given
    return SetupTraffic(sum(s.up for s in sent), down)


def shared_bytes(data: ClientData) -> int:
    """Returns the bytes of shared samples: inputs as stored, labels in 32 bits.

    >>> import numpy as np
    >>> x, lists = np.zeros((7, 2), np.uint8), (np.zeros(7), np.arange(7), np.arange(4))
    >>> shared_bytes(ClientData(x, *lists, capacity=3, sent=np.int32(5)))  # 3 clients, 6 bytes each
    90
    """
    if data.sent is None:
        return 0
    return data.clients * int(data.sent) * data.sample_bytes
