"""What a data set is, in a few lines: task, inputs, classes, clients, and what loading did."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim.base.words import counted, percent, shortened
from fedjax_sim.data.dataset import Dataset

WIDTH = 100
LISTED = 6
"""Classes that are listed one by one; of more, the extremes."""


class DataSummary(NamedTuple):
    """What a data set is; :func:`summary` makes it.

    Attributes:
        name: of the data set.
        samples: how many it has to train on, and to test.
        inputs: dtype and shape of one input.
        task: what is learnt.
        reason: the form of the targets, from which the task follows.
        classes: training and test samples of each class by its name; empty without classes.
        clients: who trains.
        scored: on which samples, in words.
        notes: what loading guessed, converted or dropped, a sentence each.
    """

    name: str
    samples: tuple[int, int]
    inputs: str
    task: str
    reason: str
    classes: Mapping[str, tuple[int, int]]
    clients: str
    scored: str
    notes: tuple[str, ...]

    @property
    def lone(self) -> Mapping[str, Mapping[str, float]]:
        """The classes that one set alone has, "training" or "test", and their share of it."""
        found: dict[str, dict[str, float]] = {}
        for k, part in enumerate(("training", "test")):
            alone = {name: n[k] for name, n in self.classes.items() if n[k] and not n[1 - k]}
            if alone and all(self.samples):
                found[part] = {name: n / self.samples[k] for name, n in alone.items()}
        return found

    def text(self) -> str:
        """The summary in a line for each subject; long ones are wrapped."""
        return "\n".join(
            textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
            for line in self._lines()
        )

    def as_dict(self) -> dict[str, Any]:
        """All of it by name, for a JSON file."""
        return {**self._asdict(), "classes": dict(self.classes), "lone_classes": self.lone}

    def _lines(self) -> Iterator[str]:
        train, test = (f"{n:,}" for n in self.samples)
        yield f"{self.name}: {train} training and {test} test samples, {self.inputs}"
        yield f"task: {self.task}, as {self.reason}"
        if self.classes:
            yield f"classes: {self._counts()}"
        for part, shares in self.lone.items():
            told = [f"{name!r} ({percent(share)} of it)" for name, share in shares.items()]
            yield f"only the {part} set has: {shortened(told, 5)}"
        yield f"clients: {self.clients}"
        yield f"scored: {self.scored}"
        if self.notes:
            yield f"loading: {shortened(self.notes, 5)}"

    def _counts(self) -> str:
        if len(self.classes) <= LISTED:
            each = (f"{name} {train:,} + {test:,}" for name, (train, test) in self.classes.items())
            return f"{', '.join(each)} (training + test samples)"
        low, high = np.min([*self.classes.values()], 0), np.max([*self.classes.values()], 0)
        train, test = (f"{a:,} to {b:,}" for a, b in zip(low, high, strict=True))
        return f"{len(self.classes)}, of {train} training and {test} test samples each"


def summary(dataset: Dataset) -> DataSummary:
    """Summarises a data set: what its files were taken to mean.

    Args:
        dataset: any data set.

    Returns:
        The summary; its ``text()`` is for the terminal.

    Example:
        >>> from fedjax_sim.data import from_arrays
        >>> test = [False] * 3 + [True] * 2
        >>> mine = from_arrays("mine", np.eye(5), [0, 1, 1, 1, 2], test=test, client=list("aabab"))
        >>> print(summary(mine).text())
        mine: 3 training and 2 test samples, float32 [5]
        task: classification(3), as y is an integer from 0 to 2
        classes: 0 1 + 0, 1 2 + 1, 2 0 + 1 (training + test samples)
        only the training set has: '0' (33 % of it)
        only the test set has: '2' (50 % of it)
        clients: 2 natural ones in the training set, 2 in the test set
        scored: on the test set
    """
    x = dataset.train_x
    return DataSummary(
        name=dataset.name,
        samples=(len(dataset.train_y), len(dataset.test_y)),
        inputs=f"{x.dtype} {list(x.shape[1:])}",
        task=repr(dataset.task),
        reason=_reason(dataset),
        classes=_classes(dataset),
        clients=_owners(dataset),
        scored=f"on {dataset.test_set}",
        notes=dataset.notes,
    )


def _reason(dataset: Dataset) -> str:
    y, task = dataset.train_y, dataset.task
    if task.classes is not None:
        if dataset.class_names:
            return f"y is one of {task.classes} named classes"
        return f"y is an integer from 0 to {task.classes - 1}"
    each = "one" if y.ndim == 1 else " x ".join(map(str, y.shape[1:]))
    kind = {"f": "number", "b": "yes or no", "i": "integer", "u": "integer"}[y.dtype.kind]
    return f"y is {each} {kind}{'s' * (y.ndim > 1 and y.dtype.kind != 'b')} a sample"


def _classes(dataset: Dataset) -> dict[str, tuple[int, int]]:
    classes = dataset.task.classes
    if classes is None:
        return {}
    names: Sequence[str] = dataset.class_names or [str(y) for y in range(classes)]
    train, test = (np.bincount(y, minlength=classes) for y in (dataset.train_y, dataset.test_y))
    return dict(zip(names, zip(train.tolist(), test.tolist(), strict=True), strict=True))


def _owners(dataset: Dataset) -> str:
    if dataset.train_client is None:
        return "the data name none"
    owners = counted(np.unique(dataset.train_client).size, "natural one")
    if dataset.test_client is None:
        return f"{owners}; the test samples have none"
    return f"{owners} in the training set, {np.unique(dataset.test_client).size} in the test set"
