"""Traces: tables of measured devices, which give a clock its speeds and availability."""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Array, Availability, Law, Link, Now
from fedjax_sim.base.files import open_text
from fedjax_sim.plan.devices import bandwidth

Column = NDArray[np.float64]
SPEEDS = ("seconds_per_step", "up_bytes_per_second", "down_bytes_per_second")
TIMES = ("from", "to")


class Trace(NamedTuple):
    """The devices of a trace.

    Attributes:
        start: ``int32[N + 1]``, the first row of each client.
        speeds: ``f32[R]`` by name.
        begins: ``int32[R]``, the column ``from``; None: each client has one row, for all time.
        ends: ``int32[R]``, the column ``to``.
        period: seconds after which the trace repeats; None: never.
    """

    start: NDArray[np.int32]
    speeds: Mapping[str, NDArray[np.float32]]
    begins: NDArray[np.int32] | None
    ends: NDArray[np.int32] | None
    period: int | None

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.start) - 1

    @property
    def compute(self) -> Law:
        """Seconds of a local step."""
        return functools.partial(self._speed, "seconds_per_step")

    @property
    def link(self) -> Link:
        """Bytes per second."""
        up, down = (functools.partial(self._speed, name) for name in SPEEDS[1:])
        return bandwidth(up, down)

    @property
    def available(self) -> Availability | None:
        """The clients that are awake; None: all, always."""
        return None if self.begins is None else self._is_available

    def _speed(self, name: str, key: Array, client: Array, now: Now) -> Array:
        values = self.speeds[name]
        # A client that is asleep takes no part: any row will do.
        return jnp.asarray(values)[jnp.clip(self._row(client, now), 0, len(values) - 1)]

    def _is_available(self, keys: Array, client: Array, now: Now) -> Array:
        row, first = self._row(client, now), self.start[:-1]
        known = jnp.asarray(first)[jnp.minimum(client, len(first) - 1)]
        return (row >= known) & (self._second(now) < jnp.asarray(self.ends)[row])

    def _second(self, now: Now) -> Array:
        return now.seconds if self.period is None else now.seconds % self.period

    def _row(self, client: Array, now: Now) -> Array:
        """Returns the last row of each client that has begun, ``int32[P]``."""
        low, high = jnp.asarray(self.start)[client], jnp.asarray(self.start)[client + 1]
        if self.begins is None:
            return low
        second = self._second(now)
        for _ in range(math.ceil(math.log2(int(np.diff(self.start).max()) + 1))):
            middle = (low + high) // 2
            begun = jnp.asarray(self.begins)[jnp.minimum(middle, len(self.begins) - 1)] <= second
            go = (low < high) & begun
            low, high = jnp.where(go, middle + 1, low), jnp.where(go, high, middle)
        return low - 1


def read(file: str | Path, period: int | None) -> Trace:
    """Reads the trace of :func:`fedjax_sim.clock.traced`, or raises ValueError with the row."""
    columns = _columns(Path(file))
    _check_numbers(file, columns)
    client, timed = columns["client"], "from" in columns
    _check_clients(file, client, several=timed)
    start = np.searchsorted(client, np.arange(int(client[-1]) + 2)).astype(np.int32)
    speeds = {name: columns[name].astype(np.float32) for name in SPEEDS}
    if not timed:
        return Trace(start, speeds, None, None, period)
    begins = _begins(file, columns, period)
    return Trace(start, speeds, begins, columns["to"].astype(np.int32), period)


def _columns(path: Path) -> dict[str, Column]:
    """Reads the columns of a file and checks their names."""
    if path.suffix != ".csv":
        raise ValueError(f"{path} must be a .csv file")
    try:
        found = _csv(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    needed = ("client", *SPEEDS)
    for name in needed:
        if name not in found:
            raise ValueError(f"{path} lacks the column {name}")
    for name in found:
        if name not in (*needed, *TIMES):
            raise ValueError(
                f"{path} has an unknown column {name}: optional columns are {', '.join(TIMES)}"
            )
    if len({*TIMES} & found.keys()) == 1:
        raise ValueError(f"{path} must have both from and to, or neither")
    if not len(found["client"]):
        raise ValueError(f"{path} has no rows")
    return found


def _csv(path: Path) -> dict[str, Column]:
    try:
        with open_text(path, "utf-8-sig") as lines:
            head, *rows = [row for row in csv.reader(lines) if row] or [[]]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be csv in UTF-8, got: {error}") from error
    for i, row in enumerate(rows, 1):
        if len(row) != len(head):
            raise ValueError(f"{path}: row {i} has {len(row)} values, the header has {len(head)}")
    try:
        columns = np.array(rows, np.float64).reshape(len(rows), len(head)).T
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return {name.strip(): column for name, column in zip(head, columns, strict=True)}


def _check_numbers(file: str | Path, columns: dict[str, Column]) -> None:
    for name, values in columns.items():
        if name in SPEEDS:
            with np.errstate(over="ignore"):
                stored = values.astype(np.float32)
            good, wanted = np.isfinite(stored) & (stored > 0), "positive and finite in float32"
        else:
            good = (values >= 0) & (values < 2**31) & (values == np.floor(values))
            wanted = "a whole number from 0"
        _reject(file, {f"{name} must be {wanted}": ~good}, "{:g}", values)


def _check_clients(file: str | Path, client: Column, *, several: bool) -> None:
    """Checks that each client is there, once or several times in a row, in order."""
    steps = np.diff(client, prepend=-1)
    faults = {
        "clients must be in order": steps < 0,
        "a client is missing before this row": steps > 1,
        "a client has several rows, which need from and to": (steps < 1) & (not several),
    }
    _reject(file, faults, "client {:g}", client)


def _begins(file: str | Path, columns: dict[str, Column], period: int | None) -> NDArray[np.int32]:
    """Returns the column ``from``, after checking the order of each client's windows."""
    client, begins, ends = columns["client"], columns["from"], columns["to"]
    same = np.diff(client, prepend=-1) == 0
    before = np.concatenate([[0], ends[:-1]])
    faults = {
        "from must be below to": begins >= ends,
        "a client's windows must be in order and apart": same & (begins < before),
        f"to must be at most {period}": ends > (math.inf if period is None else period),
    }
    _reject(file, faults, "{:g} to {:g}", begins, ends)
    return begins.astype(np.int32)


def _reject(
    file: str | Path, faults: dict[str, NDArray[np.bool_]], got: str, *columns: Column
) -> None:
    """Raises ValueError for the first row with a fault; ``got`` shows its entries of columns."""
    for why, wrong in faults.items():
        if wrong.any():
            i = int(np.argmax(wrong))
            shown = got.format(*(column[i] for column in columns))
            raise ValueError(f"{file}: row {i + 1}: {why}, got {shown}")
