"""Inputs: samples as they are, or the standardised tables of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.cli.scoring import Standardise
from fedjax_sim.data import Dataset, shift_rows, standardise_global, standardise_local
from fedjax_sim.partition import Partition


def is_table(dataset: Dataset) -> bool:
    """Returns whether the samples are rows of numbers that are not scaled yet."""
    return dataset.train_x.ndim == 2 and dataset.mean is not None


def inputs(
    dataset: Dataset,
    standardise: Standardise,
    roles: Sequence[list[Partition]],
    *,
    whole: Sequence[Partition],
    fit: Sequence[Partition],
) -> tuple[NDArray[Any], NDArray[Any], list[list[Partition]]]:
    """Returns the samples, or of a table R standardised copies, one behind the other.

    A copy for each run costs R · n · F · 4 bytes: for Covertype (495,141 x 54) 107 MB a run. The
    partitions of each role (the first one trains) have the rows of their run's copy.
    """
    x, y, columns = dataset.train_x, dataset.train_y, dataset.numeric
    if not is_table(dataset):
        if standardise == "local":
            raise ValueError(f"standardise='local' is for tables of numbers, not {dataset.name}")
        return x, y, [*roles]
    copies = np.empty((len(roles[0]), *x.shape), np.float32)
    for copy, clients, trained, fitted in zip(copies, whole, roles[0], fit, strict=True):
        if standardise == "global":
            copy[:] = standardise_global(x, trained, numeric=columns)
        else:
            copy[:] = standardise_local(x, clients, fit=fitted, numeric=columns)
    shifted = [shift_rows(role, len(y)) for role in roles]
    return copies.reshape(-1, x.shape[1]), np.concatenate([y] * len(copies)), shifted
