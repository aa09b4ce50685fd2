"""Means and standard deviations of inputs, and standardisation by the training samples."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.base.words import array_type
from fedjax_sim.data.arrays import flags
from fedjax_sim.partition.table import Partition

Columns = NDArray[np.bool_] | None


def _moments(
    x: NDArray[Any], numeric: Columns = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns mean and std along the last axis, ``f64[C]``: 0 and 1 for non-numeric columns.

    The std is 1 if the variance is within its rounding error, as in scikit-learn's StandardScaler.
    """
    mean, std = np.zeros(x.shape[-1]), np.ones(x.shape[-1])
    for c in range(x.shape[-1]) if numeric is None else np.flatnonzero(numeric):
        # One column at a time: a float64 copy of the whole table would double its memory twice.
        column = x[..., c]
        mean[c], variance = column.mean(dtype=np.float64), column.var(dtype=np.float64)
        rounding = column.size * np.finfo(np.float64).eps
        if not variance <= rounding * variance + (rounding * mean[c]) ** 2:
            std[c] = np.sqrt(variance)
    return mean, std


def statistics(
    x: NDArray[Any], numeric: Columns = None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns mean and std along the last axis, ``f32[C]``: 0 and 1 for non-numeric columns.

    A std of 0 becomes 1.

    >>> statistics(np.array([[0.0, 7.0], [4.0, 9.0]]), np.array([True, False]))
    (array([2., 0.], dtype=float32), array([2., 1.], dtype=float32))
    """
    if x.dtype == np.uint8 and x.ndim == 4 and numeric is None:
        # Counts of the 256 values are exact and need no floating-point copy of the images.
        channels, values = x.reshape(-1, x.shape[-1]).T, np.arange(256, dtype=np.float64)
        counts = np.stack([np.bincount(channel, minlength=256) for channel in channels])
        share = counts / counts.sum(axis=1, keepdims=True)
        mean = share @ values
        std = np.sqrt(np.sum(share * (values - mean[:, None]) ** 2, axis=1))
    else:
        mean, std = _moments(x, numeric)
    std = std.astype(np.float32)
    return mean.astype(np.float32), np.where(std == 0, np.float32(1), std)


def standardise_global(
    x: NDArray[Any], train: Partition, *, numeric: Columns = None
) -> NDArray[np.float32]:
    r"""Standardises all samples, :math:`(x - \mu) / \sigma`, by the training clients' statistics.

    Args:
        x: raw inputs, ``[n, ..., C]``.
        train: samples of the training clients, the only ones used for the statistics.
        numeric: ``bool[C]``, the columns to scale; None for all. Constant columns are only shifted.

    Returns:
        A copy, ``f32[n, ..., C]``; runs with different training clients need one each.

    Raises:
        ValueError: if x is not numeric or is not finite on ``train``, or ``train`` or ``numeric``
            does not fit x.

    Source: Xue, Klabjan, Luo 2021 <https://arxiv.org/abs/2108.07433>, section IV-B: COVFEAT-G and
    COVCLS-G.

    Example:
        >>> from fedjax_sim.partition import partition_from_lists
        >>> x = np.array([[1.0, 5.0], [3.0, 6.0], [9.0, 7.0]])
        >>> train = partition_from_lists([[0, 1]])
        >>> standardise_global(x, train, numeric=np.array([True, False])).tolist()
        [[-1.0, 5.0], [1.0, 6.0], [7.0, 7.0]]
    """
    x = np.asarray(x)
    columns = _checked_columns(x, numeric, train=train)
    return _scaled(x, *_fit_moments(x, train.index, columns))


def standardise_local(
    x: NDArray[Any],
    clients: Partition,
    *,
    fit: Partition | None = None,
    numeric: Columns = None,
) -> NDArray[np.float32]:
    """Standardises each client's samples by that client's own mean and standard deviation.

    Args:
        x: raw inputs, ``[n, ..., C]``.
        clients: samples of each client.
        fit: the same clients with the samples to use for the statistics, such as the training part
            of :func:`fedjax_sim.data.client_holdout`; None for all.
        numeric: ``bool[C]``, the columns to scale; None for all.

    Returns:
        ``f32[n, ..., C]``; samples that belong to no client are unchanged.

    Raises:
        ValueError: if x is not numeric or is not finite on ``fit``; if a partition or ``numeric``
            does not fit x; or if ``fit`` has a different number of clients, or no sample for a
            client that has some.

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
            f"fit must have {len(clients.start) - 1} clients, as clients has, got "
            f"{len(fit.start) - 1}"
        )
    x = np.asarray(x)
    columns = _checked_columns(x, numeric, clients=clients, fit=fit)
    missing = np.flatnonzero((clients.sizes > 0) & (fit.sizes == 0))
    if missing.size:
        raise ValueError(f"fit must have a sample of every client, got none of client {missing[0]}")
    out = x.astype(np.float32)
    for rows, fit_rows in zip(clients.lists, fit.lists, strict=True):
        if len(rows):
            out[rows] = _scaled(x[rows], *_fit_moments(x, fit_rows, columns))
    return out


def _checked_columns(
    x: NDArray[Any], numeric: ArrayLike | None, **partitions: Partition
) -> Columns:
    """Returns the columns to scale, after checking x and the partitions, by argument name."""
    if x.ndim < 2 or x.dtype.kind not in "biuf":
        raise ValueError(f"x must be numbers [n, ..., C], got {array_type(x)}")
    for name, partition in partitions.items():
        index = partition.index
        if not len(index) or not 0 <= index.min() <= index.max() < len(x):
            raise ValueError(
                f"{name} must have samples in 0 to {len(x) - 1}, got "
                + (f"{index.min()} to {index.max()}" if len(index) else "none")
            )
    return None if numeric is None else flags("numeric", numeric, x.shape[-1])


def _fit_moments(x: NDArray[Any], rows: NDArray[np.int32], columns: Columns) -> Any:
    with np.errstate(invalid="ignore"):
        mean, std = _moments(x[rows], columns)
    if not np.isfinite(mean).all():
        raise ValueError("x must be finite where statistics are computed, got NaN or inf")
    return mean, std


def _scaled(x: NDArray[Any], mean: NDArray[np.float64], std: NDArray[np.float64]) -> Any:
    """Standardises in float64, one column at a time, so that close values stay distinct."""
    out = np.empty(x.shape, np.float32)
    for c in range(x.shape[-1]):
        out[..., c] = (x[..., c] - mean[c]) / std[c]
    return out
