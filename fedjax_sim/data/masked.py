"""Arrays as they are given: without a mask that NumPy drops, or integers that JAX wraps."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def plain_array(name: str, values: Any) -> NDArray[Any]:
    """Returns ``np.asarray(values)``, which has no masked values.

    Args:
        name: the argument's name, for the message.
        values: what a caller gave.

    Raises:
        ValueError: if values are masked, as ``np.asarray`` shows what lies under the mask.

    >>> plain_array("y", np.ma.masked_equal([0, 1, 9], 9))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: y must have no masked values, got 1: leave those rows out, or fill them in with ...
    """
    masked = np.sum(np.ma.getmaskarray(values)) if isinstance(values, np.ma.MaskedArray) else 0
    if masked:
        raise ValueError(
            f"{name} must have no masked values, got {masked}: leave those rows out, or fill them "
            f"in with {name}.filled(...)"
        )
    return np.asarray(values)


def check_int32(name: str, values: NDArray[Any]) -> None:
    """Raises ValueError if integers are beyond int32, in which JAX would wrap them around.

    >>> check_int32("x", np.array([2**33]))
    Traceback (most recent call last):
    ValueError: x must be within int32, got 8589934592 to 8589934592
    """
    wide = values.dtype.kind in "iu" and not np.can_cast(values.dtype, np.int32) and values.size
    if wide and not -(2**31) <= values.min() <= values.max() < 2**31:
        raise ValueError(f"{name} must be within int32, got {values.min()} to {values.max()}")
