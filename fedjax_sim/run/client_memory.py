"""Per-client state in host memory; only the rows of the active cohorts are on the devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr
from numpy.typing import DTypeLike, NDArray

from fedjax_sim.base import PyTree
from fedjax_sim.base.data import HeldError
from fedjax_sim.base.files import memory_of_host
from fedjax_sim.engine import tree
from fedjax_sim.engine.memory import MB, TooLargeError, host_bytes_held
from fedjax_sim.engine.reading import without_dead_code
from fedjax_sim.run.layout import (
    Layout,
    per_client_state,
    shapes_for,
    with_client_state,
    without_client_state,
)
from fedjax_sim.run.prefetch import StateRows
from fedjax_sim.run.records import Run


@dataclasses.dataclass(frozen=True, eq=False)
class ClientRows:
    """A compact array ``[R, N, *]`` whose clients share one row until they train.

    It is array-like: ``np.asarray`` makes all N rows, ``rows[run, client]`` one.

    Attributes:
        rows: ``[R, 1 + n, *]``: the row of the clients that never trained, then n other rows.
        row: ``int32[N]``, the row of each client.
    """

    rows: NDArray[Any]
    row: NDArray[np.int32]

    @property
    def shape(self) -> tuple[int, ...]:
        """R, N and the other lengths."""
        return (len(self.rows), len(self.row), *self.rows.shape[2:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the numbers."""
        return self.rows.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.rows.ndim

    @property
    def clients(self) -> NDArray[np.int32]:
        """``int32[n]``, the clients of the rows after the first."""
        owned = np.flatnonzero(self.row)
        found = np.empty(self.rows.shape[1] - 1, np.int32)
        found[self.row[owned] - 1] = owned
        return found

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Returns all N rows."""
        del copy  # part of NumPy's protocol; there is no array to share
        return np.take(self.rows, self.row, axis=1).astype(dtype or self.dtype, copy=False)

    def __getitem__(self, key: Any) -> Any:
        """Returns rows of clients of one run, a slice of the runs, or the result of an array."""
        if isinstance(key, slice):
            return ClientRows(self.rows[key], self.row)
        if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], int | np.integer):
            return self.rows[key[0]][self.row[key[1]]]
        return np.asarray(self)[key]


def client_rows(array: Any, clients: NDArray[np.integer] | None = None, total: int = 0) -> Any:
    """Makes :class:`ClientRows` of ``[R, N, *]``, or of rows and their clients after the first.

    >>> found = client_rows(np.array([[0.0, 5.0]]), np.array([2]), 4)
    >>> np.asarray(found).tolist(), found[0, 2].tolist(), found.clients.tolist()
    ([[0.0, 0.0, 5.0, 0.0]], 5.0, [2])
    """
    if isinstance(array, ClientRows):
        return array
    if clients is None:
        clients, total = np.arange(array.shape[1]), array.shape[1]
        array = np.concatenate([np.zeros_like(array[:, :1]), array], axis=1)
    row = np.zeros(total, np.int32)
    row[clients] = np.arange(1, len(clients) + 1, dtype=np.int32)
    return ClientRows(array, row)


def with_all_rows(values: PyTree) -> Any:
    """Converts :class:`ClientRows` to arrays, for functions of JAX."""
    return jax.tree.map(lambda a: np.asarray(a) if isinstance(a, ClientRows) else a, values)


def rows_that_fit(run: Run, layout: Layout, mb: float) -> StateRows | None:
    """Returns the rows of per-client state that fit on the devices; None if all fit."""
    each = tree.num_bytes(per_client_state(layout.exported_shapes(run))) // layout.clients
    rows = layout.clients if not each else int(mb * MB // each) * layout.parts
    return None if rows >= layout.clients else StateRows(rows, layout.parts, each, mb)


def check_state_unread(jaxpr: Jaxpr, inputs: tuple[Any, ...]) -> None:
    """Rejects a program outside the rounds that reads the per-client state in its first input.

    Raises:
        HeldError: if it reads per-client state.
    """
    run: Run = without_dead_code(jaxpr, inputs)[1][0]
    if any(jax.tree.leaves(per_client_state(run))):
        raise HeldError


class ClientMemory:
    """Per-client state, with a row for each client that is ever drawn; see :class:`ClientRows`.

    It exports and restores runs in place of a :class:`fedjax_sim.run.layout.Layout`. Between two
    programs, runs have no per-client state.
    """

    def __init__(self, layout: Layout, clients: int) -> None:
        self.execution = layout.execution
        self._layout = layout
        self._row = np.zeros(clients, np.int32)
        self._rows: dict[str, PyTree] = {}  # [R, 1 + n, *]: first the initial state of all

    def begin(self, run: Run) -> Run:
        """Reads the initial state of all clients from the first row of a run."""

        def first(a: jax.Array) -> NDArray[Any]:
            shard = next(s for s in a.addressable_shards if not s.index[1].start)
            return np.array(np.asarray(shard.data)[:, :1])

        self._rows = jax.tree.map(first, per_client_state(run))
        self._row = np.zeros_like(self._row)
        return without_client_state(run)

    def reserve(self, cohorts: NDArray[np.integer], device_bytes: int) -> None:
        """Makes rows for the clients of the next rounds, ``int32[R, T, S]``; N for an empty slot.

        Raises:
            TooLargeError: if this machine does not have enough memory; names both sizes.
        """
        total = len(self._row)
        drawn = np.zeros(total + 1, bool)
        drawn[cohorts] = True
        new = np.flatnonzero(drawn[:total] & (self._row == 0))
        before = jax.tree.leaves(self._rows)[0].shape[1]
        rows = before + len(new)
        kept = tree.num_bytes(self._rows) // before * rows
        devices = host_bytes_held(device_bytes, self.execution.devices)
        # Exporting makes a copy; devices that share the host's memory get their part of it.
        size, available = kept + max(kept, 2 * devices), memory_of_host()
        if available is not None and size > available:
            raise TooLargeError(
                f"the state of {rows - 1:,} of {total:,} clients, {kept / MB:,.0f} MB, needs "
                f"{size / MB:,.0f} MB of this machine's memory with its copies, which has "
                f"{available / MB:,.0f} MB: take fewer rounds, clients a round or seeds at once"
            )

        def longer(a: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([a, np.repeat(a[:, :1], len(new), axis=1)], axis=1)

        self._rows = jax.tree.map(longer, self._rows)
        self._row = self._row.copy()  # exported runs have the old one
        self._row[new] = np.arange(before, rows, dtype=np.int32)

    def load(self, run: Run, clients: NDArray[np.integer]) -> Run:
        """Returns the run with the state of these clients in its first rows, in order."""
        capacity, split = self._layout.clients, self._layout.split

        def some(a: NDArray[Any]) -> jax.Array:
            def part(index: Any) -> NDArray[Any]:  # a slice of each axis
                places = self._row[clients[index[1]]]
                rows = np.zeros((len(a), capacity // self._layout.parts, *a.shape[2:]), a.dtype)
                np.take(a, places, axis=1, out=rows[:, : len(places)], mode="clip")
                return rows

            return jax.make_array_from_callback((len(a), capacity, *a.shape[2:]), split, part)

        return with_client_state(run, jax.tree.map(some, self._rows))

    def store(self, run: Run, clients: NDArray[np.integer]) -> Run:
        """Copies the loaded state back, which waits for the rounds; returns the run without it."""

        def keep(ours: NDArray[Any], theirs: jax.Array) -> None:
            for shard in theirs.addressable_shards:  # shard by shard: another copy costs time
                places = self._row[clients[shard.index[1]]]
                ours[:, places] = np.asarray(shard.data)[:, : len(places)]

        jax.tree.map(keep, self._rows, per_client_state(run))
        return without_client_state(run)

    def exported(self, run: Run) -> Run:
        """Returns the run as users and checkpoints see it."""

        def copied(a: NDArray[Any]) -> ClientRows:
            return ClientRows(a.copy(), self._row)

        return with_client_state(run, jax.tree.map(copied, self._rows))

    def exported_shapes(self, run: Run) -> Run:
        """Returns the shapes of :meth:`exported`, from the shapes of a run on the devices."""
        return with_client_state(run, shapes_for(len(self._row), per_client_state(run)))

    def restored(self, run: Run) -> Run:
        """Stores the state of an exported run; returns the rest on the devices."""
        rows = jax.tree.map(client_rows, per_client_state(run))
        self._row = jax.tree.leaves(rows)[0].row
        self._rows = jax.tree.map(lambda a: np.array(a.rows), rows)
        return self._layout.restored(without_client_state(run))
