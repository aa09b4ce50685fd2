"""Training and test sets given as separate arrays, as in Keras' .npz files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Task
from fedjax_sim.base.files import read_npz
from fedjax_sim.base.words import array_type
from fedjax_sim.data.arrays import encode
from fedjax_sim.data.dataset import Dataset, from_arrays
from fedjax_sim.data.folder import existing

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
KINDS = {"f": "float", "U": "text"}


class Part(NamedTuple):
    """A training or test set; texts in y are class names."""

    x: NDArray[Any]
    y: NDArray[Any]
    client: NDArray[Any] | None = None


def npz(name: str, file: Path, *, classes: int | None = None, task: str | None = None) -> Dataset:
    """Loads x_train, y_train, x_test and y_test, see :func:`fedjax_sim.data.load_dataset`.

    ``client_train``, or both ``client_train`` and ``client_test``, may be the natural client of
    each sample, numbers or texts. uint8 ``[n, H, W]`` are grey images and get a channel axis.
    """
    arrays = read_npz(existing(name, file))
    missing = [key for key in ARRAYS if key not in arrays]
    if missing:
        raise ValueError(
            f"must have the arrays {', '.join(ARRAYS)}, got {', '.join(arrays) or 'none'}: no "
            + " and no ".join(missing)
        )
    train, test = (_check_part(arrays, which) for which in ("train", "test"))
    if (train.x.shape[1:], train.x.dtype) != (test.x.shape[1:], test.x.dtype):
        raise ValueError(
            f"x_test must be like x_train, which is {array_type(train.x)}, got {array_type(test.x)}"
        )
    if test.client is not None:
        if train.client is None:
            raise ValueError("client_test needs client_train, got it alone")
        if train.client.dtype.kind != test.client.dtype.kind:  # NumPy would round large integers
            raise ValueError(
                f"client_test must be {train.client.dtype}, as client_train, got "
                f"{test.client.dtype}"
            )
    return from_parts(name, train, test, classes=classes, task=task)


def _check_part(arrays: dict[str, NDArray[Any]], which: str) -> Part:
    x, y, client = (arrays.get(f"{key}_{which}") for key in ("x", "y", "client"))
    assert x is not None and y is not None  # noqa: PT018
    if x.ndim < 2 or not len(x) or x.dtype.kind not in "biuf":
        raise ValueError(
            f"x_{which} must be numbers [n, F] or [n, ..., F], n > 0, got {array_type(x)}"
        )
    if y.shape[:1] != x.shape[:1] or y.dtype.kind not in "biufU":
        raise ValueError(
            f"y_{which} must be numbers or texts, as many as x_{which}, got {array_type(y)}"
        )
    if client is not None and client.shape != (len(x),):
        raise ValueError(f"client_{which} must have shape [{len(x)}], got {list(client.shape)}")
    return Part(x[..., None] if x.dtype == np.uint8 and x.ndim == 3 else x, y, client)


def from_parts(
    name: str,
    train: Part,
    test: Part,
    *,
    classes: int | None = None,
    class_names: Sequence[str] = (),
    task: Task | str | None = None,
    scale: bool = True,
    notes: Sequence[str] = (),
) -> Dataset:
    """Makes a data set by :func:`fedjax_sim.data.from_arrays` from a training and a test set.

    Inputs must have the same shape; clients and classes are numbered over both sets, and the test
    set may have no clients.
    """
    n, client = len(train.x), None
    kinds = [KINDS.get(part.y.dtype.kind) for part in (train, test)]
    if train.y.shape[1:] != test.y.shape[1:] or kinds[0] != kinds[1]:
        raise ValueError(
            f"y_test must be like y_train, which is {array_type(train.y)}, got {array_type(test.y)}"
        )
    if train.client is not None and test.client is not None:
        client = np.concatenate([train.client, test.client])
    dataset = from_arrays(
        name,
        np.concatenate([train.x, test.x]),
        np.concatenate([train.y, test.y]),
        test=np.arange(n + len(test.x)) >= n,
        client=client,
        classes=classes,
        class_names=class_names,
        task=task,
        scale=scale,
        notes=notes,
    )
    if dataset.task.classes == 1:
        raise ValueError("there must be at least two classes, got one")
    if train.client is None or client is not None:
        return dataset
    train_client, names = encode("client", train.client, n)
    return dataset._replace(train_client=train_client, client_names=names)
