"""Prefetches the samples of the next cohorts from host memory, in blocks of rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.base import Array, ClientData
from fedjax_sim.base.data import Held
from fedjax_sim.base.words import counted
from fedjax_sim.data.clients import in_host_memory
from fedjax_sim.engine import tree
from fedjax_sim.engine.execution import Execution
from fedjax_sim.engine.memory import MB, TooLargeError
from fedjax_sim.run.layout import replicated


class Block(NamedTuple):
    """Consecutive rounds, and all clients that train in them."""

    rounds: int
    clients: NDArray[np.int64]  # int64[U], p (N + 1) + k for client k of the p-th partition


class StateRows(NamedTuple):
    """Rows of per-client state on the devices, fewer than there are clients."""

    clients: int  # number of rows
    devices: int  # number of devices that share them
    bytes: int  # bytes of one client, in all runs
    given: float  # MB that a device may hold


class PrefetchBlocks:
    """The prefetch blocks of a run; one trains while the samples of the next are fetched.

    Args:
        data: the clients, in host memory.
        samples_mb: MB of samples that a device may hold, in both blocks; None: all samples.
        rows: rows of per-client state; None: one for each client.

    Attributes:
        setting: name of the setting that needs blocks.
        capacity: number of samples in a block; None: all samples are on the devices.

    Raises:
        TooLargeError: if the server's own samples, which each device always holds, do not fit.
    """

    def __init__(
        self, data: ClientData, samples_mb: float | None, rows: StateRows | None = None
    ) -> None:
        x, y, index = jax.tree.map(in_host_memory, (data.x, data.y, data.index))
        self._data = data = dataclasses.replace(data, x=x, y=y, index=index)
        self._given, self._rows = samples_mb, rows
        self.setting = "client_state_mb" if samples_mb is None else "samples_mb"
        # Runs may share a partition, and then the samples of a client.
        self._starts, self._partition = _unique_rows(np.atleast_2d(data.start))
        roots, self._root = _unique_rows(
            np.reshape([] if data.root is None else data.root, (-1, 2))
        )
        self._roots = [np.arange(*ends) for ends in roots]
        # x, y, and the sample's entries of index and owner.
        self._sample = tree.num_bytes(tree.row_shapes((x, y, index, index), 1))
        self.capacity = None if samples_mb is None else int(samples_mb * MB / 2 // self._sample)
        self._check(0, 0, "the server's own samples")
        self._check(0, 1, "a client")
        self._check(1, 0, "a sample")

    def split(self, cohorts: NDArray[np.integer], every: int, done: int = 0) -> Iterator[Block]:
        """Splits rounds into blocks, each as long as possible.

        Args:
            cohorts: ``int[R, T, S]``, the clients of each round; N for an empty slot.
            every: rounds between evaluations; a block ends at an evaluation.
            done: number of rounds before these.

        Raises:
            TooLargeError: if the clients of one round do not fit.
        """
        runs, total, _ = cohorts.shape
        partition, none = np.resize(self._partition, runs)[:, None], self._data.clients
        keys: dict[int, None] = {}
        clients: set[int] = set()
        rounds = size = 0
        for t in range(total):
            of_round = np.unique(partition * (none + 1) + cohorts[:, t]).tolist()
            new = [k for k in of_round if k not in keys]
            present = {k % (none + 1) for k in of_round} - {none}
            more, count = self._samples_of(new), len(clients) + len(present - clients)
            if rounds and ((done + t) % every == 0 or self._too_small(size + more, count)):
                yield Block(rounds, np.array([*keys], np.int64))
                keys, clients, rounds, size = {}, set(), 0, 0
                new, more = of_round, self._samples_of(of_round)
            if not rounds:
                self._check(more, len(present), f"the clients of round {t + 1}")
            keys |= dict.fromkeys(new)
            clients |= present
            rounds, size = rounds + 1, size + more
        if rounds:
            yield Block(rounds, np.array([*keys], np.int64))

    def clients(self, block: Block | None) -> NDArray[np.int64]:
        """Returns the clients that train in any of the runs, in order."""
        if block is None:
            return np.empty(0, np.int64)
        clients = np.unique(block.clients % (self._data.clients + 1))
        return clients[clients < self._data.clients]

    def fetched(self, block: Block | None) -> ClientData:
        """Returns the data of a block, in arrays of the same size for all blocks.

        Without a block, the data have only the server's own samples.
        """
        data = self._data
        if self._rows is not None:
            present = self.clients(block)
            table = np.full(self._rows.clients, data.clients, np.int32)
            table[: len(present)] = present
            data = dataclasses.replace(data, held=Held(in_host_memory(table)))
        if self.capacity is None:
            return data
        rows = self.capacity if block else max(self._root_samples, 1)
        keys = np.empty(0, np.int64) if block is None else np.sort(block.clients)
        partition, client, first, sizes = self._lists(keys)
        ends = np.cumsum(sizes)
        offset = np.repeat(first - (ends - sizes), sizes)
        owner = np.full(rows, data.clients, np.int32)
        owner[: len(offset)] = np.repeat(client, sizes)
        edges = np.append(0, ends)[np.searchsorted(partition, np.arange(len(self._starts) + 1))]
        at = np.stack([edges[:-1], edges[1:]], axis=1)[self._partition]
        entry = np.concatenate([offset + np.arange(len(offset)), *self._roots]).astype(np.int64)
        entry = np.asarray(data.index)[entry]
        row = entry % len(data.y)
        index = np.arange(rows, dtype=np.int32)
        index[: len(entry)] += np.where(entry < len(data.y), 0, rows).astype(np.int32)
        root = None
        if data.root is not None:
            lengths = np.array([len(r) for r in self._roots])
            stops = len(offset) + np.cumsum(lengths)
            edges = np.stack([stops - lengths, stops], axis=1)[self._root]
            root = in_host_memory(edges.reshape(np.shape(data.root)), np.int32)
        x, y = jax.tree.map(lambda a: _padded_rows(a, row, rows), (data.x, data.y))
        return dataclasses.replace(
            data,
            x=x,
            y=y,
            index=in_host_memory(index),
            owner=in_host_memory(owner),
            at=in_host_memory(at.reshape(*np.shape(data.start)[:-1], 2), np.int32),
            root=root,
        )

    def shapes(self) -> ClientData:
        """Returns the shapes of :meth:`fetched` for a block."""
        data = self.fetched(None)
        if self.capacity is None:
            return data
        fields = data.x, data.y, data.index, data.owner
        x, y, index, owner = tree.row_shapes(fields, self.capacity)
        return dataclasses.replace(data, x=x, y=y, index=index, owner=owner)

    def changing(self, data: ClientData) -> dict[str, Any]:
        """Returns the fields of a block's data that differ from block to block."""
        samples = () if self.capacity is None else ("x", "y", "index", "owner", "at", "root")
        return {name: getattr(data, name) for name in (*samples, "held")}

    def _lists(self, keys: ArrayLike) -> tuple[NDArray[np.int64], ...]:
        """Returns partition, client, first entry and size of these lists; size 0 for client N."""
        none = self._data.clients
        partition, client = np.divmod(np.asarray(keys, np.int64), none + 1)
        first = self._starts[partition, client].astype(np.int64)
        return (
            partition,
            client,
            first,
            self._starts[partition, np.minimum(client + 1, none)] - first,
        )

    def _samples_of(self, keys: ArrayLike) -> int:
        return int(self._lists(keys)[-1].sum())

    @property
    def _root_samples(self) -> int:
        return sum(map(len, self._roots))

    def _too_small(self, samples: int, clients: int) -> bool:
        """Returns whether a block is too small for so many samples and clients."""
        too_few = self.capacity is not None and samples + self._root_samples > self.capacity
        return too_few or (self._rows is not None and clients > self._rows.clients)

    def _check(self, samples: int, clients: int, whose: str) -> None:
        if not self._too_small(samples, clients):
            return
        rows, samples = self._rows, samples + self._root_samples
        if rows is not None and clients > rows.clients:
            least = np.ceil(100 * -(-clients // rows.devices) * rows.bytes / MB) / 100
            raise TooLargeError(
                f"client_state_mb must be at least {least:,.2f} to hold the state of {whose}, "
                f"{clients:,} in all, got {rows.given:g}"
            )
        least = np.ceil(200 * samples * self._sample / MB) / 100
        raise TooLargeError(
            f"samples_mb must be at least {least:,.2f}: half of it holds {whose}, "
            f"{counted(samples, 'sample')}, got {self._given:g}"
        )


class Prefetcher:
    """Provides the data of one block after another; :meth:`fetch` prepares the next.

    Args:
        blocks: the blocks of the run.
        execution: the devices.
        fixed: the data on the devices; a block replaces some of its arrays.
        cohorts: ``int[R, T, S]``, the clients of the remaining rounds.
        every: rounds between evaluations.
        done: number of rounds before these.
    """

    def __init__(
        self,
        blocks: PrefetchBlocks,
        execution: Execution,
        fixed: ClientData,
        cohorts: NDArray[np.integer],
        every: int,
        done: int,
    ) -> None:
        self._blocks, self._execution, self._fixed = blocks, execution, fixed
        self._left = iter([*blocks.split(cohorts, every, done)])
        self.next: tuple[Block, ClientData] | None = None
        self.fetch()

    def fetch(self, count: int = 0) -> None:
        """Places the next block's data, unless more than ``count`` rounds of this one are left."""
        if self.next is not None and count < self.next[0].rounds:
            running, data = self.next
            self.next = running._replace(rounds=running.rounds - count), data
            return
        block = next(self._left, None)
        if block is None:
            self.next = None
            return
        data = self._blocks.fetched(block)
        changing = replicated(self._blocks.changing(data), self._execution)
        self.next = block, dataclasses.replace(self._fixed, **changing)


def _unique_rows(rows: ArrayLike) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """Returns unique rows and inverse indices, without sorting the rows."""
    rows = np.asarray(rows)
    number: dict[bytes, int] = {}
    place = [number.setdefault(row.tobytes(), len(number)) for row in rows]
    first = np.unique(place, return_index=True)[1].astype(np.int64)
    return rows[first], np.array(place, np.int64)


def _padded_rows(values: Array, row: NDArray[np.integer], length: int) -> Array:
    """Returns rows of an array, which may lie in a file, with zeros up to ``length`` rows."""
    out = np.zeros((length, *values.shape[1:]), values.dtype)
    np.take(values, row, axis=0, out=out[: len(row)], mode="clip")
    return in_host_memory(out)
