"""What is learnt: the kind of targets, their loss and their scores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from numpy.typing import NDArray

from fedjax_sim.base.arrays import Array, PyTree
from fedjax_sim.base.brief import brief_fields
from fedjax_sim.base.model import LossFn
from fedjax_sim.base.parts import Origin, shown

_F = TypeVar("_F", bound=Callable[..., Any])


class Metric(NamedTuple):
    """How a score is read.

    Attributes:
        best: which value is the best.
        percent: whether it is a share, which tables and pictures show in percent.
    """

    best: Literal["highest", "lowest"] = "highest"
    percent: bool = False


class Sums(NamedTuple):
    """What the scores of G groups of samples are made of.

    Attributes:
        loss: ``f32[G]``, the loss of every sample times its weight.
        weight: ``[G]``, the weights: how many samples, or tokens.
        own: the task's, what its ``sums`` gives.
    """

    loss: Any
    weight: Any
    own: Any

    def __repr__(self) -> str:
        return brief_fields(self)


class OutputShape(Protocol):
    """The shape of a model's output for one sample."""

    def __call__(self, target: tuple[int, ...], /) -> tuple[int, ...]:
        """``target`` is the shape of one sample's y, which ``check`` has accepted."""


class CheckTargets(Protocol):
    """Refuses targets that the task does not have."""

    def __call__(self, name: str, y: Any, /) -> None:
        """Raises ValueError, which begins with ``name``, if ``y [n, ...]`` does not fit."""


class Answers(Protocol):
    """What is kept of every sample until all are known."""

    def __call__(self, outputs: Array, y: Array, /) -> PyTree:
        """``[B, *output]``, ``[B, *target]`` -> leaves ``[B, ...]``."""


class SumsOf(Protocol):
    """Reduces what was kept of the samples of each group."""

    def __call__(self, answers: PyTree, y: Array, group: Array, groups: int, /) -> PyTree:
        """Returns leaves ``[G, ...]``.

        Args:
            answers: leaves ``[n, ...]``.
            y: ``[n, *target]``.
            group: ``int32[n]``, from 0; samples of groups from G on are not counted.
            groups: G.
        """


class ScoresOf(Protocol):
    """Makes scores of sums."""

    def __call__(self, sums: Sums, /) -> Mapping[str, NDArray[Any]]:
        """NumPy leaves ``[..., *]``, any leading axes -> ``f64[...]`` by name, NaN if unknown."""


class SampleWeight(Protocol):
    """How much each sample counts in the mean loss of a set."""

    def __call__(self, y: Array, /) -> Array:
        """``[n, *target]`` -> ``[n]``."""


class Task(NamedTuple):
    """What y is, and what a model's outputs are scored by; :mod:`fedjax_sim.tasks` makes them.

    Attributes:
        name: what messages call it if it has no origin.
        outputs: the number of outputs that a model's factory is asked for.
        loss: of each sample.
        shape: of the outputs.
        check: of the targets.
        answers: what is kept of a sample.
        sums: what becomes of that, by group: all samples are one group, and so are each client's.
        scores: what is read off the sums; the mean loss is a score of every task.
        metrics: how each score is read.
        score: the one that leads: tables show it, and the best round is chosen by it.
        classes: M, if y are class labels, ``int32[n]``; else None.
        weight: of each sample in the mean loss of a set; None: all count alike.
        most: samples of a set that it can count; None: any number.
        origin: the call that made it.
    """

    name: str
    outputs: int
    loss: LossFn
    shape: OutputShape
    check: CheckTargets
    answers: Answers
    sums: SumsOf
    scores: ScoresOf
    metrics: Mapping[str, Metric]
    score: str
    classes: int | None = None
    weight: SampleWeight | None = None
    most: int | None = None
    origin: Origin | None = None

    def __repr__(self) -> str:
        return self.name if self.origin is None else shown(self)


def for_classes(factory: _F) -> _F:
    """Marks a function that makes a part which reads class labels; put it below ``@part``.

    A run of another task with such a part is refused.
    """
    factory.for_classes = True  # type: ignore[attr-defined]
    return factory
