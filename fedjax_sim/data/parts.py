"""A data set from a training and a test part that were apart."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Task
from fedjax_sim.data.arrays import encode
from fedjax_sim.data.dataset import Dataset, from_arrays

KINDS = {"f": "float", "U": "text"}


class Part(NamedTuple):
    """The training or the test samples.

    Attributes:
        x: ``[n, ...]``, the inputs.
        y: ``[n, ...]``, the targets; texts are names of classes.
        client: the natural client of each, n numbers or texts; None for none.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    client: NDArray[Any] | None = None


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
    """Returns a data set of two parts, whose clients and classes are numbered alike.

    Args:
        name: its name.
        train: the training samples.
        test: the test samples, whose inputs have the same shape; they need no clients.
        classes: as for :func:`fedjax_sim.data.from_arrays`, and so are the others.
        class_names: as there.
        task: as there.
        scale: as there.
        notes: as there.

    Raises:
        ValueError: as :func:`fedjax_sim.data.from_arrays`; or if there is only one class, or the
            targets of the parts are of two kinds.

    Example:
        >>> train = Part(np.zeros((2, 1)), np.array([0, 1]), np.array(["b", "c"]))
        >>> data = from_parts("mine", train, Part(np.ones((1, 1)), np.array([1]), np.array(["a"])))
        >>> data.client_names, data.train_client.tolist(), data.test_client.tolist()
        (('a', 'b', 'c'), [1, 2], [0])
    """
    n, client = len(train.x), None
    kinds = [KINDS.get(part.y.dtype.kind) for part in (train, test)]
    if train.y.shape[1:] != test.y.shape[1:] or kinds[0] != kinds[1]:
        raise ValueError(
            f"y_test must be like y_train, which is {train.y.dtype} {list(train.y.shape)}, got "
            f"{test.y.dtype} {list(test.y.shape)}"
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
    owner, names = encode("client", train.client, n)
    return dataset._replace(train_client=owner, client_names=names)
