"""Short summaries of a data set: task, inputs, classes, clients and conversions on loading."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim.base.words import counted, percent, shortened
from fedjax_sim.data.dataset import Dataset

WIDTH = 100
LISTED = 6
"""Largest number of classes to list one by one; beyond it, only the range of their sizes."""


class DataSummary(NamedTuple):
    """Summary of a data set, made by :func:`summary`.

    Attributes:
        name: name of the data set.
        samples: numbers of training and of test samples.
        inputs: dtype and shape of one input.
        task: the learning task.
        reason: the form of the targets, from which the task was inferred.
        classes: numbers of training and of test samples of each class, by name; empty without
            classes.
        clients: description of the training clients.
        scored: description of the scored samples.
        notes: sentences on what loading inferred, converted or dropped.
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
        """Classes that occur only in the "training" or the "test" set, and their share of it."""
        found: dict[str, dict[str, float]] = {}
        for k, part in enumerate(("training", "test")):
            alone = {name: n[k] for name, n in self.classes.items() if n[k] and not n[1 - k]}
            if alone and all(self.samples):
                found[part] = {name: n / self.samples[k] for name, n in alone.items()}
        return found

    def text(self) -> str:
        """Returns the summary as text, one wrapped line for each subject."""
        return "\n".join(
            textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
            for line in self._lines()
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields by name, for a JSON file."""
        return {**self._asdict(), "classes": dict(self.classes), "lone_classes": self.lone}

    def _lines(self) -> Iterator[str]:
        train, test = (f"{n:,}" for n in self.samples)
        yield f"{self.name}: {train} training and {test} test samples, {self.inputs}"
        yield f"task: {self.task}, as {self.reason}"
        if self.classes:
            yield f"classes: {self._counts()}"
        for part, shares in self.lone.items():
            names = [f"{name!r} ({percent(share)} of it)" for name, share in shares.items()]
            yield f"only the {part} set has: {shortened(names, 5)}"
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
    """Summarises how a data set was interpreted.

    Args:
        dataset: any data set.

    Returns:
        The summary; ``text()`` formats it for the terminal.

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
        reason=_describe_targets(dataset),
        classes=_count_classes(dataset),
        clients=_describe_clients(dataset),
        scored=f"on {dataset.test_set}",
        notes=dataset.notes,
    )


def _describe_targets(dataset: Dataset) -> str:
    y, task = dataset.train_y, dataset.task
    if task.classes is not None:
        none, n = int(np.sum(y < 0)), len(y)
        unlabelled = f"; {none:,} of {n:,} training samples have no label (-1)" if none else ""
        if dataset.class_names:
            return f"y is one of {task.classes} named classes{unlabelled}"
        return f"y is an integer from 0 to {task.classes - 1}{unlabelled}"
    each = "one" if y.ndim == 1 else " x ".join(map(str, y.shape[1:]))
    kind = {"f": "number", "b": "yes or no", "i": "integer", "u": "integer"}[y.dtype.kind]
    return f"y is {each} {kind}{'s' * (y.ndim > 1 and y.dtype.kind != 'b')} per sample"


def _count_classes(dataset: Dataset) -> dict[str, tuple[int, int]]:
    classes = dataset.task.classes
    if classes is None:
        return {}
    names: Sequence[str] = dataset.class_names
    if len({*names}) < classes:  # none, or one of two classes
        names = [str(y) for y in range(classes)]
    both = dataset.train_y, dataset.test_y
    # Without samples that have no label, or a backdoor's trigger.
    train, test = (np.bincount(y[(y >= 0) & (y < classes)], minlength=classes) for y in both)
    return dict(zip(names, zip(train.tolist(), test.tolist(), strict=True), strict=True))


def _describe_clients(dataset: Dataset) -> str:
    if dataset.train_client is None:
        return "none named in the data"
    clients = counted(np.unique(dataset.train_client).size, "natural one")
    if dataset.test_client is None:
        return f"{clients}; none for the test samples"
    return f"{clients} in the training set, {np.unique(dataset.test_client).size} in the test set"
