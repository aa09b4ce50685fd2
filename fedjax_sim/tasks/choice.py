"""The task of given targets, and the scores of a task."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Task
from fedjax_sim.base.words import array_type
from fedjax_sim.tasks._multi_label import multi_label
from fedjax_sim.tasks._regression import regression

MOST_CLASSES = 100
"""The number of different whole numbers up to which floats may be labels."""


def task_of(y: NDArray[Any]) -> Task | None:
    """Returns the task of targets by their dtype and shape; None for class labels.

    Args:
        y: ``[n, ...]``. Floats ``[n]`` or ``[n, D]`` are :func:`regression`; bool, or integers 0
            and 1, ``[n, L]`` are :func:`multi_label`; integers and bool ``[n]`` are class labels,
            whose number of classes is not known from y alone.

    Raises:
        ValueError: if y fits no task, or several: floats with at most 100 different whole numbers,
            one-hot rows, one column of labels.

    Example:
        >>> task_of(np.array([0.5, 2.0])), task_of(np.array([[1, 1, 0], [0, 1, 0]]))
        (regression(), multi_label(3))
        >>> task_of(np.arange(3)) is None
        True
    """
    kind, flat, column = y.dtype.kind, y.ndim == 1, y.shape[1:] == (1,)
    if kind in "biu" and flat:
        return None
    known = kind in "biuf" and y.ndim in (1, 2) and y.size > 0
    flags = known and bool(np.isin(y, (0, 1)).all())
    if flags and y.ndim == 2 and not column:
        numbers = ("regression",) if kind == "f" else ()
        if (y.sum(axis=1) == 1).all():
            raise _ambiguous("one-hot rows", y, "classification", "multi_label", *numbers)
        if numbers:
            raise _ambiguous("floats that are 0 or 1", y, "multi_label", *numbers)
        return multi_label(y.shape[1])
    if known and (flat or column):
        different = np.unique(y)
        if kind != "f":
            raise _ambiguous("one column", y, "classification", "regression")
        if len(different) <= MOST_CLASSES and np.array_equal(different, np.round(different)):
            whole = f"{len(different)} different whole numbers"
            raise _ambiguous(whole, y, "classification", "regression")
    if known and kind == "f":
        return regression(1 if flat else y.shape[1])
    raise ValueError(
        "y must be integers [n] for classes, floats [n] or [n, D] for regression, or bool [n, L] "
        f"for multi-label, unless a task is given; got {array_type(y)}"
    )


def _ambiguous(what: str, y: NDArray[Any], *tasks: str) -> ValueError:
    ways = " or ".join(f"task={task}" for task in tasks)
    return ValueError(
        f"y must be of one task, got {what}, {array_type(y)}, which may be of several: give {ways}"
    )


def scoring(task: Task, score: str) -> Task:
    """Returns the task that computes a score: the AUC of many classes is computed on request.

    Raises:
        ValueError: if the task has no such score; lists the scores that it has.

    >>> from fedjax_sim.tasks import classification
    >>> scoring(classification(10), "auc")
    classification(10, auc=True)
    >>> scoring(regression(), "auc")
    Traceback (most recent call last):
    ValueError: score must be one of mse, mae, r2, as the task is regression(), got 'auc'
    """
    if score in task.metrics:
        return task
    if score in task.on_request:
        return task.on_request[score]
    known = (*task.metrics, *task.on_request)
    raise ValueError(
        f"score must be one of {', '.join(known)}, as the task is {task!r}, got {score!r}"
    )
