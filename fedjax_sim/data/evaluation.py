"""Evaluation sets: samples that are scored, client by client, a ragged list for each run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from fedjax_sim.base import Array
from fedjax_sim.base.brief import brief_fields
from fedjax_sim.data.clients import as_runs, in_host_memory
from fedjax_sim.data.targets import as_targets
from fedjax_sim.partition.table import Partition


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EvalSet:
    """Pooled samples and a ragged (CSR) list of those that are scored.

    It is made by :func:`fedjax_sim.data.eval_set`. Runs that are scored on different clients
    (folds) share ``x`` and ``y``, with each other and with :class:`fedjax_sim.ClientData`, and
    differ in integers.

    Attributes:
        x: ``[n_total, *feature]``.
        y: ``[n_total, *target]``: class labels, int32, or what another task has.
        index: ``int32[n]`` or ``int32[R, n]``, rows of ``x`` grouped by client. What lies behind
            ``start[-1]`` is padding: it is never counted.
        start: ``int32[K + 1]`` or ``int32[R, K + 1]``; client k owns ``index[start[k]:start[k +
            1]]``. A client without samples has no score.
    """

    x: Array
    y: Array
    index: Array
    start: Array

    @property
    def clients(self) -> int:
        """K; if a run has fewer clients than others, its last ones are empty."""
        return self.start.shape[-1] - 1

    def __repr__(self) -> str:
        return brief_fields(self)


def eval_set(x: Any, y: Any, partitions: Partition | Sequence[Partition] | None = None) -> EvalSet:
    """Samples to score: all of them as one set, or those of a partition's clients.

    Args:
        x: ``[n_total, *feature]``; the dtype is kept.
        y: ``[n_total, ...]``, class labels, or any targets of another task.
        partitions: which client owns which samples, for all runs or one for each of R runs, which
            may differ in samples and clients; None: all samples as one set, without clients.

    Returns:
        NumPy-backed. Give the same ``x`` and ``y`` to :func:`fedjax_sim.client_data`: the devices
        then hold them once.

    Raises:
        ValueError: if x and y differ in length, a set is empty, or a row is out of range.

    Example:
        >>> from fedjax_sim.partition import partition_from_lists
        >>> x, y = np.zeros((6, 3)), np.arange(6) % 2
        >>> folds = [partition_from_lists([[0, 1], [2]]), partition_from_lists([[3, 4, 5, 0]])]
        >>> two = eval_set(x, y, folds)
        >>> two.index.tolist(), two.start.tolist()
        ([[0, 1, 2, 0], [0, 3, 4, 5]], [[0, 2, 3], [0, 4, 4]])
    """
    if partitions is None:
        whole = np.arange(len(y), dtype=np.int32)
        partitions = Partition(whole, np.array([0, len(y)], np.int32))
    many, stacked = as_runs(x, y, partitions)
    for p in many:
        if not len(p.index):
            raise ValueError("partitions must have at least one sample each, got none")
        outside = p.index[(p.index < 0) | (p.index >= len(y))]
        if len(outside):
            raise ValueError(f"partition.index must be in 0 to {len(y) - 1}, got {outside[0]}")
    most, ends = max(len(p.index) for p in many), max(len(p.start) for p in many)
    index = np.stack([np.pad(p.index, (0, most - len(p.index))) for p in many])
    start = np.stack([np.pad(p.start, (0, ends - len(p.start)), mode="edge") for p in many])
    return EvalSet(
        x=in_host_memory(x),
        y=in_host_memory(as_targets(np.asarray(y), len(x))),
        index=index[stacked].astype(np.int32),
        start=start[stacked].astype(np.int32),
    )
