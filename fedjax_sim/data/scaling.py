"""Mean and standard deviation of inputs."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def statistics(
    x: NDArray[Any], numeric: NDArray[np.bool_] | None = None
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The mean and standard deviation along the last axis.

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
    mean, std = np.zeros(x.shape[-1]), np.ones(x.shape[-1])
    for c in range(x.shape[-1]) if numeric is None else np.flatnonzero(numeric):
        # One column at a time: a float64 copy of the whole table would double its memory twice.
        mean[c], std[c] = x[..., c].mean(dtype=np.float64), x[..., c].std(dtype=np.float64)
    return mean.astype(np.float32), np.where(std == 0, 1, std).astype(np.float32)


def channel_statistics(
    x: NDArray[np.uint8],
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The mean and standard deviation of every channel.

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
