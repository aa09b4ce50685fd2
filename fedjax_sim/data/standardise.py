r"""Standardisation, :math:`(x - \mu) / \sigma`, by statistics of the training samples alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.data.scaling import statistics
from fedjax_sim.partition.table import Partition

Columns = NDArray[np.bool_] | None


def standardise_global(
    x: NDArray[Any], train: Partition, *, numeric: Columns = None
) -> NDArray[np.float32]:
    """Scales all samples by one mean and standard deviation: those of the training clients.

    Args:
        x: ``[n, ..., C]``, raw.
        train: the training clients' samples; the statistics come from them alone.
        numeric: ``bool[C]``, the columns to scale; None for all. A constant column is shifted only.

    Returns:
        ``f32[n, ..., C]``, a copy: runs that train on different clients need one each.

    Source: Xue, Klabjan, Luo 2021 <https://arxiv.org/abs/2108.07433>, section IV-B: COVFEAT-G and
    COVCLS-G.

    Example:
        >>> from fedjax_sim.partition import partition_from_lists
        >>> x = np.array([[1.0, 5.0], [3.0, 6.0], [9.0, 7.0]])
        >>> train = partition_from_lists([[0, 1]])
        >>> standardise_global(x, train, numeric=np.array([True, False])).tolist()
        [[-1.0, 5.0], [1.0, 6.0], [7.0, 7.0]]
    """
    return _scaled(x, *statistics(x[train.index], numeric))


def standardise_local(
    x: NDArray[Any],
    clients: Partition,
    *,
    fit: Partition | None = None,
    numeric: Columns = None,
) -> NDArray[np.float32]:
    """Scales each client's samples by its own mean and standard deviation.

    Args:
        x: ``[n, ..., C]``, raw.
        clients: which client owns which samples.
        fit: the same clients with the samples that the statistics may use, such as the training
            part of :func:`fedjax_sim.data.client_holdout`; None for all.
        numeric: ``bool[C]``, the columns to scale; None for all.

    Returns:
        ``f32[n, ..., C]``; samples without a client are as they were.

    Raises:
        ValueError: if ``fit`` has another number of clients.

    Source: Xue, Klabjan, Luo 2021 <https://arxiv.org/abs/2108.07433>, section IV-B: COVFEAT-L and
    COVCLS-L.

    Example:
        >>> from fedjax_sim.partition import partition_from_lists
        >>> x = np.array([[1.0], [3.0], [10.0], [30.0]])
        >>> standardise_local(x, partition_from_lists([[0, 1], [2, 3]])).tolist()
        [[-1.0], [1.0], [-1.0], [1.0]]
    """
    fit = clients if fit is None else fit
    if len(fit.start) != len(clients.start):
        raise ValueError(
            f"fit must have the {len(clients.start) - 1} clients of clients, "
            f"got {len(fit.start) - 1}"
        )
    out = x.astype(np.float32)
    for rows, fitted in zip(clients.lists, fit.lists, strict=True):
        out[rows] = _scaled(x[rows], *statistics(x[fitted], numeric))
    return out


def _scaled(x: NDArray[Any], mean: NDArray[np.float32], std: NDArray[np.float32]) -> Any:
    return (x.astype(np.float32) - mean) / std
