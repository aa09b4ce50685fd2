"""Checks and conversions of arrays that users pass in."""

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.base.words import array_type

OFFSET = 8.0
"""Columns are centred only if their mean is at least this many standard deviations from 0."""


def plain_array(name: str, values: Any) -> NDArray[Any]:
    """Returns ``np.asarray(values)``; raises ValueError for masked values, as it drops the mask."""
    masked = np.sum(np.ma.getmaskarray(values)) if isinstance(values, np.ma.MaskedArray) else 0
    if masked:
        raise ValueError(
            f"{name} must have no masked values, got {masked}: drop those rows, or fill them in "
            f"with {name}.filled(...)"
        )
    return np.asarray(values)


def check_int32(name: str, values: NDArray[Any]) -> None:
    """Raises ValueError if integers exceed int32, beyond which JAX wraps them around.

    >>> check_int32("x", np.array([2**33]))
    Traceback (most recent call last):
    ValueError: x must be within int32, got 8589934592 to 8589934592
    """
    wide = values.dtype.kind in "iu" and not np.can_cast(values.dtype, np.int32) and values.size
    if wide and not -(2**31) <= values.min() <= values.max() < 2**31:
        raise ValueError(f"{name} must be within int32, got {values.min()} to {values.max()}")


def flags(name: str, values: ArrayLike, length: int) -> NDArray[np.bool_]:
    """Returns the argument ``name`` as ``bool[length]``; raises ValueError if it is not boolean."""
    array = plain_array(name, values)
    if array.shape != (length,) or array.dtype != bool:
        raise ValueError(f"{name} must be bool [{length}], got {array_type(array)}")
    return array


def encode(name: str, values: ArrayLike, samples: int) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """Returns the rank of each value among the unique values, and the unique values as text."""
    array = plain_array(name, values)
    if array.shape != (samples,):
        raise ValueError(f"{name} must have shape [{samples}], got {list(array.shape)}")
    if array.dtype.kind == "O" and all(isinstance(v, str) for v in array):
        array = array.astype(np.str_)
    if array.dtype.kind not in "biufUS" or (array.dtype.kind == "f" and np.isnan(array).any()):
        kinds = sorted({type(value).__name__ for value in array.tolist()})
        got = "NaN" if array.dtype.kind == "f" else ", ".join(kinds)
        raise ValueError(f"{name} must be a number or a text for every sample, got {got}")
    unique, codes = np.unique(array, return_inverse=True)
    return codes.astype(np.int32), tuple(map(str, unique))


def offset(values: NDArray[Any]) -> float:
    """Returns the constant to subtract before a conversion to float32 that would merge values.

    Large values that are close to each other, such as Unix times, become equal in float32. The
    offset is their mean, rounded to within a twentieth of the standard deviation; it is 0 if no
    values merge, or if the mean is less than 8 standard deviations from 0.

    >>> offset(np.array([1.7e9, 1.7e9 + 1, 1.7e9 + 2])), offset(np.array([0.5, 1e9]))
    (1700000001.0, 0.0)
    """
    if np.can_cast(values.dtype, np.float32):
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        mean, std = values.mean(dtype=np.float64), values.std(dtype=np.float64)
        if not abs(mean) >= OFFSET * std > 0:
            return 0.0
        rounded = np.unique(values.astype(np.float32))
    if len(rounded) == len(np.unique(values)):
        return 0.0
    return round(float(mean), 1 - math.floor(math.log10(std)))
