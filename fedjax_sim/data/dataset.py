"""A labelled data set in host memory, made from any arrays."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.base import Task
from fedjax_sim.base.brief import brief, brief_html
from fedjax_sim.data.masked import check_int32, plain_array
from fedjax_sim.data.scaling import offset, statistics
from fedjax_sim.data.targets import of_each, read_targets, strata

Features = Mapping[str, NDArray[np.int32]]
NO_FEATURES: Features = MappingProxyType({})


class Dataset(NamedTuple):
    """A labelled data set in host memory.

    Attributes:
        name: what :func:`fedjax_sim.data.load_dataset` takes, and which part of the data it is if
            it is not all.
        train_x: ``[n, ...]``, the training inputs in their raw units: images ``uint8[n, H, W, C]``,
            tables ``f32[n, F]``, tokens ``int[n, T]``.
        train_y: ``[n, ...]``, the training targets as the task has them: classes ``int32[n]`` in
            0 … M - 1, numbers float32, labels bool.
        test_x: the test inputs, like train_x.
        test_y: the test targets, like train_y.
        task: what is learnt, see :mod:`fedjax_sim.tasks`.
        mean: ``f32[C]``, the mean of train_x along its last axis, in the raw units of x; 0 in
            columns that are not numeric; None for inputs that are taken as they are, such as
            tokens.
        std: ``f32[C]``, the standard deviation likewise; 1 in columns that are not numeric, or
            constant.
        train_client: ``int32[n]``, the natural client of each training sample (a speaking role, a
            hospital), in 0 … N - 1; None if the data have none.
        test_client: the natural client of each test sample, likewise.
        client_names: the names of the N natural clients.
        features: categorical features of the training samples for feature-skewed partitions, by
            name: ``int32[n]``, in 0 … categories - 1.
        test_features: those of the test samples.
        numeric: ``bool[F]``, the columns of x that standardisation touches; None for all.
        class_names: the names of the M classes, or of a vocabulary's tokens, if the data have them.
        test_set: what the test set is, in words.
        notes: what loading guessed, converted or dropped, a sentence each.
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
        """M, the number of classes.

        Raises:
            ValueError: if the task is none of classes.
        """
        if self.task.classes is None:
            raise ValueError(f"{self.name} has no classes, its task is {self.task!r}")
        return self.task.classes

    @property
    def strata(self) -> NDArray[np.int32]:
        """``int32[n]``, what skew is measured by: the training labels; without classes 0."""
        return strata(self.train_y, self.task)

    @property
    def strata_names(self) -> tuple[str, ...]:
        """The names of these, if the data have them."""
        return () if self.task.classes is None else self.class_names

    def __repr__(self) -> str:
        return brief(self, self._entries())

    def _repr_html_(self) -> str:
        return brief_html(self, self._entries())

    def _entries(self) -> dict[str, Any]:
        """What is shown of it."""
        arrays = {key: getattr(self, key) for key in ("train_x", "train_y", "test_x", "test_y")}
        owned = None if self.train_client is None else len(self.client_names)
        more = {"clients": owned, "features": tuple(self.features) or None}
        return {"name": self.name, "task": self.task, **arrays, **more, "test_set": self.test_set}


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
    """A data set from any arrays.

    Args:
        name: its name.
        x: ``[n, ...]``, the inputs, of images ``[n, H, W, C]``; uint8 stays as it is, other numbers
            become float32, or int32 if they are integers and not scaled. A column of large values
            that are close, such as Unix times, has its mean subtracted before that, as float32
            would make one value of several; a note names it.
        y: the targets, which say what the task is: integers ``[n]`` are classes, in 0 … M - 1, and
            texts ``[n]`` their names; floats ``[n]`` or ``[n, D]`` regression; bool, or integers 0
            and 1, ``[n, L]`` multi-label.
        test: ``bool[n]``, which samples are the test set; None for a random fifth of each class,
            rounded, the same in every call.
        client: the natural client of every sample, n numbers or texts.
        features: categorical features by name, n numbers or texts each.
        numeric: ``bool[F]``, the columns that are scaled; None for all.
        scale: whether models get standardised inputs: False for tokens.
        classes: M; None for as many as have names, and without names for the largest label plus 1,
            if every label up to it occurs.
        class_names: the names of the M classes, in the order of their numbers; () for none.
        column_names: the names of the columns of x, for messages and notes.
        task: what is learnt: a task, or "classification" (also of whole floats, one-hot rows and
            ``[n, 1]``), "regression" (also of integers) or "multi_label"; None: by y.
        test_set: what ``test`` is, in words.
        notes: what was guessed, converted or dropped to get these arrays, a sentence each.

    Returns:
        The data set. Samples keep their order in each part; clients and categories are numbered in
        the order of their numbers or texts.

    Raises:
        ValueError: if shapes do not fit, values are masked, not finite or too large for their
            dtype, images have their channels first, y may be of two tasks, labels leave out a
            number or have not as many names, no class of the test set is in the training set, or a
            client or category is missing; names the argument.

    Example:
        >>> data = from_arrays("mine", [[0.0], [2.0], [4.0]], [0, 1, 1], test=[False, False, True])
        >>> data.train_x.tolist(), data.test_y.tolist(), data.mean.tolist(), data.std.tolist()
        ([[0.0], [2.0]], [1], [1.0], [1.0])
    """
    inputs, centred = _inputs(plain_array("x", x), scale, column_names)
    read = read_targets(
        plain_array("y", y), len(inputs), classes, task, _names(class_names, classes)
    )
    targets, task = read.y, read.task
    columns = None if numeric is None else flags("numeric", numeric, inputs.shape[-1])
    n = len(targets)
    held_out = (
        random_share(strata(targets, task), 1 / 5) if test is None else flags("test", test, n)
    )
    kept = ~held_out
    if not kept.any():
        raise ValueError("test must leave at least one training sample, got True for all")
    mean, std = statistics(inputs[kept], columns) if scale else (None, None)
    clients, names = (None, ()) if client is None else coded("client", client, n)
    codes = {key: coded(key, value, n)[0] for key, value in features.items()}
    return Dataset(
        name=name,
        train_x=inputs[kept],
        train_y=targets[kept],
        test_x=inputs[held_out],
        test_y=targets[held_out],
        task=task,
        mean=mean,
        std=std,
        train_client=None if clients is None else clients[kept],
        test_client=None if clients is None else clients[held_out],
        client_names=names,
        features=MappingProxyType({key: value[kept] for key, value in codes.items()}),
        test_features=MappingProxyType({key: value[held_out] for key, value in codes.items()}),
        numeric=columns,
        class_names=read.class_names,
        test_set=f"a fixed random fifth{of_each(task)}" if test is None else test_set,
        notes=(*notes, *centred),
    )


