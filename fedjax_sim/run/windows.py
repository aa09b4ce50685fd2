"""What stays on the host of the clients: of whom the devices have it, and in which rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.base import Array, ClientData
from fedjax_sim.base.data import Held
from fedjax_sim.data.clients import in_host_memory
from fedjax_sim.engine.execution import Execution
from fedjax_sim.engine.memory import MB, TooLargeError
from fedjax_sim.run.inputs import placed


class Window(NamedTuple):
    """Some rounds in a row, and all clients that train in them.

    Attributes:
        rounds: how many.
        clients: ``int64[U]``, :math:`p (N + 1) + k` for client k of the p-th partition.
    """

    rounds: int
    clients: NDArray[np.int64]


class Rows(NamedTuple):
    """The devices' room for what clients keep.

    Attributes:
        clients: how many it holds.
        devices: that share it.
        bytes: for one client, in all runs.
        given: MB that a device may hold.
    """

    clients: int
    devices: int
    bytes: int
    given: float


class Windows:
    """The windows of a run; of two, one trains while the samples of the other are fetched.

    Args:
        data: the clients, in host memory.
        samples_mb: MB that a device may hold of their samples, in both windows; None: it has all.
        rows: for what they keep; None: there is one for each client.

    Attributes:
        setting: that needs them, by name.
        room: samples of a window; None: all are there.

    Raises:
        TooLargeError: if the server's own samples, which a device always has, do not fit.
    """

    def __init__(
        self, data: ClientData, samples_mb: float | None, rows: Rows | None = None
    ) -> None:
        x, y, index = map(in_host_memory, (data.x, data.y, data.index))
        self._data = data = dataclasses.replace(data, x=x, y=y, index=index)
        self._given, self._held = samples_mb, rows
        self.setting = "client_state_mb" if samples_mb is None else "samples_mb"
        # Runs may share a partition, and so the samples of a client.
        self._starts, self._part = _different(np.atleast_2d(data.start))
        roots, self._root = _different(np.reshape([] if data.root is None else data.root, (-1, 2)))
        self._roots = [np.arange(*ends) for ends in roots]
        # Beside x and y: its entry of index, and whose it is.
        self._sample = data.x[:1].nbytes + data.y[:1].nbytes + 2 * data.index.itemsize
        self.room = None if samples_mb is None else int(samples_mb * MB / 2 // self._sample)
        self._check(0, 0, "the server's own samples")
        self._check(0, 1, "a client")

    def cut(self, cohorts: NDArray[np.integer], every: int, done: int = 0) -> Iterator[Window]:
        """Cuts rounds into windows of as many as fit.

        Args:
            cohorts: ``int[R, T, S]``, the clients of each round; N for none.
            every: rounds between evaluations, at which a window ends.
            done: the rounds before these.

        Raises:
            TooLargeError: if the clients of one round do not fit.
        """
        runs, total, _ = cohorts.shape
        own, none = np.resize(self._part, runs)[:, None], self._data.clients
        known: dict[int, None] = {}
        people: set[int] = set()
        rounds = size = 0
        for t in range(total):
            of_round = np.unique(own * (none + 1) + cohorts[:, t]).tolist()
            new = [k for k in of_round if k not in known]
            there = {k % (none + 1) for k in of_round} - {none}
            more, faces = self._samples_of(new), len(people) + len(there - people)
            if rounds and ((done + t) % every == 0 or self._lacking(size + more, faces)):
                yield Window(rounds, np.array([*known], np.int64))
                known, people, rounds, size = {}, set(), 0, 0
                new, more = of_round, self._samples_of(of_round)
            if not rounds:
                self._check(more, len(there), f"the clients of round {t + 1}")
            known |= dict.fromkeys(new)
            people |= there
            rounds, size = rounds + 1, size + more
        if rounds:
            yield Window(rounds, np.array([*known], np.int64))

    def people(self, window: Window | None) -> NDArray[np.int64]:
        """The clients that train in any of the runs, in order."""
        if window is None:
            return np.empty(0, np.int64)
        clients = np.unique(window.clients % (self._data.clients + 1))
        return clients[clients < self._data.clients]

    def fetched(self, window: Window | None) -> ClientData:
        """The data that these rounds need, in arrays that are as large for every window.

        Without a window, those of the server alone.
        """
        data = self._data
        if self._held is not None:
            there = self.people(window)
            table = np.full(self._held.clients, data.clients, np.int32)
            table[: len(there)] = there
            data = dataclasses.replace(data, held=Held(in_host_memory(table)))
        if self.room is None:
            return data
        rows = self.room if window else max(self._of_roots, 1)
        members = np.empty(0, np.int64) if window is None else np.sort(window.clients)
        part, client, first, sizes = self._lists_of(members)
        ends = np.cumsum(sizes)
        stretch = np.repeat(first - (ends - sizes), sizes)
        owner = np.full(rows, data.clients, np.int32)
        owner[: len(stretch)] = np.repeat(client, sizes)
        edges = np.append(0, ends)[np.searchsorted(part, np.arange(len(self._starts) + 1))]
        at = np.stack([edges[:-1], edges[1:]], axis=1)[self._part]
        entry = np.concatenate([stretch + np.arange(len(stretch)), *self._roots]).astype(np.int64)
        entry = np.asarray(data.index)[entry]
        row = entry % len(data.x)
        index = np.arange(rows, dtype=np.int32)
        index[: len(entry)] += np.where(entry < len(data.x), 0, rows).astype(np.int32)
        root = None
        if data.root is not None:
            lengths = np.array([len(r) for r in self._roots])
            stops = len(stretch) + np.cumsum(lengths)
            edges = np.stack([stops - lengths, stops], axis=1)[self._root]
            root = in_host_memory(edges.reshape(np.shape(data.root)), np.int32)
        return dataclasses.replace(
            data,
            x=_rows(data.x, row, rows),
            y=_rows(data.y, row, rows),
            index=in_host_memory(index),
            owner=in_host_memory(owner),
            at=in_host_memory(at.reshape(*np.shape(data.start)[:-1], 2), np.int32),
            root=root,
        )

    def like(self) -> ClientData:
        """The shapes of what :meth:`fetched` gives for a window."""
        data, room = self.fetched(None), self.room
        if room is None:
            return data

        def shape(a: Array) -> Array:
            return cast(Array, jax.ShapeDtypeStruct((room, *a.shape[1:]), a.dtype))

        assert data.owner is not None
        x, y, index, owner = map(shape, (data.x, data.y, data.index, data.owner))
        return dataclasses.replace(data, x=x, y=y, index=index, owner=owner)

    def moving(self, data: ClientData) -> dict[str, Any]:
        """The fields of a window's data that no other window has."""
        samples = () if self.room is None else ("x", "y", "index", "owner", "at", "root")
        return {name: getattr(data, name) for name in (*samples, "held")}

    def _lists_of(self, keys: ArrayLike) -> tuple[NDArray[np.int64], ...]:
        """The partition, client, first entry and size of these lists; 0 of client N."""
        none = self._data.clients
        part, client = np.divmod(np.asarray(keys, np.int64), none + 1)
        first = self._starts[part, client].astype(np.int64)
        return part, client, first, self._starts[part, np.minimum(client + 1, none)] - first

    def _samples_of(self, keys: ArrayLike) -> int:
        return int(self._lists_of(keys)[-1].sum())

    @property
    def _of_roots(self) -> int:
        return sum(map(len, self._roots))

    def _lacking(self, samples: int, people: int) -> bool:
        """Whether a window is too small for so much."""
        few = self.room is not None and samples + self._of_roots > self.room
        return few or (self._held is not None and people > self._held.clients)

    def _check(self, samples: int, people: int, whose: str) -> None:
        if not self._lacking(samples, people):
            return
        rows, samples = self._held, samples + self._of_roots
        if rows is not None and people > rows.clients:
            least = np.ceil(100 * -(-people // rows.devices) * rows.bytes / MB) / 100
            raise TooLargeError(
                f"client_state_mb must be at least {least:,.2f}: it holds what is kept by {whose}, "
                f"{people:,} in all, got {rows.given:g}"
            )
        least = np.ceil(200 * samples * self._sample / MB) / 100
        raise TooLargeError(
            f"samples_mb must be at least {least:,.2f}: half of it holds {whose}, "
            f"{samples:,} samples, got {self._given:g}"
        )


class Feed:
    """Gives the data of one window after another; :meth:`fetch` gets the next one ready.

    Args:
        windows: of the run.
        execution: devices.
        fixed: the data, whose other arrays are on the devices.
        cohorts: ``int[R, T, S]``, the clients of the rounds that are left.
        every: rounds between evaluations.
        done: the rounds before these.
    """

    def __init__(
        self,
        windows: Windows,
        execution: Execution,
        fixed: ClientData,
        cohorts: NDArray[np.integer],
        every: int,
        done: int,
    ) -> None:
        self._windows, self._execution, self._fixed = windows, execution, fixed
        self._left = iter([*windows.cut(cohorts, every, done)])
        self._next: tuple[Window, ClientData] | None = None
        self.fetch()

    def fetch(self, count: int = 0) -> None:
        """Begins to place the next window's data on the devices, if there is one.

        Args:
            count: the rounds of the window before that have begun to run: it stays if it has more.
        """
        if self._next is not None and count < self._next[0].rounds:
            running, data = self._next
            self._next = running._replace(rounds=running.rounds - count), data
            return
        window = next(self._left, None)
        if window is None:
            self._next = None
            return
        data = self._windows.fetched(window)
        moving = placed(self._windows.moving(data), self._execution)
        self._next = window, dataclasses.replace(self._fixed, **moving)

    def take(self) -> tuple[Window, ClientData]:
        """The window that was fetched."""
        assert self._next is not None
        return self._next


def _different(rows: ArrayLike) -> tuple[NDArray[np.integer], NDArray[np.int64]]:
    """Unique rows and inverse indices, without sorting the rows."""
    rows = np.asarray(rows)
    number: dict[bytes, int] = {}
    place = [number.setdefault(row.tobytes(), len(number)) for row in rows]
    first = np.unique(place, return_index=True)[1].astype(np.int64)
    return rows[first], np.array(place, np.int64)


def _rows(values: Array, row: NDArray[np.integer], room: int) -> Array:
    """Those rows of an array that may lie in a file, and zeros up to ``room`` of them."""
    out = np.zeros((room, *values.shape[1:]), values.dtype)
    np.take(values, row, axis=0, out=out[: len(row)], mode="clip")
    return in_host_memory(out)
