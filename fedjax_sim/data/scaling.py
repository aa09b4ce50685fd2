"""Mean and standard deviation of inputs, and what float32 keeps of them."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

OFFSET = 8.0
"""|mean| / std from which a column is centred, if float32 makes one value of several."""


def moments(
    x: NDArray[Any], numeric: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the mean and standard deviation along the last axis, in float64.

    Args:
        x: ``[n, ..., C]``.
        numeric: ``bool[C]``, the columns that count; None for all.

    Returns:
        Mean and std, ``f64[C]`` each: 0 and 1 for the other columns. The std is 1 if the variance
        is within its rounding error, as in scikit-learn's StandardScaler: such a column is
        constant.
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
    x: NDArray[Any], numeric: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns the mean and standard deviation along the last axis.

    Args:
        x: ``[n, ..., C]``.
        numeric: ``bool[C]``, the columns that count; None for all.

    Returns:
        Mean and std, ``f32[C]`` each, in the units of x: 0 and 1 for the other columns, and a std
        of 0 is given as 1.

    Example:
        >>> statistics(np.array([[0.0, 7.0], [4.0, 9.0]]), np.array([True, False]))
        (array([2., 0.], dtype=float32), array([2., 1.], dtype=float32))
    """
    if x.dtype == np.uint8 and x.ndim == 4 and numeric is None:
        return channel_statistics(x)
    mean, std = (values.astype(np.float32) for values in moments(x, numeric))
    return mean, np.where(std == 0, np.float32(1), std)


def channel_statistics(
    x: NDArray[np.uint8],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Returns the mean and standard deviation of every channel.

    Args:
        x: ``uint8[n, H, W, C]``, images.

    Returns:
        Mean and std, ``f32[C]`` each, in the units of x; a std of 0 is given as 1.

    Example:
        >>> channel_statistics(np.array([[[[0, 7]]], [[[4, 7]]]], np.uint8))
        (array([2., 7.], dtype=float32), array([2., 1.], dtype=float32))
    """
    values = np.arange(256, dtype=np.float64)
    # Counts of the 256 values are exact and need no floating-point copy of the images.
    counts = np.stack([np.bincount(x[..., c].ravel(), minlength=256) for c in range(x.shape[-1])])
    share = counts / counts.sum(axis=1, keepdims=True)
    mean = share @ values
    std = np.sqrt(np.sum(share * (values - mean[:, None]) ** 2, axis=1))
    return mean.astype(np.float32), np.where(std == 0, 1, std).astype(np.float32)


def offset(values: NDArray[Any]) -> float:
    """Returns what to subtract before numbers become float32: their mean, or 0 if none is lost.

    Large values that are close to each other, such as Unix times, fall together in float32: 0 is
    returned unless some do, and the mean, which is rounded to a twentieth of the standard deviation
    or less, is at least 8 of these from 0.

    >>> offset(np.array([1.7e9, 1.7e9 + 1, 1.7e9 + 2])), offset(np.array([0.5, 1e9]))
    (1700000001.0, 0.0)
    """
    if np.can_cast(values.dtype, np.float32):
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        mean, std = values.mean(dtype=np.float64), values.std(dtype=np.float64)
        if not abs(mean) >= OFFSET * std > 0:
            return 0.0
        kept = np.unique(values.astype(np.float32))
    if len(kept) == len(np.unique(values)):
        return 0.0
    return round(float(mean), 1 - math.floor(math.log10(std)))
