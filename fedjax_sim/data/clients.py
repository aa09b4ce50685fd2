"""From arrays and partitions to the engine's :class:`fedjax_sim.base.ClientData`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedjax_sim.base import ClientData
from fedjax_sim.partition.table import Partition, validate_partition


def client_data(x: Any, y: Any, partitions: Partition | Sequence[Partition]) -> ClientData:
    """Pooled samples with one partition, or with one for each seed.

    Args:
        x: ``[n_total, *feature]``; the dtype is kept.
        y: ``int[n_total]``, class labels.
        partitions: one, or R of equally many clients: then ``start`` is ``int32[R, N + 1]`` into
          one list of integers; samples are never copied.

    Returns:
        NumPy-backed :class:`fedjax_sim.base.ClientData`.

    Raises:
        ValueError: if a partition does not fit the samples or has a client without one, or the
          partitions differ in their number of clients.

    Example:
        >>> from fedjax_sim import partition
        >>> y = np.arange(8) % 2
        >>> data = client_data(np.zeros((8, 3)), y, [partition.iid(y, 4, seed=s) for s in (0, 1)])
        >>> data.start.tolist()
        [[0, 2, 4, 6, 8], [8, 10, 12, 14, 16]]
    """
    many, stacked = as_runs(x, y, partitions)
    clients = {len(p.start) - 1 for p in many}
    if len(clients) != 1:
        raise ValueError(f"partitions must have equally many clients, got {sorted(clients)}")
    for p in many:
        validate_partition(p, len(y))
    offsets = np.cumsum([0] + [len(p.index) for p in many[:-1]])
    starts = np.stack([p.start + o for p, o in zip(many, offsets, strict=True)]).astype(np.int32)
    return ClientData(
        x=np.asarray(x),  # type: ignore[arg-type]
        y=np.asarray(y, np.int32),  # type: ignore[arg-type]
        index=np.concatenate([p.index for p in many]).astype(np.int32),  # type: ignore[arg-type]
        start=starts[stacked],
        capacity=int(max(np.diff(p.start).max() for p in many)),
    )


def as_runs(
    x: Any, y: Any, partitions: Partition | Sequence[Partition]
) -> tuple[list[Partition], Any]:
    """The partitions of all runs, and the part of an array stacked from them that is wanted.

    Returns:
        A list of one or R partitions; 0 for a single one, whose arrays have no axis of runs, else
        all.

    Raises:
        ValueError: if x and y differ in length.
    """
    if len(x) != len(y):
        raise ValueError(f"x and y must have as many rows: got {len(x)} and {len(y)}")
    if isinstance(partitions, Partition):
        return [partitions], 0
    return list(partitions), slice(None)
