"""What each client keeps, without a row for the clients that never trained."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from numpy.typing import DTypeLike, NDArray

from fedjax_sim.base import PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class ClientRows:
    """An array ``[R, N, *]`` whose clients have the same row until they train.

    NumPy takes it as an array: ``np.asarray`` makes all N rows. ``rows[run, client]`` makes one.

    Attributes:
        rows: ``[R, 1 + n, *]``: the row of the clients that never trained, then those of n others.
        row: ``int32[N]``, the row of each client.
    """

    rows: NDArray[Any]
    row: NDArray[np.int32]

    @property
    def shape(self) -> tuple[int, ...]:
        """R, N and the others."""
        return (len(self.rows), len(self.row), *self.rows.shape[2:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of the numbers."""
        return self.rows.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.rows.ndim

    @property
    def clients(self) -> NDArray[np.int32]:
        """``int32[n]``, the clients of the rows after the first."""
        owned = np.flatnonzero(self.row)
        found = np.empty(self.rows.shape[1] - 1, np.int32)
        found[self.row[owned] - 1] = owned
        return found

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Returns all N rows."""
        del copy  # NumPy's protocol: there is no array that could be shared
        return np.take(self.rows, self.row, axis=1).astype(dtype or self.dtype, copy=False)

    def __getitem__(self, key: Any) -> Any:
        """Returns the rows of some clients of a run, some runs, or what an array has there."""
        if isinstance(key, slice):
            return ClientRows(self.rows[key], self.row)
        if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], int | np.integer):
            return self.rows[key[0]][self.row[key[1]]]
        return np.asarray(self)[key]


def client_rows(array: Any, clients: NDArray[np.integer] | None = None, total: int = 0) -> Any:
    """Makes :class:`ClientRows` of an array.

    Args:
        array: ``[R, N, *]``; or the rows of :class:`ClientRows`.
        clients: of these rows after the first; None for an array ``[R, N, *]``.
        total: N, beside ``clients``.

    >>> found = client_rows(np.array([[0.0, 5.0]]), np.array([2]), 4)
    >>> np.asarray(found).tolist(), found[0, 2].tolist(), found.clients.tolist()
    ([[0.0, 0.0, 5.0, 0.0]], 5.0, [2])
    """
    if isinstance(array, ClientRows):
        return array
    if clients is None:
        clients, total = np.arange(array.shape[1]), array.shape[1]
        array = np.concatenate([np.zeros_like(array[:, :1]), array], axis=1)
    row = np.zeros(total, np.int32)
    row[clients] = np.arange(1, len(clients) + 1, dtype=np.int32)
    return ClientRows(array, row)


def with_all_rows(values: PyTree) -> Any:
    """Makes arrays of :class:`ClientRows`, as JAX's functions need them."""

    def whole(a: Any) -> Any:
        return np.asarray(a) if isinstance(a, ClientRows) else a

    return jax.tree.map(whole, values)
