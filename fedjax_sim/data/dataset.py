"""Labelled data sets in host memory, and their construction from arrays."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.base import Task
from fedjax_sim.base.brief import brief
from fedjax_sim.base.words import array_type, shortened
from fedjax_sim.data.arrays import check_int32, encode, flags, plain_array
from fedjax_sim.data.standardise import statistics
from fedjax_sim.data.targets import read_targets, strata

Features = Mapping[str, NDArray[np.int32]]
NO_FEATURES: Features = MappingProxyType({})


class Dataset(NamedTuple):
    """A labelled data set in host memory.

    Attributes:
        name: the name that :func:`fedjax_sim.data.load_dataset` takes, and the part of the data if
            not all are included.
        train_x: training inputs ``[n, ...]`` in raw units: images ``uint8[n, H, W, C]``, tables
            ``f32[n, F]``, tokens ``int[n, T]``.
        train_y: training targets ``[n, ...]`` in the dtype of the task: classes ``int32[n]`` in
            0 … M - 1, numbers float32, multi-labels bool.
        test_x: test inputs.
        test_y: test targets.
        task: the learning task, see :mod:`fedjax_sim.tasks`.
        mean: ``f32[C]``, mean of ``train_x`` along its last axis, in raw units; 0 in columns that
            are not numeric; None for inputs that are not standardised, such as tokens.
        std: ``f32[C]``, standard deviation of ``train_x`` along its last axis; 1 in columns that
            are constant or not numeric.
        train_client: ``int32[n]`` in 0 … N - 1, natural client of each training sample (a speaking
            role, a hospital); None if the data have no natural clients.
        test_client: natural client of each test sample.
        client_names: names of the N natural clients.
        features: categorical features of the training samples, for feature-skewed partitions:
            ``int32[n]`` in 0 … categories - 1, by name.
        test_features: categorical features of the test samples.
        numeric: ``bool[F]``, the columns of x to standardise; None for all.
        class_names: names of the M classes, or the tokens of a vocabulary; () if unnamed.
        test_set: description of the test set.
        notes: sentences on what loading inferred, converted or dropped.
    """

    name: str
    train_x: NDArray[Any]
    train_y: NDArray[Any]
    test_x: NDArray[Any]
    test_y: NDArray[Any]
    task: Task
    mean: NDArray[np.float32] | None
    std: NDArray[np.float32] | None
    train_client: NDArray[np.int32] | None = None
    test_client: NDArray[np.int32] | None = None
    client_names: tuple[str, ...] = ()
    features: Features = NO_FEATURES
    test_features: Features = NO_FEATURES
    numeric: NDArray[np.bool_] | None = None
    class_names: tuple[str, ...] = ()
    test_set: str = "the test set"
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> int:
        """M, the number of classes; raises ValueError for a task without classes."""
        if self.task.classes is None:
            raise ValueError(f"{self.name} has no classes, its task is {self.task!r}")
        return self.task.classes

    @property
    def strata(self) -> NDArray[np.int32]:
        """``int32[n]``, the labels by which skew is measured; all 0 without classes."""
        return strata(self.train_y, self.task)

    @property
    def strata_names(self) -> tuple[str, ...]:
        """The names of the strata; () if unnamed."""
        return () if self.task.classes is None else self.class_names

    def __repr__(self) -> str:
        arrays = {key: getattr(self, key) for key in ("train_x", "train_y", "test_x", "test_y")}
        clients = None if self.train_client is None else len(self.client_names)
        more = {"clients": clients, "features": tuple(self.features) or None}
        known = {"name": self.name, "task": self.task, **arrays, **more}
        return brief(self, known | {"test_set": self.test_set})


def from_arrays(
    name: str,
    x: ArrayLike,
    y: ArrayLike,
    *,
    test: ArrayLike | None = None,
    client: ArrayLike | None = None,
    features: Mapping[str, ArrayLike] = NO_FEATURES,
    numeric: ArrayLike | None = None,
    scale: bool = True,
    classes: int | None = None,
    class_names: Sequence[str] = (),
    column_names: Sequence[str] = (),
    task: Task | str | None = None,
    test_set: str = "the test set",
    notes: Sequence[str] = (),
) -> Dataset:
    """Makes a data set from arrays.

    Args:
        name: name of the data set.
        x: inputs ``[n, ...]``, for images ``[n, H, W, C]``. uint8 is kept; other numbers become
            float32, or int32 for integers with ``scale=False``. Subtract a constant from large
            values that are close to each other, such as Unix times, which float32 would merge.
        y: targets, which determine the task: integers ``[n]`` in 0 … M - 1, or texts ``[n]``, are
            classes; floats ``[n]`` or ``[n, D]`` are regression targets; bool, or integers 0
            and 1, ``[n, L]`` are multi-label.
        test: ``bool[n]``, the test samples; None for a random fifth of each class, rounded, the
            same in every call.
        client: natural client of each sample, n numbers or texts.
        features: categorical features by name, n numbers or texts each.
        numeric: ``bool[F]``, the columns to scale; None for all.
        scale: whether models receive standardised inputs; False for tokens.
        classes: M; None for the number of class names, or without names the largest label plus 1,
            if every smaller label occurs.
        class_names: names of the M classes, in the order of their numbers; () if unnamed.
        column_names: names of the columns of x, for messages.
        task: a task, or "classification" (also for integral floats, one-hot rows and ``[n, 1]``),
            "regression" (also for integers) or "multi_label"; None to infer it from y.
        test_set: description of ``test``.
        notes: sentences on earlier inferences, conversions and dropped samples.

    Returns:
        The data set. Samples keep their order within the training and test sets; clients and
        categories are numbered in sorted order.

    Raises:
        ValueError: if shapes do not match; values are not finite or too large for their
            dtype; images are channels-first; the task of y is ambiguous; labels skip a number or do
            not match the class names; no test class is in the training set; or a client or category
            is missing. The message names the argument.

    Example:
        >>> data = from_arrays("mine", [[0.0], [2.0], [4.0]], [0, 1, 1], test=[False, False, True])
        >>> data.train_x.tolist(), data.test_y.tolist(), data.mean.tolist(), data.std.tolist()
        ([[0.0], [2.0]], [1], [1.0], [1.0])
    """
    inputs = _convert_inputs(plain_array("x", x), scale, column_names)
    y, task, names = read_targets(
        plain_array("y", y), len(inputs), classes, task, _checked_names(class_names, classes)
    )
    columns = None if numeric is None else flags("numeric", numeric, inputs.shape[-1])
    if test is None:
        held_out = random_share(strata(y, task), 1 / 5)
        test_set = "a fixed random fifth" + " of each class" * (task.classes is not None)
    else:
        held_out = flags("test", test, len(y))
    kept = ~held_out
    if not kept.any():
        raise ValueError("test must leave at least one training sample, got True for all")
    if task.classes is not None:
        _check_common(y[kept], y[held_out], names or tuple(map(str, range(task.classes))))
    mean, std = statistics(inputs[kept], columns) if scale else (None, None)
    clients, client_names = (None, ()) if client is None else encode("client", client, len(y))
    codes = {key: encode(key, value, len(y))[0] for key, value in features.items()}
    return Dataset(
        name=name,
        train_x=inputs[kept],
        train_y=y[kept],
        test_x=inputs[held_out],
        test_y=y[held_out],
        task=task,
        mean=mean,
        std=std,
        train_client=None if clients is None else clients[kept],
        test_client=None if clients is None else clients[held_out],
        client_names=client_names,
        features=MappingProxyType({key: value[kept] for key, value in codes.items()}),
        test_features=MappingProxyType({key: value[held_out] for key, value in codes.items()}),
        numeric=columns,
        class_names=names,
        test_set=test_set,
        notes=tuple(notes),
    )


def pooled(dataset: Dataset) -> Dataset:
    """Moves the test samples to the end of the training set, and leaves the test set empty.

    For partitions and splits that hold out whole clients instead (RADFed).

    Args:
        dataset: any data set.

    Returns:
        The data set with an empty test set; ``mean`` and ``std`` cover all inputs.

    Example:
        >>> data = pooled(from_arrays("mine", [[0.0], [2.0]], [0, 0], test=[False, True]))
        >>> data.train_x.tolist(), data.test_x.shape, data.mean.tolist()
        ([[0.0], [2.0]], (0, 1), [1.0])
    """
    x = np.concatenate([dataset.train_x, dataset.test_x])
    mean, std = (None, None) if dataset.mean is None else statistics(x, dataset.numeric)
    client = None
    if dataset.train_client is not None and dataset.test_client is not None:
        client = np.concatenate([dataset.train_client, dataset.test_client])
    features = {
        key: np.concatenate([values, dataset.test_features[key]])
        for key, values in dataset.features.items()
    }
    return dataset._replace(
        train_x=x,
        train_y=np.concatenate([dataset.train_y, dataset.test_y]),
        test_x=dataset.test_x[:0],
        test_y=dataset.test_y[:0],
        mean=mean,
        std=std,
        train_client=client,
        test_client=None if client is None else client[:0],
        features=MappingProxyType(features),
        test_features=MappingProxyType({key: values[:0] for key, values in features.items()}),
    )


def random_share(y: NDArray[Any], share: float) -> NDArray[np.bool_]:
    """Draws a share of each class, rounded, with a fixed seed: ``bool[n]``."""
    rng = np.random.default_rng(0)
    test = np.zeros(len(y), bool)
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        test[members[: round(share * len(members))]] = True
    return test


def _convert_inputs(x: NDArray[Any], scale: bool, names: Sequence[str]) -> NDArray[Any]:
    """Converts inputs to uint8, int32 or float32."""
    if x.ndim < 2 or not len(x) or x.dtype.kind not in "biuf":
        raise ValueError(f"x must be numbers [n, F] or [n, ..., F], n > 0, got {array_type(x)}")
    if scale and _channels_first(x):
        raise ValueError(
            f"x must be images [n, H, W, C], got {list(x.shape)}, which is channels-first: give "
            "np.moveaxis(x, 1, -1)"
        )
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind != "f" and not scale:
        check_int32("x", x)
        return x.astype(np.int32)
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    if not np.isfinite(x).all():
        bad = int(np.argmax(~np.isfinite(x).all(axis=tuple(range(x.ndim - 1)))))
        column = f", column {names[bad]!r}," if len(names) else ""
        raise ValueError(
            f"x{column} must be finite in float32, got NaN or inf: fill in those values or drop "
            "the samples"
        )
    return x


def _check_common(train: NDArray[Any], test: NDArray[Any], names: Sequence[str]) -> None:
    """Raises ValueError if the labels of the training and test samples have no class in common."""
    old, new = (np.unique(y[(y >= 0) & (y < len(names))]) for y in (train, test))
    if len(old) and len(new) and not np.isin(new, old).any():
        of_train, of_test = (shortened([names[k] for k in classes]) for classes in (old, new))
        raise ValueError(
            f"the test set must have classes of the training set, {of_train}, got {of_test}: use "
            "the same class names in both"
        )


def _channels_first(x: NDArray[Any]) -> bool:
    """Returns whether x looks like images ``[n, C, H, W]``; signals ``[n, 1, T, C]`` do not."""
    if x.ndim != 4:
        return False
    first, height, width = x.shape[1:]
    return width > 4 and (first == 3 or (first == 1 and height == width))


def _checked_names(class_names: Sequence[str], classes: int | None) -> tuple[str, ...]:
    texts = not isinstance(class_names, str) and all(isinstance(n, str) for n in class_names)
    if not texts or (class_names and classes not in (None, len(class_names))):
        wanted = "texts" if classes is None else f"{classes} texts, one for each class"
        raise ValueError(f"class_names must be {wanted}, got {class_names!r}")
    return tuple(class_names)
