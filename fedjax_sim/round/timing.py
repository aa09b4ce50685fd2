"""Seconds: how long the visits of a round take, and which of them come to anything."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, ClientData, Elapsed, FedState, Law, PyTree, Trained, evaluate_law
from fedjax_sim.engine import tree
from fedjax_sim.engine.moments import add_seconds
from fedjax_sim.engine.streams import Device, Round, stream
from fedjax_sim.round import traffic
from fedjax_sim.round.parts import Parts
from fedjax_sim.round.placement import Placed

MOST = 2**30
"""Steps without a limit."""


class Legs(NamedTuple):
    """The three legs of each visit, ``f32[P]`` each.

    Attributes:
        down: seconds of the download.
        step: seconds of a local step.
        up: seconds of the upload.
    """

    down: Array
    step: Array
    up: Array


def legs(
    parts: Parts, state: FedState, data: ClientData, placed: Placed, trips: traffic.Trips
) -> Legs | None:
    """How long each row's visit takes; None without a clock."""
    clock = parts.clock
    if clock is None or parts.asynchronous:
        return None
    up, down = traffic.by_row(parts, state, data, trips)
    uploads = jnp.maximum(jnp.sum(trips.uploads), 1)
    return legs_of(parts, state, placed.slots.client, down, up, uploads)


def legs_of(
    parts: Parts, state: FedState, client: Array, down: Array, up: Array, uploads: Array | int
) -> Legs:
    """How long visits to any clients take.

    Args:
        parts: of the algorithm, which has a clock.
        state: before the round.
        client: ``int32[K]``.
        down: ``f32[K]`` or ``f32[]``, bytes to each.
        up: the same, from each.
        uploads: how many share the uplink if it is shared.
    """
    clock = parts.clock
    assert clock is not None
    key, link = jax.random.key(clock.seed), clock.link

    def of(law: float | Law, which: Device) -> Array:
        return evaluate_law(law, stream(key, which), client, state.clock)

    step = of(clock.compute, Device.COMPUTE)
    if link is None:
        return Legs(jnp.zeros_like(step), step, jnp.zeros_like(step))
    # An equal part of the link for all who upload, from the first byte to the last.
    users = jnp.asarray(uploads).astype(jnp.float32) if link.shared else 1
    return Legs(down / of(link.down, Device.DOWN), step, up * users / of(link.up, Device.UP))


def limits(parts: Parts, legs: Legs | None) -> Array | None:
    """``int32[P]``, the steps that leave time for the upload; None for any number."""
    clock = parts.clock
    if clock is None or legs is None or clock.deadline is None or not clock.cuts:
        return None
    steps = jnp.floor((clock.deadline - legs.down - legs.up) / legs.step)
    return jnp.clip(steps, 0, MOST).astype(jnp.int32)


class Outcome(NamedTuple):
    """What came of the visits of a round.

    Attributes:
        visited: ``bool[P]``, the rows whose clients were there.
        arrived: ``bool[P]``, those whose visit counts.
        dropped: ``bool[P]``, those that were late and had begun to send.
        elapsed: None without a clock.
        end: ``f32[P]``, the seconds of each visit; None without a clock.
    """

    visited: Array
    arrived: Array
    dropped: Array
    elapsed: Elapsed | None
    end: Array | None = None


def outcome(
    parts: Parts,
    key: Array,
    legs: Legs | None,
    limit: Array | None,
    steps: Array,
    placed: Placed,
    visited: Array,
    asleep: Array,
) -> Outcome:
    """When the visits of a round end, and which are in time.

    Args:
        parts: of the algorithm.
        key: of the round.
        legs: of each row.
        limit: ``int32[P]``, see :func:`limits`.
        steps: ``int32[P]``, those that were taken.
        placed: the rows.
        visited: ``bool[P]``.
        asleep: ``int32[]``, the clients that were not there.
    """
    clock, never = parts.clock, jnp.zeros_like(visited)
    if clock is None or legs is None:
        return Outcome(visited, visited, never, None)
    work = steps.astype(jnp.float32) * legs.step
    end = legs.down + work + legs.up
    lost = never
    if clock.failures:
        keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
            stream(key, Round.LOST), placed.slots.client
        )
        luck = jax.vmap(lambda own: jax.random.uniform(own, (2,), jnp.float32))(keys)
        lost = visited & (luck[:, 0] < clock.failures)
        end = jnp.where(lost, luck[:, 1] * end, end)
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
        rank = _rank(jnp.where(arrived, end, jnp.inf), placed.slots.client)
        last = jnp.max(jnp.where(arrived & (rank < clock.first), end, 0))
        seconds = jnp.where(jnp.sum(arrived) >= clock.first, last, seconds)
        late = late | (arrived & (rank >= clock.first))
        arrived = arrived & (rank < clock.first)
    seconds = jnp.where(jnp.any(visited), seconds, clock.idle)
    stop = jnp.minimum(end, seconds)  # a client at work stops when the round is over
    computing = jnp.clip(stop - legs.down, 0, work)
    # A client that can take no step has nothing to send.
    dropped = late & (steps > 0) & ((legs.down + work < seconds) | (end <= seconds))

    def total(of_row: Array) -> Array:
        """Of the visits, in the order of the slots: no row's place shows in the last bit."""
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


def taken(
    parts: Parts, data: ClientData, placed: Placed, trained: Trained, start: PyTree, arrived: Array
) -> tuple[Placed, Trained]:
    """What is left of a round's visits: a slot whose client has not ``arrived`` is idle after all.

    Args:
        parts: of the algorithm.
        data: the clients.
        placed: the rows.
        trained: ``[P]``, what the clients give.
        start: ``[P, *p]``, the models before the visits, if any stays in flight.
        arrived: ``bool[P]``.
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


def later(now: PyTree, elapsed: Elapsed | None) -> PyTree:
    """The simulated time after a round.

    >>> from fedjax_sim.base import Now
    >>> now = Now(jnp.int32(2), jnp.float32(0.75))
    >>> [a.item() for a in later(now, Elapsed(jnp.float32(1.5), *7 * [jnp.int32(0)]))]
    [4, 0.25]
    """
    return now if elapsed is None else add_seconds(now, elapsed.seconds)


def _rank(end: Array, client: Array) -> Array:
    """The place of each row by its end, of equal ones by the client's number: ``int32[P]``.

    >>> _rank(jnp.array([2.0, 1.0, 2.0]), jnp.array([9, 5, 3])).tolist()
    [2, 0, 1]
    """
    order = jnp.lexsort((client, end))
    place = jnp.arange(len(end), dtype=jnp.int32)
    return jnp.zeros_like(place).at[order].set(place)
