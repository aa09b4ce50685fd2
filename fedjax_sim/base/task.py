"""The kind of targets, their loss and their scores."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from numpy.typing import NDArray

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.brief import brief_fields
from fedjax_sim.base.model import LossFn
from fedjax_sim.base.parts import Part

_F = TypeVar("_F", bound=Callable[..., Any])


class Metric(NamedTuple):
    """How to read a score.

    Attributes:
        best: whether the highest or the lowest value is best.
        percent: whether it is a fraction, which tables and figures show in percent.
    """

    best: Literal["highest", "lowest"] = "highest"
    percent: bool = False


class Sums(NamedTuple):
    """Sums over G groups of samples, from which scores are computed.

    Attributes:
        loss: ``f32[G]``, the sum of loss times weight.
        weight: ``[G]``, the sum of weights: the number of samples, or of tokens.
        own: what ``Task.sums`` returns.
    """

    loss: Any
    weight: Any
    own: Any

    def __repr__(self) -> str:
        return brief_fields(self)


SampleWeight: TypeAlias = Callable[[Array], Array]
"""Maps targets ``[n, *target]`` to the weights of samples in the mean loss of a set, ``[n]``."""


class Task(Part):
    """The kind of targets, their loss and their scores, as in :mod:`fedjax_sim.tasks`."""

    @property
    def outputs(self) -> int:
        """The number of outputs that a model needs."""
        raise NotImplementedError

    def loss(self, outputs: Array, y: Array, /) -> Array:
        """Returns the loss of each sample, ``[B, *output]``, ``[B, *target]`` -> ``f32[B]``."""
        raise NotImplementedError

    def shape(self, target: tuple[int, ...], /) -> tuple[int, ...]:
        """Returns the shape of the output for one sample whose y has the shape ``target``."""
        return (self.outputs,)

    def check(self, name: str, y: Any, /) -> None:
        """Raises ValueError, beginning with ``name``, if targets ``y [n, ...]`` do not fit."""

    def answers(self, outputs: Array, y: Array, /) -> PyTree:
        """Returns the values that are stored per sample until ``sums``: leaves ``[B, ...]``."""
        raise NotImplementedError

    def sums(self, answers: PyTree, y: Array, group: Array, groups: int, /) -> PyTree:
        """Returns sums over the samples of each group, leaves ``[G, ...]``.

        All samples together are one group, and so are the samples of each client.

        Args:
            answers: leaves ``[n, ...]``.
            y: ``[n, *target]``.
            group: ``int32[n]``, from 0; samples of groups from G on are not counted.
            groups: G.
        """
        raise NotImplementedError

    def scores(self, sums: Sums, /) -> Mapping[str, NDArray[Any]]:
        """Returns scores ``f64[...]`` by name, NaN if unknown, for NumPy leaves ``[..., *]``."""
        raise NotImplementedError

    @property
    def metrics(self) -> Mapping[str, Metric]:
        """How to read each score; the mean loss is a score of every task and not listed."""
        raise NotImplementedError

    @property
    def score(self) -> str:
        """The leading score, which tables show and which selects the best round."""
        return next(iter(self.metrics))

    @property
    def on_request(self) -> Mapping[str, Task]:
        """The scores that are not computed by default, each with the task that computes it."""
        return {}

    @property
    def classes(self) -> int | None:
        """M, if y are class labels, ``int32[n]``; else None."""
        return None

    @property
    def weight(self) -> SampleWeight | None:
        """Weights samples in the mean loss of a set; None: all count equally."""
        return None

    @property
    def most(self) -> int | None:
        """The largest number of samples that it can count; None: any number."""
        return None


class with_loss(Task):
    """A task with another loss in the scores."""

    task: Task
    loss: LossFn

    def __repr__(self) -> str:
        return repr(self.task)


for _hook in {name for name in vars(Task) if name[0] != "_"} - {"loss"}:
    setattr(with_loss, _hook, property(operator.attrgetter(f"task.{_hook}")))


def for_classes(factory: _F) -> _F:
    """Marks a part that reads class labels; put it above its class, or below ``@part``.

    A run of another task with such a part is rejected.
    """
    factory.for_classes = True  # type: ignore[attr-defined]
    return factory
