"""Durations of the visits of a round, and which of them arrive."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    Elapsed,
    FedState,
    Law,
    Outlook,
    PyTree,
    Traffic,
    Trained,
    evaluate_law,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import client_sizes
from fedjax_sim.engine.streams import Device, Round, stream
from fedjax_sim.round import traffic
from fedjax_sim.round.parts import Parts
from fedjax_sim.round.placement import Placed, awake

MOST = 2**30
"""The most steps, where there is no limit."""


class Durations(NamedTuple):
    """Durations of each visit, ``f32[P]`` each."""

    down: Array  # seconds of the download
    step: Array  # seconds of a local step
    up: Array  # seconds of the upload


def durations(
    parts: Parts,
    state: FedState,
    data: ClientData,
    placed: Placed,
    transfers: traffic.Transfers,
    measured: Array | None = None,
) -> Durations | None:
    """Returns the duration of each row's visit; None without a clock.

    Uploads take ``measured int32[P]`` bytes; None: the bytes that are known beforehand.
    """
    clock = parts.clock
    if clock is None or parts.asynchronous:
        return None
    up, down = traffic.by_row(parts, state, data, placed, transfers, measured)
    uploads = jnp.maximum(jnp.sum(transfers.uploads), 1)
    return durations_of(parts, state, placed.slots.client, down, up, uploads)


def durations_of(
    parts: Parts, state: FedState, client: Array, down: Array, up: Array, uploads: Array | int
) -> Durations:
    """Returns the durations of visits to ``client int32[K]``, by the bytes ``f32[K]`` down and up.

    The step of a client with a part of the model takes the part's share of the time; ``uploads``
    clients share a shared uplink.
    """
    clock = parts.clock
    assert clock is not None
    key, link = jax.random.key(clock.seed), clock.link

    def of(law: float | Law, which: Device) -> Array:
        return evaluate_law(law, stream(key, which), client, state.clock)

    step = of(clock.compute, Device.COMPUTE) * traffic.share_of(
        parts, state.server, client, state.round
    )
    if link is None:
        return Durations(jnp.zeros_like(step), step, jnp.zeros_like(step))
    # All clients that upload have an equal part of the link, from the first byte to the last.
    users = jnp.asarray(uploads).astype(jnp.float32) if link.shared else 1
    return Durations(down / of(link.down, Device.DOWN), step, up * users / of(link.up, Device.UP))


def forecast(
    parts: Parts,
    state: FedState,
    data: ClientData,
    size: Traffic,
    client: Array,
    uploads: Array | int = 1,
) -> tuple[Array, Array, Array]:
    """Returns the seconds of download, computation and upload of visits to ``client int32[K]``.

    Messages have the bytes ``size``; ``uploads`` as in :func:`durations_of`.
    """
    part = traffic.share_of(parts, state.server, client, state.round, sent=True)
    down = jnp.asarray(size.download * part + size.shared_state, jnp.float32)
    up = jnp.asarray(size.upload * part + size.message, jnp.float32)
    durations = durations_of(parts, state, client, down, up, uploads)
    samples = client_sizes(data, client, state.round)
    steps = jnp.asarray(parts.local.steps_for(samples, client)).astype(jnp.float32)
    return durations.down, steps * durations.step, durations.up


def outlook(parts: Parts, key: Array, state: FedState, data: ClientData) -> Outlook | None:
    """Returns the forecast of the clock; None without a clock."""
    clock, none = parts.clock, data.clients
    if clock is None:
        return None

    def seconds(client: Array, uploads: Array | int = 1) -> Array:
        size = traffic.sizes(parts, state.server, data)
        down, work, up = forecast(parts, state, data, size, client, uploads)
        return down + work + up

    def available(client: Array) -> Array:
        return awake(parts, key, state, client, none) < none

    return Outlook(seconds, available, math.inf if clock.deadline is None else clock.deadline)


def limits(parts: Parts, durations: Durations | None) -> Array | None:
    """Returns the steps that leave time for the upload, ``int32[P]``; None without a limit."""
    clock = parts.clock
    if clock is None or durations is None or clock.deadline is None or not clock.cuts:
        return None
    steps = jnp.floor((clock.deadline - durations.down - durations.up) / durations.step)
    return jnp.clip(steps, 0, MOST).astype(jnp.int32)


def _losses(parts: Parts, key: Array, placed: Placed, visited: Array) -> tuple[Array, Array]:
    """Returns the lost rows, ``bool[P]``, and the share of its visit at which each stops."""
    assert parts.clock is not None
    never = jnp.zeros_like(visited)
    if not parts.clock.failures:
        return never, never.astype(jnp.float32)
    own = stream(key, Round.LOST)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(own, placed.slots.client)
    luck = jax.vmap(lambda own: jax.random.uniform(own, (2,), jnp.float32))(keys)
    return visited & (luck[:, 0] < parts.clock.failures), luck[:, 1]


def ready(parts: Parts, key: Array, limit: Array | None, placed: Placed, visited: Array) -> Array:
    """Returns the rows that can send, ``bool[P]``: not lost, and with time for a step."""
    lost, _ = _losses(parts, key, placed, visited)
    return visited & ~lost & (True if limit is None else limit >= 1)


class Outcome(NamedTuple):
    """Outcome of the visits of a round."""

    visited: Array  # bool[P], rows whose clients were available
    arrived: Array  # bool[P], rows whose visit counts
    dropped: Array  # bool[P], rows that were late but had begun to send
    elapsed: Elapsed | None  # times of the round; None without a clock
    end: Array | None = None  # f32[P], seconds of each visit; None without a clock


def outcome(
    parts: Parts,
    key: Array,
    durations: Durations | None,
    limit: Array | None,
    steps: Array,
    placed: Placed,
    transfers: traffic.Transfers,
    asleep: Array,
) -> Outcome:
    """Computes when the visits of a round end, and which arrive in time.

    Rows take ``steps int32[P]``, of at most ``limit int32[P]``, see :func:`limits`; ``asleep
    int32[]`` clients were not available.
    """
    visited = transfers.visited
    clock, never = parts.clock, jnp.zeros_like(visited)
    if clock is None or durations is None:
        return Outcome(visited, visited, never, None)
    work = steps.astype(jnp.float32) * durations.step
    end = durations.down + work + durations.up
    lost, share = _losses(parts, key, placed, visited)
    end = jnp.where(lost, share * end, end)
    late = never
    if limit is not None:
        late = visited & ~lost & (limit < 1)
    elif clock.deadline is not None:
        late = visited & ~lost & (end > clock.deadline)
    arrived = visited & ~lost & ~late
    seconds = jnp.max(jnp.where(visited, end, 0))
    if clock.deadline is not None:
        seconds = jnp.minimum(seconds, clock.deadline)
    if clock.first is not None:
        uploads = arrived & transfers.uploads  # not of clients that withhold theirs
        rank = _rank(jnp.where(uploads, end, jnp.inf), placed.slots.client)
        full = jnp.sum(uploads) >= clock.first
        last = jnp.max(jnp.where(uploads & (rank < clock.first), end, 0))
        seconds = jnp.where(full, last, seconds)
        after = arrived & jnp.where(uploads, rank >= clock.first, full & (end > last))
        late, arrived = late | after, arrived & ~after
    seconds = jnp.where(jnp.any(visited), seconds, clock.idle)
    stop = jnp.minimum(end, seconds)  # clients stop when the round is over
    computing = jnp.clip(stop - durations.down, 0, work)
    # A client without a step has nothing to send.
    dropped = late & (steps > 0) & ((durations.down + work < seconds) | (end <= seconds))

    def total(of_row: Array) -> Array:
        """Sums over visits in the order of the slots, so the result does not depend on the rows."""
        of_row, by_slot = jnp.where(visited, of_row, 0), jnp.zeros(parts.slots, of_row.dtype)
        return jnp.sum(by_slot.at[placed.slot].set(of_row, mode="drop"))

    elapsed = Elapsed(
        seconds=seconds,
        computing=total(computing),
        link=total(stop - computing),
        waiting=total(seconds - stop),
        asleep=asleep,
        lost=jnp.sum(lost, dtype=jnp.int32),
        late=jnp.sum(late, dtype=jnp.int32),
        silent=jnp.sum(visited & ~arrived & ~dropped, dtype=jnp.int32),
    )
    return Outcome(visited, arrived, dropped, elapsed, end)


def drop_lost(
    parts: Parts, data: ClientData, placed: Placed, trained: Trained, start: PyTree, arrived: Array
) -> tuple[Placed, Trained]:
    """Removes visits that have not ``arrived bool[P]``: their slots become idle.

    ``start [P, *p]`` are the models before the visits, if there are models in flight.
    """
    if not parts.loses:
        return placed, trained
    client = jnp.where(arrived, placed.slots.client, data.clients)
    samples = jnp.where(arrived, placed.samples, 0)
    info = trained.info
    info = tree.select_rows(arrived, info, jax.tree.map(jnp.zeros_like, info))
    models = trained.variables
    if parts.in_flight:
        models = tree.select_rows(arrived, models, start)
    placed = placed._replace(slots=placed.slots._replace(client=client), samples=samples)
    return placed, trained._replace(variables=models, info=info)


def _rank(end: Array, client: Array) -> Array:
    """Ranks the rows by their end, then by the client's number: ``int32[P]``.

    >>> _rank(jnp.array([2.0, 1.0, 2.0]), jnp.array([9, 5, 3])).tolist()
    [2, 0, 1]
    """
    order = jnp.lexsort((client, end))
    place = jnp.arange(len(end), dtype=jnp.int32)
    return jnp.zeros_like(place).at[order].set(place)
