"""Traces: a table of what devices did, as the laws and the availability of a clock."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Array, Availability, Law, Link, Now
from fedjax_sim.base.files import open_text, read_npz

Column = NDArray[np.float64]
SPEEDS = ("seconds_per_step", "up_bytes_per_second", "down_bytes_per_second")
TIMES = ("from", "to")
ENDINGS = (".csv", ".npz")


class Trace(NamedTuple):
    """What a clock takes of a trace.

    Attributes:
        compute: seconds of a local step.
        link: bytes per second.
        available: who is awake; None: everyone, always.
        clients: how many it has.
    """

    compute: Law
    link: Link
    available: Availability | None
    clients: int


def read(file: str | Path, period: int | None) -> Trace:
    """The trace in a file.

    Args:
        file: see :func:`fedjax_sim.clock.traced`.
        period: seconds after which it begins again; None: never.

    Raises:
        ValueError: if it is none; says where.
    """
    columns = _columns(Path(file))
    _check_numbers(file, columns)
    client, timed = columns["client"], "from" in columns
    _check_clients(file, client, several=timed)
    start = np.searchsorted(client, np.arange(int(client[-1]) + 2)).astype(np.int32)
    begins = _windows(file, columns, period) if timed else None
    find = _finder(start, begins, period)
    compute, up, down = (_law(find, columns[name].astype(np.float32)) for name in SPEEDS)
    if begins is None:
        return Trace(compute, Link(up, down), None, len(start) - 1)
    ends, first = columns["to"].astype(np.int32), start[:-1]

    def available(keys: Array, client: Array, now: Now) -> Array:
        row, second = find(client, now)
        known = jnp.asarray(first)[jnp.minimum(client, len(first) - 1)]
        return (row >= known) & (second < jnp.asarray(ends)[row])

    return Trace(compute, Link(up, down), available, len(start) - 1)


Finder = Callable[[Array, Now], tuple[Array, Array]]
"""``(client int32[P], now) -> (row int32[P], second int32[])``: the last row that has begun."""


def _finder(start: NDArray[np.int32], begins: NDArray[np.int32] | None, period: int | None) -> Any:
    halvings = math.ceil(math.log2(int(np.diff(start).max()) + 1))

    def find(client: Array, now: Now) -> tuple[Array, Array]:
        second = now.seconds if period is None else now.seconds % period
        low, high = jnp.asarray(start)[client], jnp.asarray(start)[client + 1]
        if begins is None:
            return low, second
        for _ in range(halvings):
            middle = (low + high) // 2
            begun = jnp.asarray(begins)[jnp.minimum(middle, len(begins) - 1)] <= second
            go = (low < high) & begun
            low, high = jnp.where(go, middle + 1, low), jnp.where(go, high, middle)
        return low - 1, second

    return find


def _law(find: Finder, values: NDArray[np.float32]) -> Law:
    def law(key: Array, client: Array, now: Now) -> Array:
        # A client that is asleep takes no part: any row will do.
        return jnp.asarray(values)[jnp.clip(find(client, now)[0], 0, len(values) - 1)]

    return law


def _columns(path: Path) -> dict[str, Column]:
    """The columns of a file, which are those that are known, and of one length."""
    if path.suffix not in ENDINGS:
        raise ValueError(f"{path} must be a .csv or .npz file")
    try:
        found = _csv(path) if path.suffix == ".csv" else _npz(path)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    needed = ("client", *SPEEDS)
    for name in needed:
        if name not in found:
            raise ValueError(f"{path} lacks the column {name}")
    for name in found:
        if name not in (*needed, *TIMES):
            raise ValueError(f"{path} has a column {name}: it may have {', '.join(TIMES)} besides")
    if len({*TIMES} & found.keys()) == 1:
        raise ValueError(f"{path} must have both from and to, or none of them")
    if not len(found["client"]):
        raise ValueError(f"{path} has no rows")
    return found


def _csv(path: Path) -> dict[str, Column]:
    try:
        with open_text(path, "utf-8-sig") as lines:
            head, *rows = [*csv.reader(lines)] or [[]]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must be csv in UTF-8, got: {error}") from error
    for i, row in enumerate(rows, 1):
        if len(row) != len(head):
            raise ValueError(f"{path}: row {i} has {len(row)} values, and the head {len(head)}")
    return {name.strip(): _numbers(path, [row[i] for row in rows]) for i, name in enumerate(head)}


def _npz(path: Path) -> dict[str, Column]:
    found = {name: _numbers(path, array) for name, array in read_npz(path).items()}
    if len({array.shape for array in found.values()}) > 1 or any(
        a.ndim != 1 for a in found.values()
    ):
        raise ValueError(f"{path} must have arrays of one axis, and of one length")
    return found


def _numbers(path: Path, values: list[str] | NDArray[Any]) -> Column:
    try:
        return np.array(values, np.float64)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _check_numbers(file: str | Path, columns: dict[str, Column]) -> None:
    for name, values in columns.items():
        if name in SPEEDS:
            good, wanted = np.isfinite(values) & (values > 0), "positive and finite"
        else:
            good = (values >= 0) & (values < 2**31) & (values == np.floor(values))
            wanted = "a whole number from 0"
        if not good.all():
            row = int(np.argmin(good))
            raise ValueError(f"{file}: row {row + 1}: {name} must be {wanted}, got {values[row]:g}")


def _check_clients(file: str | Path, client: Column, *, several: bool) -> None:
    """Each is there, once or several times in a row, in order."""
    steps = np.diff(client, prepend=-1)
    for wrong, why in (
        (steps < 0, "clients must be in order"),
        (steps > 1, "a client is missing before this row"),
        (steps < 1, "a client has several rows, which need from and to"),
    ):
        rows = np.flatnonzero(wrong)
        if len(rows) and not (several and why.startswith("a client has")):
            raise ValueError(f"{file}: row {rows[0] + 1}: {why}, got client {client[rows[0]]:g}")


def _windows(file: str | Path, columns: dict[str, Column], period: int | None) -> NDArray[np.int32]:
    """The column ``from``; each client's windows are in order and apart."""
    client, begins, ends = columns["client"], columns["from"], columns["to"]
    same = np.diff(client, prepend=-1) == 0
    before = np.concatenate([[0], ends[:-1]])
    for wrong, why in (
        (begins >= ends, "from must be below to"),
        (same & (begins < before), "a client's windows must be in order and apart"),
        (ends > (math.inf if period is None else period), f"to must be at most {period}"),
    ):
        rows = np.flatnonzero(wrong)
        if len(rows):
            i = rows[0]
            raise ValueError(f"{file}: row {i + 1}: {why}, got {begins[i]:g} to {ends[i]:g}")
    return begins.astype(np.int32)
