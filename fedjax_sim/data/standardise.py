r"""Standardisation, :math:`(x - \mu) / \sigma`, by statistics of the training samples alone."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.data.dataset import flags
from fedjax_sim.data.scaling import moments
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

    Raises:
        ValueError: if x are no numbers, or not finite where the statistics are taken; if train has
            no sample or does not fit x; if numeric is no flag for each column.

    Source: Xue, Klabjan, Luo 2021 <https://arxiv.org/abs/2108.07433>, section IV-B: COVFEAT-G and
    COVCLS-G.

    Example:
        >>> from fedjax_sim.partition import partition_from_lists
        >>> x = np.array([[1.0, 5.0], [3.0, 6.0], [9.0, 7.0]])
        >>> train = partition_from_lists([[0, 1]])
        >>> standardise_global(x, train, numeric=np.array([True, False])).tolist()
        [[-1.0, 5.0], [1.0, 6.0], [7.0, 7.0]]
    """
    columns = _checked(x, numeric, train=train)
    return _scaled(x, *_fitted(x, train.index, columns))


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
        ValueError: if x are no numbers, or not finite where the statistics are taken; if a
            partition does not fit x; if numeric is no flag for each column; if ``fit`` has another
            number of clients, or no sample of one that has some.

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
    columns = _checked(x, numeric, clients=clients, fit=fit)
    without = np.flatnonzero((clients.sizes > 0) & (fit.sizes == 0))
    if without.size:
        raise ValueError(f"fit must have a sample of every client, got none of client {without[0]}")
    out = x.astype(np.float32)
    for rows, fitted in zip(clients.lists, fit.lists, strict=True):
        if len(rows):
            out[rows] = _scaled(x[rows], *_fitted(x, fitted, columns))
    return out


def _checked(x: NDArray[Any], numeric: ArrayLike | None, **partitions: Partition) -> Columns:
    """The columns to scale, if all fit together; partitions by the argument's name."""
    if x.ndim < 2 or x.dtype.kind not in "biuf":
        raise ValueError(f"x must be numbers [n, ..., C], got {x.dtype} {list(x.shape)}")
    for name, partition in partitions.items():
        index = partition.index
        if not len(index) or not 0 <= index.min() <= index.max() < len(x):
            raise ValueError(
                f"{name} must have samples in 0 to {len(x) - 1}, got "
                + (f"{index.min()} to {index.max()}" if len(index) else "none")
            )
    return None if numeric is None else flags("numeric", numeric, x.shape[-1])


def _fitted(x: NDArray[Any], rows: NDArray[np.int32], columns: Columns) -> Any:
    """Mean and std of these rows; of others nothing is read."""
    with np.errstate(invalid="ignore"):
        mean, std = moments(x[rows], columns)
    if not np.isfinite(mean).all():
        raise ValueError("x must be finite where statistics are taken, got NaN or inf")
    return mean, std


def _scaled(x: NDArray[Any], mean: NDArray[np.float64], std: NDArray[np.float64]) -> Any:
    """Computed in float64, a column at a time, so that close values stay apart."""
    out = np.empty(x.shape, np.float32)
    for c in range(x.shape[-1]):
        out[..., c] = (x[..., c] - mean[c]) / std[c]
    return out
