"""Positions of the clients' samples: the integers that tasks need to visit clients."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, ClientData, ClientView, Coverage, FetchedError, PyTree


def as_arrays(data: ClientData, *, differentiable: bool) -> ClientData:
    """Converts the data to JAX arrays; tracers cannot index the NumPy arrays of ``client_data``."""
    arrays = jax.tree.map(jnp.asarray, data)
    return dataclasses.replace(arrays, differentiable=differentiable)


def client_sizes(data: ClientData, clients: Array, round: Array | None = None) -> Array:
    """Returns n_k of ``clients int32[S]``, without copies: ``int32[S]``; 0 for client N.

    Args:
        data: the population.
        clients: the clients.
        round: ``int32[]``, the round whose samples count, if samples stream in. None: all.
    """
    if data.budget is None:
        sizes = _entries(data, clients)
        if data.samples_per_round is None or round is None:
            return sizes
        return jnp.clip(sizes - _gone(data, round), 0, data.samples_per_round)
    return jnp.where(clients < len(data.budget), data.budget[clients], 0)


def _gone(data: ClientData, round: Array) -> Array:
    """Returns how many samples of each client arrived before a round, or a number above its n_k."""
    each = min(data.samples_per_round or data.capacity, data.capacity)
    last = -(-data.capacity // each)  # int32 would overflow in some later round
    return jnp.minimum(round, last) * each


def list_ends(data: ClientData) -> Array:
    """Returns ``int32[N + 1]``, the start of each client in a list of all samples that count."""
    if data.budget is None:
        return data.start
    ends = jnp.cumsum(data.budget, dtype=jnp.int32)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), ends])


def _entries(data: ClientData, clients: Array) -> Array:
    """Returns the length of each client's list."""
    # Indexing clamps, so both ends of client N's list are the last entry of start.
    return data.start[clients + 1] - data.start[clients]


def label_counts(data: ClientData, classes: int) -> Array:
    """Counts samples and copies of each class at each client, ``int32[N, M]``.

    Raises:
        FetchedError: if the samples of some clients are not on the device.
    """
    if data.owner is not None:
        raise FetchedError
    clients = data.clients
    entry = jnp.arange(len(data.index), dtype=jnp.int32)
    # Entries of other runs are before the first client or after the last: client -1 or N.
    owner = jnp.searchsorted(data.start, entry, side="right").astype(jnp.int32) - 1
    owner = jnp.where(owner < 0, clients, owner)
    label = data.y[data.index % len(data.y)]
    if data.relabel is not None:
        label = jnp.where(label < 0, label, data.relabel[owner, label])
    label = jnp.where(label < 0, classes, label)
    counts = jnp.zeros((clients, classes), jnp.int32)
    return counts.at[owner, label].add(1, mode="drop")


class Visits(NamedTuple):
    """Integers that describe visits to clients: tasks of :meth:`Execution.run`, ``[T]`` each."""

    client: Array  # int32[T], k
    start: Array  # int32[T], see :class:`fedjax_sim.base.ClientView`
    size: Array  # int32[T]
    budget: Array | None  # int32[T]
    starts: Array | None  # int32[T, N + 1]
    relabel: Array | None  # int32[T, M]
    relabels: Array | None  # int32[T, N, M]
    public: Array | None  # int32[T, 2]

    def view(
        self,
        samples: tuple[PyTree, Array, Array],
        data: ClientData,
        round: Array | None = None,
        coin: Array | None = None,
        limit: Array | None = None,
        *,
        trains: bool = True,
        coverage: Coverage | None = None,
    ) -> ClientView:
        """Returns the view of a client, inside a task; ``samples`` are :func:`samples_of` the data.

        Raises:
            ValueError: if samples stream in and the round is unknown.
        """
        start, size, capacity = self.start, self.size, data.capacity
        training = trains and round is not None and self.starts is None
        if data.owner is not None and not training:  # other clients' samples may be missing
            samples = cast(tuple[PyTree, Array, Array], (None, None, None))
        if (each := data.samples_per_round) is not None:
            if round is None or self.starts is not None:
                raise ValueError(
                    "samples_per_round needs methods that read a client's samples only while it "
                    "trains: no poll, score or finish of all samples, and no peers"
                )
            before = jnp.minimum(_gone(data, round), size)
            start, size = start + before, jnp.minimum(size - before, each)
            capacity = min(capacity, each)
        return ClientView(
            *samples,
            start=start,
            size=size,
            capacity=capacity,
            id=self.client,
            budget=self.budget,
            starts=self.starts,
            copies=data.copies,
            relabel=self.relabel,
            relabels=self.relabels,
            round=round,
            coin=coin,
            limit=limit,
            public=self.public,
            differentiable=data.differentiable,
            size_range=None if each else data.size_range,
            coverage=coverage,
        )


def round_number(client: ClientView, reader: str) -> Array:
    """Returns the number of the round, for the setting ``reader``."""
    if client.round is None:
        raise ValueError(f"{reader} needs the round number, which only clients have")
    return client.round


def round_key(client: ClientView) -> Array:
    """Returns the key that all clients of a round share."""
    if client.coin is None:
        raise ValueError("steps needs the key of a round, which only its training clients have")
    return client.coin


def visits(data: ClientData, clients: Array, *, peers: bool = False) -> Visits:
    """Returns the visits to ``clients int32[T]``; client N has no samples."""
    budget = None if data.budget is None else client_sizes(data, clients)
    relabel = None if data.relabel is None else data.relabel[clients]

    def for_each(array: Array | None) -> Array | None:
        return None if array is None else jnp.broadcast_to(array, (len(clients), *array.shape))

    return Visits(
        clients,
        list_starts(data, clients),
        _entries(data, clients),
        budget,
        for_each(data.start) if peers else None,
        relabel,
        for_each(data.relabel) if peers else None,
        for_each(data.root),
    )


def list_starts(data: ClientData, clients: Array) -> Array:
    """Returns the starts of the lists of ``clients int32[T]`` in ``data.index``."""
    if data.owner is None or data.at is None:
        return data.start[clients]
    return _first(data.owner, clients, *data.at)


def _first(table: Array, clients: Array, low: Array | int, high: Array | int) -> Array:
    """Finds the first entry of each client in ``table[low:high]``, which ascends, by bisection."""

    def halved(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = low + (high - low) // 2
        before = (low < high) & (table[middle] < clients)
        return jnp.where(before, middle + 1, low), jnp.where(before, high, middle)

    ends = jnp.full_like(clients, low), jnp.full_like(clients, high)
    return jax.lax.fori_loop(0, len(table).bit_length(), halved, ends)[0]


def count_state_rows(data: ClientData) -> int:
    """Returns the number of rows of per-client state: N, unless some are on the host."""
    return data.clients if data.held is None else len(data.held.client)


def state_rows(data: ClientData, clients: Array) -> Array:
    """Finds the rows of the state of ``clients int32[T]``; for others, a row out of range."""
    if data.held is None:
        return clients
    table = data.held.client
    row = _first(table, clients, 0, len(table))
    return jnp.where((table[row] == clients) & (clients < data.clients), row, len(table))


def samples_of(data: ClientData) -> tuple[PyTree, Array, Array]:
    """Returns x, y and index, the constants of :meth:`Execution.run`."""
    return data.x, data.y, data.index
