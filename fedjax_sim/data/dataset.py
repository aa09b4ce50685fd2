"""A labelled data set in host memory, made from any arrays."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.data.scaling import statistics

Features = Mapping[str, NDArray[np.int32]]
NO_FEATURES: Features = MappingProxyType({})


class Dataset(NamedTuple):
    """A labelled data set in host memory.

    Attributes:
        name: What `load_dataset` takes, and which part of the data it is where that is not all.
        train_x: Training inputs in their raw units: images uint8 [n, H, W, C], tables float32
            [n, F], tokens integer [n, T].
        train_y: Training labels, int32 [n] in 0 … classes - 1.
        test_x: Test inputs, like train_x.
        test_y: Test labels, like train_y.
        classes: Number of classes M.
        mean: Mean of train_x along its last axis, float32 [C], in the raw units of x; 0 in columns
            that are not numeric; None where inputs are taken as they are, such as tokens.
        std: Standard deviation likewise; 1 in columns that are not numeric or constant.
        train_client: Natural client of each training sample (a speaking role, a hospital), int32
            [n] in 0 … N - 1; None where the data has none.
        test_client: Natural client of each test sample, likewise.
        client_names: Names of the N natural clients.
        features: Categorical features of the training samples for feature-skewed partitions, by
            name: int32 [n] in 0 … categories - 1.
        test_features: Those of the test samples.
        numeric: Columns of x that standardisation touches, bool [F]; None for all.
        class_names: Names of the M classes, where the data has them.
        test_set: What the test set is, in words.
    """

    name: str
    train_x: NDArray[Any]
    train_y: NDArray[np.int32]
    test_x: NDArray[Any]
    test_y: NDArray[np.int32]
    classes: int
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
    class_names: tuple[str, ...] = (),
    test_set: str = "the test set",
) -> Dataset:
    """A data set from any arrays.

    Args:
        name: Its name.
        x: Inputs [n, …]; uint8 stays as it is, other numbers become float32, or int32 where they
            are integers and not scaled.
        y: Labels, int [n] in 0 … M - 1.
        test: Which samples are the test set, bool [n]; None for a random fifth of each class,
            rounded, the same in every call.
        client: Natural client of every sample, n numbers or texts.
        features: Categorical features by name, n numbers or texts each.
        numeric: Columns that are scaled, bool [F]; None for all.
        scale: Whether models get standardised inputs: False for tokens.
        classes: Number of classes M; None for the largest label plus 1.
        class_names: Names of the M classes.
        test_set: What `test` is, in words.

    Returns:
        The data set; samples keep their order in each part, clients and categories are numbered
        in the order of their numbers or texts.

    Raises:
        ValueError: Shapes that do not fit, values that are not finite, or labels that are no
            integers from 0; names the argument.

    >>> data = from_arrays("mine", [[0.0], [2.0], [4.0]], [0, 1, 1], test=[False, False, True])
    >>> data.train_x.tolist(), data.test_y.tolist(), data.mean.tolist(), data.std.tolist()
    ([[0.0], [2.0]], [1], [1.0], [1.0])
    """
    inputs = _inputs(np.asarray(x), scale)
    labels = class_labels(np.asarray(y), len(inputs), classes)
    columns = None if numeric is None else _flags("numeric", numeric, inputs.shape[-1])
    held_out = _random_fifth(labels) if test is None else _flags("test", test, len(labels))
    kept = ~held_out
    if not kept.any():
        raise ValueError("test must leave at least one training sample, got True for all")
    mean, std = statistics(inputs[kept], columns) if scale else (None, None)
    clients, names = (None, ()) if client is None else _coded("client", client, len(labels))
    coded = {key: _coded(key, value, len(labels))[0] for key, value in features.items()}
    return Dataset(
        name=name,
        train_x=inputs[kept],
        train_y=labels[kept],
        test_x=inputs[held_out],
        test_y=labels[held_out],
        classes=int(labels.max()) + 1 if classes is None else classes,
        mean=mean,
        std=std,
        train_client=None if clients is None else clients[kept],
        test_client=None if clients is None else clients[held_out],
        client_names=names,
        features=MappingProxyType({key: value[kept] for key, value in coded.items()}),
        test_features=MappingProxyType({key: value[held_out] for key, value in coded.items()}),
        numeric=columns,
        class_names=class_names,
        test_set="a fixed random fifth of each class" if test is None else test_set,
    )


def pooled(dataset: Dataset) -> Dataset:
    """The same data without a test set: all samples are training samples, test samples last.

    For partitions and splits by client (RADFed), where clients are held out instead.

    Args:
        dataset: Any data set.

    Returns:
        The data set with an empty test set, and the statistics of all its inputs.

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


def _random_fifth(y: NDArray[np.int32]) -> NDArray[np.bool_]:
    """A fifth of each class, rounded, by one fixed seed."""
    rng = np.random.default_rng(0)
    test = np.zeros(len(y), bool)
    for label in range(y.max() + 1):
        members = rng.permutation(np.flatnonzero(y == label))
        test[members[: round(len(members) / 5)]] = True
    return test


def _inputs(x: NDArray[Any], scale: bool) -> NDArray[Any]:
    if x.ndim < 2 or not len(x) or x.dtype.kind not in "biuf":
        raise ValueError(f"x must be numbers [n, …] with n > 0, got {x.dtype} {list(x.shape)}")
    if x.dtype == np.uint8:
        return x
    if x.dtype.kind != "f" and not scale:
        return x.astype(np.int32)
    x = x.astype(np.float32)
    if not np.isfinite(x).all():
        raise ValueError("x has NaN or infinite values; fill them in or leave those samples out")
    return x


def class_labels(y: NDArray[Any], samples: int, classes: int | None) -> NDArray[np.int32]:
    """The labels, if there is one in 0 … M - 1 for each sample.

    Raises:
        ValueError: Labels that are no integers, of another number or out of range.
    """
    if y.shape != (samples,) or y.dtype.kind not in "biu":
        raise ValueError(f"y must be integers [{samples}], got {y.dtype} {list(y.shape)}")
    if samples and (y.min() < 0 or (classes is not None and y.max() >= classes)):
        largest = "M - 1" if classes is None else classes - 1
        raise ValueError(f"y must be in 0 … {largest}, got {y.min()} … {y.max()}")
    return y.astype(np.int32)


def _flags(name: str, values: ArrayLike, length: int) -> NDArray[np.bool_]:
    flags = np.asarray(values)
    if flags.shape != (length,) or flags.dtype != bool:
        raise ValueError(f"{name} must be bool [{length}], got {flags.dtype} {list(flags.shape)}")
    return flags


def _coded(name: str, values: ArrayLike, samples: int) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """Each value's place among the different ones, and these as text."""
    given = np.asarray(values)
    if given.shape != (samples,):
        raise ValueError(f"{name} must have shape [{samples}], got {list(given.shape)}")
    different, codes = np.unique(given, return_inverse=True)
    return codes.astype(np.int32), tuple(map(str, different))
