"""Where the samples of clients lie: what tasks are told of the clients that they visit."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, ClientData, ClientView, FetchedError


def as_arrays(data: ClientData, *, differentiable: bool) -> ClientData:
    """The same in JAX's arrays: those of ``client_data`` are NumPy's, which no tracer can index."""
    arrays = jax.tree.map(jnp.asarray, data)
    return dataclasses.replace(arrays, differentiable=differentiable)


def client_sizes(data: ClientData, clients: Array, round: Array | None = None) -> Array:
    """n_k of ``clients int32[S]``, copies apart: ``int32[S]``; 0 for client N, which is none.

    Args:
        data: the population.
        clients: the clients.
        round: ``int32[]``; what comes in with it, if samples stream in. None: all.
    """
    if data.budget is None:
        sizes = _entries(data, clients)
        if data.samples_per_round is None or round is None:
            return sizes
        return jnp.clip(sizes - round * data.samples_per_round, 0, data.samples_per_round)
    return jnp.where(clients < len(data.budget), data.budget[clients], 0)


def _entries(data: ClientData, clients: Array) -> Array:
    """The length of each client's list."""
    # Indexing clamps, so that both ends of client N's stretch are the last entry of start.
    return data.start[clients + 1] - data.start[clients]


def label_counts(data: ClientData, classes: int) -> Array:
    """Samples and copies of each class at each client, as it sees them: ``int32[N, M]``.

    Raises:
        FetchedError: if the samples of some clients are not there.
    """
    if data.owner is not None:
        raise FetchedError
    clients = data.clients
    entry = jnp.arange(len(data.index), dtype=jnp.int32)
    # Entries of other runs lie before the first client or after the last: client -1 or N.
    owner = jnp.searchsorted(data.start, entry, side="right").astype(jnp.int32) - 1
    owner = jnp.where(owner < 0, clients, owner)
    label = data.y[data.index % len(data.y)]
    if data.relabel is not None:
        label = data.relabel[owner, label]
    counts = jnp.zeros((clients, classes), jnp.int32)
    return counts.at[owner, label].add(1, mode="drop")


class Visits(NamedTuple):
    """Integers that say which clients to visit: tasks of :meth:`Execution.run`, ``[T]`` each.

    Attributes:
        client: ``int32[T]``, k.
        start: ``int32[T]``, see :class:`fedjax_sim.base.ClientView`.
        size: ``int32[T]``.
        budget: ``int32[T]`` or None.
        starts: ``int32[T, N + 1]`` or None.
        relabel: ``int32[T, M]`` or None.
        relabels: ``int32[T, N, M]`` or None.
        public: ``int32[T, 2]`` or None.
    """

    client: Array
    start: Array
    size: Array
    budget: Array | None
    starts: Array | None
    relabel: Array | None
    relabels: Array | None
    public: Array | None

    def view(
        self,
        pixels: tuple[Array, Array, Array],
        data: ClientData,
        round: Array | None = None,
        coin: Array | None = None,
        limit: Array | None = None,
        *,
        trains: bool = True,
    ) -> ClientView:
        """One of them, inside a task; ``pixels`` are :func:`samples_of` the data.

        Raises:
            ValueError: if samples stream in, and it is not known in which round this is.
        """
        start, size, capacity = self.start, self.size, data.capacity
        own = trains and round is not None and self.starts is None
        if data.owner is not None and not own:  # whose samples are there?
            pixels = cast(tuple[Array, Array, Array], (None, None, None))
        if (each := data.samples_per_round) is not None:
            if round is None or self.starts is not None:
                raise ValueError(
                    "samples_per_round needs methods that read the samples of clients in their own "
                    "training alone: no poll, score or finish of all samples, and no peers"
                )
            before = jnp.minimum(round * each, size)
            start, size = start + before, jnp.minimum(size - before, each)
            capacity = min(capacity, each)
        return ClientView(
            *pixels,
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
        )


def number_of_round(client: ClientView) -> Array:
    """Of the visit.

    Raises:
        ValueError: if it is not known: the server trains on samples of its own.
    """
    if client.round is None:
        raise ValueError("rate_by_round needs the number of the round, which only clients are told")
    return client.round


def coin_of_round(client: ClientView) -> Array:
    """The key that all clients of a round have in common.

    Raises:
        ValueError: if there is none: it is not one of them that trains.
    """
    if client.coin is None:
        raise ValueError("steps needs the coin of a round, which only its clients are told")
    return client.coin


def visits(data: ClientData, clients: Array, *, peers: bool = False) -> Visits:
    """Where the samples of ``clients int32[T]`` lie; client N stands for none: no samples.

    Args:
        data: the population.
        clients: ``int32[T]``.
        peers: whether the visits need ``ClientView.starts`` and ``relabels``.
    """
    budget = None if data.budget is None else client_sizes(data, clients)
    relabel = None if data.relabel is None else data.relabel[clients]

    def for_each(array: Array | None) -> Array | None:
        return None if array is None else jnp.broadcast_to(array, (len(clients), *array.shape))

    return Visits(
        clients,
        begins(data, clients),
        _entries(data, clients),
        budget,
        for_each(data.start) if peers else None,
        relabel,
        for_each(data.relabel) if peers else None,
        for_each(data.root),
    )


def begins(data: ClientData, clients: Array) -> Array:
    """Where the lists of ``clients int32[T]`` begin in ``data.index``."""
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


def kept_rows(data: ClientData) -> int:
    """How many rows there are of what clients keep: N, unless some of it is on the host."""
    return data.clients if data.held is None else len(data.held.client)


def rows_of(data: ClientData, clients: Array) -> Array:
    """Finds the rows of what ``clients int32[T]`` keep; a row that does not exist for others."""
    if data.held is None:
        return clients
    table = data.held.client
    row = _first(table, clients, 0, len(table))
    return jnp.where((table[row] == clients) & (clients < data.clients), row, len(table))


def samples_of(data: ClientData) -> tuple[Array, Array, Array]:
    """x, y and index: constants of :meth:`Execution.run`."""
    return data.x, data.y, data.index
