"""Results of the programs of a run, and their records over the rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Array, FedState, Metrics, PyTree, Variables
from fedjax_sim.run.metrics import Counts


class Run(NamedTuple):
    """All R runs between two programs: ``keys key[R]`` and their state."""

    keys: Array
    state: FedState


class SetCounts(NamedTuple):
    """Counts of an evaluation, ``[R, ...]``.

    Attributes:
        sets: counts of the server model on each evaluation set.
        personal: counts of each client's personal model on the first set; None without them.
        personal_validation: the same on the second set; None if it has other clients.
    """

    sets: tuple[Counts, ...]
    personal: Counts | None = None
    personal_validation: Counts | None = None


class EvaluatedModels(NamedTuple):
    """Models that an evaluation scores, ``[R, ...]``.

    Attributes:
        variables: the models for the evaluation sets.
        personal: counts of the personal models on each set of the clients, which only the algorithm
          can compute; None without them.
    """

    variables: Variables
    personal: tuple[Counts, ...] | None


class Collected(NamedTuple):
    """The final models, after models in flight were collected; ``[R, ...]``."""

    variables: Variables  # the final models
    uploads: Array  # int32[R], models that were sent for it
    counts: SetCounts  # counts of the final models


class Interval(NamedTuple):
    """The rounds between two evaluations that are done so far.

    Attributes:
        metrics: ``[R, rounds]``, NumPy.
        scored: counts of the models after the rounds; None before the evaluation.
        run: the run after the rounds; None for a restored interval that was not the last.
        collected: the final models after the last round if models were in flight or the algorithm
            has a finish; else None.
        recorded: the result of ``record`` for the state.
        wall: seconds until the evaluation; only for restored intervals.
    """

    metrics: Metrics
    scored: SetCounts | None
    run: Run | None
    collected: Collected | None = None
    recorded: PyTree = None
    wall: float | None = None

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return self.metrics.loss.shape[1]


class TreeBuffer:
    """A growing tree of arrays, to which trees of the same structure are appended.

    Args:
        axis: the axis along which leaves are appended; all other axes are equal.

    >>> buffer = TreeBuffer(axis=1)
    >>> for n in (0, 1, 2):
    ...     buffer.add({"a": np.full((2, n), n)})
    >>> buffer.tree()["a"].tolist()
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
        room = self._buffers[0].shape[self._axis]
        if end > room:  # doubled: each entry is copied once or twice
            more = 2 * end - room
            self._buffers = [
                np.pad(a, [(0, more * (i == self._axis)) for i in range(a.ndim)])
                for a in self._buffers
            ]
        for buffer, a in zip(self._buffers, new, strict=True):
            buffer[self._slice(begin, end)] = a
        self._length = end

    def pop(self) -> None:
        """Drops the last entry."""
        self._length -= 1

    def tree(self) -> Any:
        """Returns views of all entries so far; later entries do not change them."""
        entries = self._slice(0, self._length)
        return jax.tree.unflatten(self._structure, [a[entries] for a in self._buffers])

    def _slice(self, begin: int, end: int) -> tuple[slice, ...]:
        return (*(slice(None),) * self._axis, slice(begin, end))


def work_of(metrics: Metrics) -> dict[str, Any]:
    """Returns the samples, steps and executed steps of all rounds and runs, by name."""
    names = ("samples", "steps", "executed")
    return {name: int(getattr(metrics, name).sum(dtype=np.int64)) for name in names}


class Evaluations(Sequence[Any]):
    """The evaluations of a run (:class:`fedjax_sim.Evaluation`), stored as stacked arrays."""

    def __init__(self, evaluations: Iterable[Any] = ()) -> None:
        self._numbers = TreeBuffer()
        self._others: list[dict[str, Any]] = []  # fields that are not arrays, or not always there
        for evaluation in evaluations:
            self.append(evaluation)

    def append(self, evaluation: Any) -> None:
        """Adds the next evaluation."""
        none = dict.fromkeys(("recorded", "uncollected", "before"))
        self._others.append({name: getattr(evaluation, name) for name in none})
        numbers = evaluation._replace(**none)
        self._numbers.add(jax.tree.map(lambda a: np.asarray(a)[None], numbers))

    def pop(self) -> None:
        """Drops the last evaluation."""
        self._numbers.pop()
        self._others.pop()

    def stacked(self) -> Any:
        """Returns one evaluation with the arrays of all E evaluations, ``[E, ...]``."""
        return self._numbers.tree()

    def __len__(self) -> int:
        return len(self._others)

    def __getitem__(self, place: Any) -> Any:
        """Returns one evaluation, or a list for a slice."""
        if isinstance(place, slice):
            return [self[i] for i in range(len(self))[place]]
        i = range(len(self))[place]
        found = jax.tree.map(lambda a: a[i], self.stacked())
        plain = {"round": int(found.round), "wall_seconds": float(found.wall_seconds)}
        return found._replace(**plain, **self._others[i])


def column(evaluations: Sequence[Any], part: Callable[[Any], Any]) -> NDArray[Any]:
    """Returns one number of all evaluations, ``[E, ...]``."""
    if isinstance(evaluations, Evaluations):
        return np.asarray(part(evaluations.stacked()))
    return np.stack([part(evaluation) for evaluation in evaluations])
