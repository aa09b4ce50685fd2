"""Per-client state in host memory; only the rows of the active cohorts are on the devices."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr
from numpy.typing import NDArray

from fedjax_sim.base import PyTree
from fedjax_sim.base.data import HeldError
from fedjax_sim.base.files import memory_of_host
from fedjax_sim.engine import tree
from fedjax_sim.engine.memory import MB, TooLargeError, held_of_host
from fedjax_sim.engine.reading import needed
from fedjax_sim.run.client_rows import ClientRows, client_rows
from fedjax_sim.run.layout import Layout, bare, kept_of, shapes_for, with_kept
from fedjax_sim.run.stages import Run
from fedjax_sim.run.windows import Rows


def rows_that_fit(state: Run, layout: Layout, mb: float) -> Rows | None:
    """The rows for what clients keep that a device has room for; None if all fit.

    Args:
        state: the shapes of a run, with what all clients keep.
        layout: of it.
        mb: that a device may hold.
    """
    each = tree.num_bytes(kept_of(layout.like(state))) // layout.clients
    rows = layout.clients if not each else int(mb * MB // each) * layout.parts
    return None if rows >= layout.clients else Rows(rows, layout.parts, each, mb)


def check_unread(jaxpr: Jaxpr, inputs: tuple[Any, ...]) -> None:
    """Refuses a program that reads what clients keep, beside the rounds.

    Args:
        jaxpr: of the program.
        inputs: of it, of which the first is a run.

    Raises:
        HeldError: if it does.
    """
    run: Run = needed(jaxpr, inputs)[1][0]
    if any(jax.tree.leaves(kept_of(run))):
        raise HeldError


class ClientMemory:
    """What clients keep, with a row for those that are ever drawn; see :class:`ClientRows`.

    It stands for a :class:`fedjax_sim.run.layout.Layout` where runs are told and restored. Runs
    between two programs are without what clients keep.

    Args:
        layout: of what the devices have.
        clients: N.
    """

    def __init__(self, layout: Layout, clients: int) -> None:
        self.execution = layout.execution
        self._layout = layout
        self._row = np.zeros(clients, np.int32)
        self._rows: dict[str, PyTree] = {}  # [R, 1 + n, *]: first what all start from

    def begin(self, run: Run) -> Run:
        """All clients start from the same, which is the first row of a run."""

        def first(a: jax.Array) -> NDArray[Any]:
            shard = next(s for s in a.addressable_shards if not s.index[1].start)
            return np.array(np.asarray(shard.data)[:, :1])

        self._rows = jax.tree.map(first, kept_of(run))
        self._row = np.zeros_like(self._row)
        return bare(run)

    def reserve(self, cohorts: NDArray[np.integer], device_bytes: int) -> None:
        """Makes rows for the clients of the coming rounds.

        Args:
            cohorts: ``int32[R, T, S]``; N for none.
            device_bytes: what a device holds at most.

        Raises:
            TooLargeError: if this machine has not the memory; says both sizes.
        """
        total = len(self._row)
        drawn = np.zeros(total + 1, bool)
        drawn[cohorts] = True
        new = np.flatnonzero(drawn[:total] & (self._row == 0))
        before = jax.tree.leaves(self._rows)[0].shape[1]
        rows = before + len(new)
        kept = tree.num_bytes(self._rows) // before * rows
        devices = held_of_host(device_bytes, self.execution.devices)
        # Beside it a copy is told, or devices that have no other memory are given their part of it.
        size, there = kept + max(kept, 2 * devices), memory_of_host()
        if there is not None and size > there:
            raise TooLargeError(
                f"what {rows - 1:,} of {total:,} clients keep, {kept / MB:,.0f} MB, needs "
                f"{size / MB:,.0f} MB of this machine's memory with its copies, which has "
                f"{there / MB:,.0f} MB: take fewer rounds, clients a round or seeds at once"
            )

        def longer(a: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([a, np.repeat(a[:, :1], len(new), axis=1)], axis=1)

        self._rows = jax.tree.map(longer, self._rows)
        self._row = self._row.copy()  # runs that were told have the old one
        self._row[new] = np.arange(before, rows, dtype=np.int32)

    def lent(self, run: Run, clients: NDArray[np.integer]) -> Run:
        """The run with what these clients keep in its first rows, in order."""
        room, split = self._layout.clients, self._layout.split

        def some(a: NDArray[Any]) -> jax.Array:
            def part(index: Any) -> NDArray[Any]:  # a slice of each axis
                there = self._row[clients[index[1]]]
                rows = np.zeros((len(a), room // self._layout.parts, *a.shape[2:]), a.dtype)
                np.take(a, there, axis=1, out=rows[:, : len(there)], mode="clip")
                return rows

            return jax.make_array_from_callback((len(a), room, *a.shape[2:]), split, part)

        return with_kept(run, jax.tree.map(some, self._rows))

    def returned(self, run: Run, clients: NDArray[np.integer]) -> Run:
        """The run without what was :meth:`lent`, which is taken back when the rounds are over."""

        def keep(mine: NDArray[Any], theirs: jax.Array) -> None:
            for shard in theirs.addressable_shards:  # as they are: each copy takes its time
                there = self._row[clients[shard.index[1]]]
                mine[:, there] = np.asarray(shard.data)[:, : len(there)]

        jax.tree.map(keep, self._rows, kept_of(run))
        return bare(run)

    def like(self, run: Run) -> Run:
        """The shapes of a run as it is told, by those of one on the devices."""
        return with_kept(run, shapes_for(len(self._row), kept_of(run)))

    def told(self, run: Run) -> Run:
        """The run as users and checkpoints know it."""

        def copied(a: NDArray[Any]) -> ClientRows:
            return ClientRows(a.copy(), self._row)

        return with_kept(run, jax.tree.map(copied, self._rows))

    def put(self, run: Run) -> Run:
        """A run that was told, as programs hand it on."""
        kept = jax.tree.map(client_rows, kept_of(run))
        self._row = jax.tree.leaves(kept)[0].row
        self._rows = jax.tree.map(lambda a: np.array(a.rows), kept)
        return self._layout.put(bare(run))
