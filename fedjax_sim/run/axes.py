"""The axis of runs: seeds, or seeds and folds, trained as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from fedjax_sim.base import Array, ClientData, FedState
from fedjax_sim.data import EvalSet


@dataclasses.dataclass(frozen=True)
class RunAxes:
    """Which arrays have an axis of R runs in front, as prefixes of a vmap.

    Attributes:
        runs: R.
        data: of the clients: the samples are common to all runs, their partition may be.
        sets: of each evaluation set.
        state: of the state: the number of the round is common to all runs. Unbatched, it keeps
          branches on it real branches.
    """

    runs: int
    data: Any
    sets: tuple[Any, ...]
    state: FedState

    @classmethod
    def of(cls, data: ClientData, sets: tuple[EvalSet, ...], runs: int) -> RunAxes:
        """The axes of these arrays, which have R runs or none."""
        axes: list[Any] = [0 if name != "round" else None for name in FedState._fields]
        return cls(runs, client_axes(data), tuple(map(set_axes, sets)), FedState(*axes))

    def map(self, fn: Callable[..., Any], in_axes: Any, out_axes: Any = 0) -> Callable[..., Any]:
        """vmap; for one run no vmap, which would turn branches on the data into selects."""
        if self.runs > 1:
            return jax.vmap(fn, in_axes=in_axes, out_axes=out_axes)

        def only(*args: Any) -> Any:
            inner = (first_run(x, a) for x, a in zip(args, in_axes, strict=True))
            return _change(lambda a: a[None], fn(*inner), out_axes)

        return only


def first_run(arrays: Any, axes: Any) -> Any:
    """The first run of what has an axis of runs, by the prefix ``axes``."""
    return one_run(arrays, axes, 0)


def one_run(arrays: Any, axes: Any, run: int) -> Any:
    """That run of what has an axis of runs, by the prefix ``axes``."""
    return _change(lambda a: a[run], arrays, axes)


def repeated(arrays: Any, axes: Any, times: int) -> Any:
    """What has an axis of runs, by the prefix ``axes``, with all its runs so many times."""

    def again(a: Array) -> Any:
        return np.concatenate([np.asarray(a)] * times)

    return _change(again, arrays, axes)


def set_axes(examples: EvalSet) -> Any:
    """The prefix of an evaluation set."""
    return _prefix(examples, index=_axis(examples.index), start=_axis(examples.start))


def client_axes(data: ClientData) -> Any:
    """The prefix of the clients' data."""
    own = _axis(data.start)
    seen = data.relabel is not None and data.relabel.ndim == 3
    return _prefix(
        data,
        index=None,
        owner=None,
        start=own,
        budget=own,
        root=own,
        sent=own,
        relabel=0 if seen else None,
        at=own,
        held=None,
    )


def _prefix(arrays: Any, **axes: int | None) -> Any:
    return dataclasses.replace(arrays, x=None, y=None, **axes)


def _axis(integers: Array) -> int | None:
    return None if integers.ndim == 1 else 0


def _change(change: Callable[[Array], Array], tree: Any, axes: Any) -> Any:
    """Changes the leaves of ``tree`` whose entry in the prefix ``axes`` is 0."""

    def subtree(axis: int | None, part: Any) -> Any:
        return part if axis is None else jax.tree.map(change, part)

    return jax.tree.map(subtree, axes, tree, is_leaf=lambda a: a is None)
