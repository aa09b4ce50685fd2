"""What a run records from round to round: one array for each number, however long the run is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import PyTree


class Joined:
    """Trees of arrays of one structure, joined along an axis as they come.

    Args:
        axis: along which leaves are joined; in all others they are equal.

    >>> joined = Joined(axis=1)
    >>> for n in (1, 2):
    ...     joined.add({"a": np.full((2, n), n)})
    >>> joined.tree()["a"].tolist()
    [[1, 2, 2], [1, 2, 2]]
    """

    def __init__(self, axis: int = 0) -> None:
        self._axis, self._length = axis, 0
        self._structure: Any = None
        self._buffers: list[NDArray[Any]] = []

    def __len__(self) -> int:
        return self._length

    def add(self, tree: PyTree) -> None:
        """Copies the leaves of a tree to the end."""
        leaves, self._structure = jax.tree.flatten(tree)
        new = [np.asarray(leaf) for leaf in leaves]
        begin, end = self._length, self._length + new[0].shape[self._axis]
        if not self._buffers:
            self._buffers = [np.empty_like(a) for a in new]
        if end > self._buffers[0].shape[self._axis]:  # twice the room: each is copied once or twice
            self._buffers = [self._resized(a, begin, 2 * end) for a in self._buffers]
        for buffer, a in zip(self._buffers, new, strict=True):
            buffer[self._part(begin, end)] = a
        self._length = end

    def pop(self) -> None:
        """Drops the last entry."""
        self._length -= 1

    def tree(self) -> Any:
        """Returns views of all entries so far, which later ones do not change."""
        part = self._part(0, self._length)
        return jax.tree.unflatten(self._structure, [a[part] for a in self._buffers])

    def _part(self, begin: int, end: int) -> tuple[slice, ...]:
        return (*(slice(None),) * self._axis, slice(begin, end))

    def _resized(self, old: NDArray[Any], kept: int, room: int) -> NDArray[Any]:
        shape = [*old.shape]
        shape[self._axis] = room
        buffer = np.empty(shape, old.dtype)
        buffer[self._part(0, kept)] = old[self._part(0, kept)]
        return buffer


class Evaluations(Sequence[Any]):
    """The evaluations of a run (:class:`fedjax_sim.Evaluation`), made of arrays when read."""

    def __init__(self, evaluations: Iterable[Any] = ()) -> None:
        self._joined = Joined()
        self._others: list[dict[str, Any]] = []  # what is not a number, or not in each of them
        for evaluation in evaluations:
            self.append(evaluation)

    def append(self, evaluation: Any) -> None:
        """Adds the next one."""
        none = dict.fromkeys(("recorded", "uncollected", "before"))
        self._others.append({name: getattr(evaluation, name) for name in none})
        numbers = evaluation._replace(**none)
        self._joined.add(jax.tree.map(lambda a: np.asarray(a)[None], numbers))

    def pop(self) -> None:
        """Drops the last one."""
        self._joined.pop()
        self._others.pop()

    def stacked(self) -> Any:
        """Returns one evaluation whose arrays are those of all E, ``[E, ...]``."""
        return self._joined.tree()

    def __len__(self) -> int:
        return len(self._others)

    def __getitem__(self, place: Any) -> Any:
        """Returns the evaluation at a place, or a list of some."""
        if isinstance(place, slice):
            return [self[i] for i in range(len(self))[place]]
        i = range(len(self))[place]
        found = jax.tree.map(lambda a: a[i], self.stacked())
        plain = {"round": int(found.round), "wall_seconds": float(found.wall_seconds)}
        return found._replace(**plain, **self._others[i])


class History(NamedTuple):
    """What a run has recorded.

    Attributes:
        evaluations: so far.
        metrics: of the rounds so far, ``[R, rounds, ...]``.
    """

    evaluations: Evaluations
    metrics: Joined


def column(evaluations: Sequence[Any], part: Callable[[Any], Any]) -> NDArray[Any]:
    """Returns a number of all evaluations, ``[E, ...]``.

    Args:
        evaluations: in order.
        part: returns it of one evaluation, or of all in one.
    """
    if isinstance(evaluations, Evaluations):
        return np.asarray(part(evaluations.stacked()))
    return np.stack([part(evaluation) for evaluation in evaluations])
