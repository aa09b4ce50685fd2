"""Targets of a data set: their dtype, their task, and the names of their classes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Task
from fedjax_sim.base.words import shortened
from fedjax_sim.data.categories import numbers_or_texts
from fedjax_sim.data.masked import check_int32
from fedjax_sim.data.scaling import offset
from fedjax_sim.tasks import classification, multi_label, regression, task_of

KINDS = ("classification", "regression", "multi_label")


class Targets(NamedTuple):
    """Targets as the engine takes them.

    Attributes:
        y: in the dtype of the task.
        task: what is learnt.
        class_names: of the M classes; () if they have none.
    """

    y: NDArray[Any]
    task: Task
    class_names: tuple[str, ...]


def read_targets(
    y: NDArray[Any],
    samples: int,
    classes: int | None,
    task: Task | str | None,
    names: tuple[str, ...] = (),
) -> Targets:
    """Returns targets in the dtype that the engine has, and their task.

    Args:
        y: the targets; texts are the names of classes.
        samples: how many there must be.
        classes: M, if it is known.
        task: what is learnt, or its kind, a text of ``KINDS``; None: what y says.
        names: of the classes; () if they are not known.

    Raises:
        ValueError: if they are no targets of the task, or may be targets of two tasks.
    """
    classes = len(names) or None if classes is None else classes
    if isinstance(task, Task):
        if classes not in (None, task.classes):
            raise ValueError(f"classes must be those of the task, {task!r}, got {classes}")
        made = as_targets(y, samples)
        task.check("y", made)
        return Targets(made, task, names)
    if task is not None and task not in KINDS:
        raise ValueError(f"task must be a Task or one of {', '.join(KINDS)}, got {task!r}")
    if task in ("regression", "multi_label") and classes is not None:
        raise ValueError(f"classes must not be given for task={task}, got {classes}")
    if y.dtype.kind == "O" and all(isinstance(value, str) for value in y.flat):
        y = y.astype(np.str_)
    if y.dtype.kind == "U" and y.shape == (samples,) and task in (None, "classification"):
        names = names or tuple(map(str, np.unique(numbers_or_texts(y))))
        if classes not in (None, len(names)):
            raise ValueError(f"classes must be {len(names)}, as many as y has names, got {classes}")
        y, classes = codes_of(y, names), len(names)
    if task is None and classes is None and y.shape[:1] == (samples,):
        guessed = task_of(y)
        if guessed is None:
            labels = _labels(y, samples, None)
            guessed = classification(_number_of_classes(labels))
        return Targets(as_targets(y, samples), guessed, names)
    if task == "regression":
        made = as_targets(_column(y).astype(np.float64) if y.dtype.kind in "biu" else y, samples)
        found: Task = regression(1 if y.ndim == 1 else y.shape[1])
    elif task == "multi_label":
        if y.ndim != 2 or y.dtype.kind not in "biuf" or not np.isin(y, (0, 1)).all():
            raise ValueError(
                f"y must be 0 and 1, [{samples}, L], as task=multi_label, got {y.dtype} "
                f"{list(y.shape)}"
            )
        made, found = y.astype(bool), multi_label(y.shape[1])
    else:
        one_hot = y.ndim == 2 and y.shape[1] > 1 and np.isin(y, (0, 1)).all()
        if one_hot and (y.sum(axis=1) == 1).all():
            classes = y.shape[1] if classes is None else classes
            y = y.argmax(axis=1)
        made = _labels(_column(y), samples, classes)
        found = classification(_number_of_classes(made) if classes is None else classes)
    found.check("y", made)
    return Targets(made, found, names)


def codes_of(y: NDArray[np.str_], names: Sequence[str]) -> NDArray[np.int64]:
    """Returns the place of each text among the names.

    Raises:
        ValueError: if a text is not one of them.

    >>> codes_of(np.array(["cat", "ant"]), ("ant", "bee", "cat")).tolist()
    [2, 0]
    """
    place = {name: i for i, name in enumerate(names)}
    different, inverse = np.unique(y, return_inverse=True)
    unknown = [str(value) for value in different if value not in place]
    if unknown:
        raise ValueError(
            f"y must be names of classes, {shortened(list(names))}, got {shortened(unknown)}"
        )
    return np.array([place[str(value)] for value in different], np.int64)[inverse]


def _column(y: NDArray[Any]) -> NDArray[Any]:
    """Returns ``[n]`` of ``[n, 1]``."""
    return y[:, 0] if y.shape[1:] == (1,) else y


def _labels(y: NDArray[Any], samples: int, classes: int | None) -> NDArray[np.int32]:
    """Returns class labels, which may be whole floats."""
    if y.dtype.kind == "f" and np.isfinite(y).all() and np.array_equal(y, np.round(y)):
        y = y.astype(np.int64)
    return class_labels(y, samples, classes)


def as_targets(y: NDArray[Any], samples: int, name: str = "y") -> NDArray[Any]:
    """Returns targets of any task: floats as float32, integers and bool ``[n]`` as class labels.

    Raises:
        ValueError: if they are not numbers, one row for each sample, integers ``[n]`` are no class
            labels, or different floats fall together in float32.

    >>> as_targets(np.array([[1.0], [2.5]]), 2).dtype, as_targets(np.array([3, 1]), 2).dtype
    (dtype('float32'), dtype('int32'))
    """
    if y.ndim == 1 and y.dtype.kind in "biu":
        return class_labels(y, samples, None, name)
    if y.shape[:1] != (samples,) or y.dtype.kind not in "biuf":
        raise ValueError(f"{name} must be numbers [{samples}, ...], got {y.dtype} {list(y.shape)}")
    if y.dtype.kind == "f":
        shift = offset(y)
        if shift:
            raise ValueError(
                f"{name} must have values that float32 tells apart, got {y.min()} to {y.max()}: "
                f"subtract a constant, such as {shift:.15g}"
            )
        with np.errstate(over="ignore"):
            return y.astype(np.float32, copy=False)
    check_int32(name, y)
    return y if y.dtype == bool else y.astype(np.int32, copy=False)


def class_labels(
    y: NDArray[Any], samples: int, classes: int | None, name: str = "y"
) -> NDArray[np.int32]:
    """The labels, if there is one in 0 … M - 1 for each sample.

    Args:
        y: the labels.
        samples: how many there must be.
        classes: M; None if any label from 0 that is an int32 will do.
        name: of the argument, for the message.

    Raises:
        ValueError: if labels are no integers, not one for each sample, or out of range.
    """
    if y.shape != (samples,) or y.dtype.kind not in "biu":
        raise ValueError(f"{name} must be integers [{samples}], got {y.dtype} {list(y.shape)}")
    if samples and (y.min() < 0 or y.max() >= (2**31 if classes is None else classes)):
        largest = "M - 1" if classes is None else classes - 1
        raise ValueError(f"{name} must be in 0 … {largest}, got {y.min()} … {y.max()}")
    return y.astype(np.int32, copy=False)


def _number_of_classes(labels: NDArray[np.int32]) -> int:
    """The largest label plus 1, if all from 0 occur: a stray label makes no million of classes."""
    different = np.unique(labels)
    largest = int(different[-1])
    if len(different) <= largest:
        absent = int(np.flatnonzero(different != np.arange(len(different)))[0])
        raise ValueError(
            f"y must have every class from 0 to its largest, {largest}, got none of class {absent}:"
            f" number the classes from 0, or give classes={largest + 1} (task=regression if they "
            "are numbers)"
        )
    return largest + 1


def of_each(task: Task) -> str:
    """What a share of the samples is taken of, in words: each class, if there are any."""
    return "" if task.classes is None else " of each class"


def strata(y: NDArray[Any], task: Task) -> NDArray[np.int32]:
    """The class of every sample, ``int32[n]``; of a task without classes all are of one.

    >>> from fedjax_sim import tasks
    >>> strata(np.array([0.5, 2.0]), tasks.regression()).tolist()
    [0, 0]
    """
    return np.zeros(len(y), np.int32) if task.classes is None else y
