"""Targets of a data set: dtype, task and class names."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.base import ClientData, Task
from fedjax_sim.base.words import array_type, shortened
from fedjax_sim.data.arrays import check_int32, flags
from fedjax_sim.tasks import classification, multi_label, regression, task_of

KINDS = ("classification", "regression", "multi_label")

ROUNDED = 0.01
"""The rounding to float32 that is accepted, in standard deviations of the targets."""


def read_targets(
    y: NDArray[Any],
    samples: int,
    classes: int | None,
    task: Task | str | None,
    names: tuple[str, ...] = (),
) -> tuple[NDArray[Any], Task, tuple[str, ...]]:
    """Returns targets in the dtype of their task, the task and class names, see ``from_arrays``."""
    if y.shape[:1] != (samples,):
        raise ValueError(f"y must have {samples} rows, as x has, got {array_type(y)}")
    classes = len(names) or None if classes is None else classes
    if isinstance(task, Task):
        if classes not in (None, task.classes):
            raise ValueError(f"classes must match the task, {task!r}, got {classes}")
        converted = as_targets(y, samples)
        task.check("y", converted)
        return converted, task, names
    if task is not None and task not in KINDS:
        raise ValueError(f"task must be a Task or one of {', '.join(KINDS)}, got {task!r}")
    if task in ("regression", "multi_label") and classes is not None:
        raise ValueError(f"classes must not be given for task={task}, got {classes}")
    if y.dtype.kind == "O" and all(isinstance(value, str) for value in y.flat):
        y = y.astype(np.str_)
    if y.dtype.kind == "U" and y.ndim == 1 and task in (None, "classification"):
        names = names or tuple(map(str, np.unique(integers_or_texts(y))))
        if classes not in (None, len(names)):
            raise ValueError(f"classes must be {len(names)}, as y has as many names, got {classes}")
        y, classes = class_codes(y, names), len(names)
    if task is None and classes is None:
        found = task_of(y) or classification(_number_of_classes(_labels(y, samples, None)))
        converted = as_targets(y, samples)
    elif task == "regression":
        converted, found = _numbers(y, samples)
    elif task == "multi_label":
        converted, found = _label_sets(y, samples)
    else:
        converted, found = _classes(y, samples, classes)
    found.check("y", converted)
    return converted, found, names


def _numbers(y: NDArray[Any], samples: int) -> tuple[NDArray[Any], Task]:
    numbers = _column(y).astype(float) if y.dtype.kind in "biu" else y
    return as_targets(numbers, samples), regression(1 if y.ndim == 1 else y.shape[1])


def _label_sets(y: NDArray[Any], samples: int) -> tuple[NDArray[Any], Task]:
    if y.ndim != 2 or y.dtype.kind not in "biuf" or not np.isin(y, (0, 1)).all():
        raise ValueError(
            f"y must be 0 and 1, [{samples}, L], for task=multi_label, got {array_type(y)}"
        )
    return y.astype(bool), multi_label(y.shape[1])


def _classes(y: NDArray[Any], samples: int, classes: int | None) -> tuple[NDArray[Any], Task]:
    """Reads class labels, which may also be one-hot rows."""
    one_hot = y.ndim == 2 and y.shape[1] > 1 and np.isin(y, (0, 1)).all()
    if one_hot and (y.sum(axis=1) == 1).all():
        classes = y.shape[1] if classes is None else classes
        y = y.argmax(axis=1)
    labels = _labels(_column(y), samples, classes)
    return labels, classification(_number_of_classes(labels) if classes is None else classes)


def integers_or_texts(texts: NDArray[np.str_]) -> NDArray[Any]:
    """Converts texts to integers if all are integers, so that 2 sorts before 10.

    >>> integers_or_texts(np.array(["10", "2"])), integers_or_texts(np.array(["02"])).tolist()
    (array([10,  2]), ['02'])
    """
    try:
        numbers = texts.astype(np.int64)
    except (ValueError, OverflowError):
        return texts
    return numbers if np.array_equal(numbers.astype(np.str_), texts) else texts


def class_codes(y: NDArray[np.str_], names: Sequence[str]) -> NDArray[np.int64]:
    """Returns the position of each text among the class names; raises ValueError if unknown."""
    position = {name: i for i, name in enumerate(names)}
    unique, inverse = np.unique(y, return_inverse=True)
    unknown = [str(value) for value in unique if value not in position]
    if unknown:
        raise ValueError(
            f"y must be names of classes, {shortened(list(names))}, got {shortened(unknown)}"
        )
    return np.array([position[str(value)] for value in unique], np.int64)[inverse]


def _column(y: NDArray[Any]) -> NDArray[Any]:
    """Returns ``[n]`` for ``[n, 1]``."""
    return y[:, 0] if y.shape[1:] == (1,) else y


def _labels(y: NDArray[Any], samples: int, classes: int | None) -> NDArray[np.int32]:
    """Returns class labels, which may be given as integral floats."""
    if y.dtype.kind == "f" and np.isfinite(y).all() and np.array_equal(y, np.round(y)):
        y = y.astype(np.int64)
    return class_labels(y, samples, classes)


def as_targets(y: NDArray[Any], samples: int) -> NDArray[Any]:
    """Converts targets of any task: floats to float32; integers and bool ``[n]`` to class labels.

    A label may be -1, for no label, if the task takes it.
    """
    if y.ndim == 1 and y.dtype.kind in "biu":
        return class_labels(y, samples, None, "y", least=-1)
    if y.shape[:1] != (samples,) or y.dtype.kind not in "biuf":
        hint = ": number texts by fs.data.from_arrays" if y.dtype.kind in "UO" else ""
        raise ValueError(f"y must be numbers [{samples}, ...], got {array_type(y)}{hint}")
    if y.dtype.kind == "f":
        if y.dtype != np.float32 and len(y):
            _check_rounding(y.reshape(len(y), math.prod(y.shape[1:])))
        with np.errstate(over="ignore"):
            return y.astype(np.float32, copy=False)
    check_int32("y", y)
    return y if y.dtype == bool else y.astype(np.int32, copy=False)


def _check_rounding(y: NDArray[Any]) -> None:
    """Raises ValueError if float32 rounds a column by much of its spread, such as Unix times."""
    for column in y.T:
        with np.errstate(over="ignore", invalid="ignore"):
            lost = np.std(column - column.astype(np.float32)) > ROUNDED * np.std(column)
        if lost:
            raise ValueError(
                f"y must have values that are distinct in float32, got {column.min()} to "
                f"{column.max()}: subtract a constant, such as {np.median(column):.15g}"
            )


def class_labels(
    y: NDArray[Any], samples: int, classes: int | None, name: str = "y", *, least: int = 0
) -> NDArray[np.int32]:
    """Returns labels as int32; raises ValueError unless they are ``[samples]`` in least … M - 1.

    Without ``classes``, M, any larger int32 is allowed.
    """
    if y.shape != (samples,) or y.dtype.kind not in "biu":
        raise ValueError(f"{name} must be integers [{samples}], got {array_type(y)}")
    if samples and (y.min() < least or y.max() >= (2**31 if classes is None else classes)):
        largest = "M - 1" if classes is None else classes - 1
        takes = "; classification(M, unlabelled=True) takes -1 for no label, as task="
        hint = takes * bool(name == "y" and y.min() == -1)
        hint += "; numbers to predict must be floats" * bool(y.min() < least < 0)
        raise ValueError(f"{name} must be in {least} … {largest}, got {y.min()} … {y.max()}{hint}")
    return y.astype(np.int32, copy=False)


def _number_of_classes(labels: NDArray[np.int32]) -> int:
    """Returns the largest label plus 1; raises if one is unused, as a stray label may be large."""
    unique = np.unique(labels)
    largest = int(unique[-1])
    if len(unique) <= largest:
        absent = int(np.flatnonzero(unique != np.arange(len(unique)))[0])
        raise ValueError(
            f"y must have every class from 0 to its largest, {largest}, got none of class {absent}:"
            f" number the classes from 0, or give classes={largest + 1} (task=regression if they "
            "are numbers)"
        )
    return largest + 1


def strata(y: NDArray[Any], task: Task) -> NDArray[np.int32]:
    """Returns the class of each sample, ``int32[n]``; all 0 for a task without classes."""
    return np.zeros(len(y), np.int32) if task.classes is None else y


def hide_labels(data: ClientData, hidden: ArrayLike, classes: int) -> ClientData:
    """Takes the labels away from some clients, whose y is then -1.

    The server's own samples and the test sets keep theirs, and clients may be dealt by the true
    labels before. For single samples without a label, give :func:`fedjax_sim.data.client_data` a y
    of -1.

    Args:
        data: the clients.
        hidden: ``bool[N]``, the clients without labels.
        classes: M.

    Returns:
        The clients, for a task :class:`fedjax_sim.tasks.classification` with ``unlabelled``; they
        share the samples of ``data``.

    Raises:
        ValueError: if hidden does not have an entry for each client, or a label is not below M.

    Example:
        >>> from fedjax_sim import data, partition
        >>> y = np.array([0, 1, 1, 0])
        >>> clients = data.client_data(np.eye(4), y, partition.iid(y, 2, seed=0))
        >>> hide_labels(clients, [False, True], 2).relabel.tolist()
        [[0, 1], [-1, -1]]
    """
    rows = flags("hidden", hidden, data.clients)
    class_labels(np.asarray(data.y), len(data.y), classes, "data.y", least=-1)
    known = jnp.arange(classes, dtype=jnp.int32) if data.relabel is None else data.relabel
    return dataclasses.replace(data, relabel=jnp.where(rows[:, None], jnp.int32(-1), known))
