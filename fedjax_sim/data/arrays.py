"""Checks and conversions of arrays that users pass in."""

import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.base import PyTree
from fedjax_sim.base.arrays import is_array_like, named_leaves, one_array
from fedjax_sim.base.words import array_type


def plain_array(name: str, values: Any) -> NDArray[Any]:
    """Returns ``np.asarray(values)``, in native byte order, as JAX has no other.

    Raises ValueError for a pytree, and for masked values.
    """
    one_array(name, values)
    if masked := np.sum(np.ma.getmaskarray(values)) if np.ma.isMaskedArray(values) else 0:
        raise ValueError(
            f"{name} must have no masked values, got {masked}: drop those rows, or fill them in "
            f"with {name}.filled(...)"
        )
    try:
        array = np.asarray(values)
    except ValueError as error:  # rows of unequal lengths
        raise ValueError(
            f"{name} must have rows of one length, got lists of several: see fs.data.pad"
        ) from error
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def sample_arrays(name: str, values: PyTree, samples: int) -> PyTree:
    """Returns the NumPy arrays of the inputs x, one or a pytree, with a row for each sample.

    >>> sample_arrays("x", {"a": np.zeros((3, 2)), "b": np.zeros(2)}, 3)
    Traceback (most recent call last):
    ValueError: x['b'] and y must have as many rows, got 2 and 3
    """
    leaves = {leaf: plain_array(leaf, given) for leaf, given in named_leaves(name, values).items()}
    if not leaves:
        raise ValueError(f"{name} must have at least one array, got {values!r}")
    for leaf, array in leaves.items():
        if not array.ndim or not (jnp.issubdtype(array.dtype, np.number) or array.dtype == bool):
            hint = ": see fs.data.pad" if array.dtype == object else ""
            got = f"{array_type(array)}{hint}"
            raise ValueError(f"{leaf} must be numbers [{samples}, ...], got {got}")
        if len(array) != samples:
            raise ValueError(f"{leaf} and y must have as many rows, got {len(array)} and {samples}")
    return jax.tree.unflatten(jax.tree.structure(values, is_leaf=is_array_like), leaves.values())


def pad(sequences: Sequence[ArrayLike], length: int | None = None) -> dict[str, NDArray[Any]]:
    """Pads sequences of unequal lengths with zeros at their ends, and marks their entries.

    Args:
        sequences: n sequences, tokens ``int[T_i]`` or vectors ``[T_i, *feature]``.
        length: T, the length of all of them; None for the longest.

    Returns:
        ``{"values": [n, T, *feature], "mask": bool[n, T]}``, inputs x of
        :func:`fedjax_sim.client_data` or a part of them. The mask is False for padding.

    Raises:
        ValueError: if a sequence is longer than ``length``, or they cannot share an array.

    Example:
        >>> x = pad([[5, 7], [8], [6, 9, 4]])
        >>> x["values"].tolist()
        [[5, 7, 0], [8, 0, 0], [6, 9, 4]]
        >>> x["mask"].sum(axis=1).tolist()
        [2, 1, 3]
    """
    each = [np.atleast_1d(plain_array(f"sequences[{i}]", s)) for i, s in enumerate(sequences)]
    some = [a for a in each if len(a)]
    shapes = sorted({a.shape[1:] for a in some})
    if len(shapes) != 1:
        got = ", ".join(map(str, shapes)) or "no entry"
        raise ValueError(f"sequences must have entries of one shape, got {got}")
    entries = np.concatenate(some)
    sample_arrays("sequences", entries, len(entries))
    sizes = np.array([*map(len, each)])
    longest = sizes.max()
    if length is not None and longest > length:
        raise ValueError(
            f"length must be at least {longest}, the longest sequence, got {length}: to cut, give "
            f"[s[:{length}] for s in sequences]"
        )
    mask = np.arange(longest if length is None else length) < sizes[:, None]
    values = np.zeros((*mask.shape, *shapes[0]), entries.dtype)
    values[mask] = entries
    return {"values": values, "mask": mask}


def check_int32(name: str, values: NDArray[Any]) -> None:
    """Raises ValueError if integers exceed int32, beyond which JAX wraps them around."""
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
    alike = (all(isinstance(v, kind) for v in array) for kind in (str, numbers.Real))
    if array.dtype.kind == "O" and any(alike):  # as of pandas
        array = np.array(array.tolist())
    if array.dtype.kind not in "biufUS" or (array.dtype.kind == "f" and np.isnan(array).any()):
        kinds = sorted({type(value).__name__ for value in array.tolist()})
        got = "NaN" if array.dtype.kind == "f" else ", ".join(kinds)
        raise ValueError(f"{name} must be a number or a text for every sample, got {got}")
    unique, codes = np.unique(array, return_inverse=True)
    texts = (
        np.char.decode(unique, "utf-8", "backslashreplace") if unique.dtype.kind == "S" else unique
    )
    return codes.astype(np.int32), tuple(map(str, texts))