def pooled(dataset: Dataset) -> Dataset:
    """The same data without a test set: all samples are training samples, the test samples last.

    It is for partitions and splits by client (RADFed), which hold out clients instead.

    Args:
        dataset: any data set.

    Returns:
        The data set with an empty test set, and the statistics of all its inputs.

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


def random_share(y: NDArray[np.int32], share: float) -> NDArray[np.bool_]:
    """``bool[n]``: a share of each class, rounded, by one fixed seed."""
    rng = np.random.default_rng(0)
    test = np.zeros(len(y), bool)
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        test[members[: round(share * len(members))]] = True
    return test


def _inputs(
    x: NDArray[Any], scale: bool, names: Sequence[str]
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Inputs in the dtype that the engine has, and a note for each column that was centred."""
    if x.ndim < 2 or not len(x) or x.dtype.kind not in "biuf":
        raise ValueError(f"x must be numbers [n, ...] with n > 0, got {x.dtype} {list(x.shape)}")
    if scale and _channels_first(x):
        raise ValueError(
            f"x must be images [n, H, W, C], got {list(x.shape)}, whose channels come first: give "
            "np.moveaxis(x, 1, -1)"
        )
    if x.dtype == np.uint8:
        return x, ()
    if x.dtype.kind != "f" and not scale:
        check_int32("x", x)
        return x.astype(np.int32), ()
    shifts = np.array([offset(x[..., c]) if scale else 0.0 for c in range(x.shape[-1])])
    if shifts.any():
        x = x - shifts
    with np.errstate(over="ignore"):
        x = x.astype(np.float32)
    if not np.isfinite(x).all():
        raise ValueError(
            "x must be finite in float32, got NaN or inf: fill it in or leave those samples out"
        )
    return x, tuple(
        f"Column {names[c] if len(names) else c} has {shifts[c]:.15g} subtracted, as float32 would "
        "merge its values."
        for c in map(int, np.flatnonzero(shifts))
    )


def _channels_first(x: NDArray[Any]) -> bool:
    """Whether these look like images ``[n, C, H, W]``.

    Signals, ``[n, 1, T, C]``, do not: one row is an image only if it would be a square one.
    """
    if x.ndim != 4:
        return False
    first, height, width = x.shape[1:]
    return width > 4 and (first == 3 or (first == 1 and height == width))


def _names(class_names: Sequence[str], classes: int | None) -> tuple[str, ...]:
    texts = not isinstance(class_names, str) and all(isinstance(n, str) for n in class_names)
    if not texts or (class_names and classes not in (None, len(class_names))):
        wanted = "texts" if classes is None else f"{classes} texts, one for each class"
        raise ValueError(f"class_names must be {wanted}, got {class_names!r}")
    return tuple(class_names)


def flags(name: str, values: ArrayLike, length: int) -> NDArray[np.bool_]:
    """The argument ``name`` as ``bool[length]``; raises ValueError if it is none."""
    given = plain_array(name, values)
    if given.shape != (length,) or given.dtype != bool:
        raise ValueError(f"{name} must be bool [{length}], got {given.dtype} {list(given.shape)}")
    return given


def coded(name: str, values: ArrayLike, samples: int) -> tuple[NDArray[np.int32], tuple[str, ...]]:
    """Each value's rank among the different ones, and these as text."""
    given = plain_array(name, values)
    if given.shape != (samples,):
        raise ValueError(f"{name} must have shape [{samples}], got {list(given.shape)}")
    if given.dtype.kind == "O" and all(isinstance(v, str) for v in given):
        given = given.astype(np.str_)
    if given.dtype.kind not in "biufUS" or (given.dtype.kind == "f" and np.isnan(given).any()):
        kinds = sorted({type(value).__name__ for value in given.tolist()})
        got = "NaN" if given.dtype.kind == "f" else ", ".join(kinds)
        raise ValueError(f"{name} must be a number or a text for every sample, got {got}")
    different, codes = np.unique(given, return_inverse=True)
    return codes.astype(np.int32), tuple(map(str, different))
