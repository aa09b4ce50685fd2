"""Conversion of arrays and partitions to client data and evaluation sets."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fedjax_sim.base import Array, ClientData, PyTree
from fedjax_sim.base.brief import brief_fields
from fedjax_sim.base.words import array_type
from fedjax_sim.data.arrays import plain_array, sample_arrays
from fedjax_sim.data.targets import as_targets
from fedjax_sim.partition.table import Partition, validate_partition


def client_data(
    x: Any,
    y: Any,
    partitions: Partition | Sequence[Partition],
    *,
    root: ArrayLike | Sequence[ArrayLike] | None = None,
) -> ClientData:
    """Makes client data from pooled samples and a partition, or one partition for each seed.

    Args:
        x: inputs ``[n_total, *feature]``, an array or a pytree of arrays; dtypes are kept.
        y: targets ``[n_total, ...]``: class labels in 0 … M - 1, or targets of another task.
        partitions: one, or R with equally many clients: ``start`` is then ``int32[R, N + 1]`` into
            one list of integers; samples are never copied. If there are copies, as from
            :func:`fedjax_sim.data.fedaug`, n_k and the length of an epoch ignore them.
        root: ``int[n_0]``, rows of the server's own samples (:func:`fedjax_sim.data.take_root`),
            for all runs, or a list of R such arrays; None if the server has no samples.

    Returns:
        A NumPy-backed :class:`fedjax_sim.ClientData`.

    Raises:
        ValueError: if y is not targets; if a partition does not fit the samples or has an empty
            client; if the partitions differ in their number of clients; if root does not fit the
            samples, or contains a client's sample.

    Example:
        >>> from fedjax_sim import partition
        >>> y = np.arange(8) % 2
        >>> data = client_data(np.zeros((8, 3)), y, [partition.iid(y, 4, seed=s) for s in (0, 1)])
        >>> data.start.tolist()
        [[0, 2, 4, 6, 8], [8, 10, 12, 14, 16]]
    """
    x, y = _samples(x, y)
    runs, select = _by_run(partitions)
    clients = {len(p.start) - 1 for p in runs}
    if len(clients) != 1:
        raise ValueError(f"partitions must have equally many clients, got {sorted(clients)}")
    for p in runs:
        validate_partition(p, len(y))
    roots = [] if root is None else _checked_roots(root, runs, len(y))
    edges = np.cumsum([sum(len(p.index) for p in runs), *map(len, roots)]).astype(np.int32)
    copies = any((p.index >= len(y)).any() for p in runs)
    sizes = np.array([[np.sum(k < len(y)) for k in p.lists] for p in runs] if copies else 0)
    shared = any(p.sent for p in runs)
    return ClientData(
        x=x,
        y=y,
        index=in_host_memory(np.concatenate([*(p.index for p in runs), *roots]), np.int32),
        start=_starts(runs)[select],
        capacity=int(max([np.diff(p.start).max() for p in runs] + [len(r) for r in roots])),
        budget=sizes.astype(np.int32)[select] if copies else None,
        root=np.stack([edges[:-1], edges[1:]], axis=1)[select] if roots else None,
        copies=copies,
        sent=np.array([p.sent for p in runs], np.int32)[select] if shared else None,
    )


def streamed(data: ClientData, samples_per_round: int) -> ClientData:
    r"""Makes each client's samples arrive round by round: online learning.

    .. math:: \text{in round } t \text{ a client trains on its samples } tB,\ \dots,\ (t + 1)B - 1

    Samples arrive in the order of the client's list, whether or not the client participates; after
    the last one has arrived, the client takes no steps. Weights by samples
    (``weighting.by_samples``) count the samples that arrived in the round; with equal weights, a
    model that took no step still counts. The server's own samples do not stream.

    With one epoch, the reported loss ``Result.metrics.loss`` is on samples that no model has
    trained on. Multiplied by ``metrics.samples`` and summed over the rounds, it is the online loss
    :math:`\sum_t \ell_t(w_t)`; subtracting the loss of the best fixed model gives the regret.

    Personal models are made of the samples of the last round.

    Rejected in the first round: parts that read clients' samples outside training, such as a poll,
    a finish or peers, and models that return in a later round.

    Args:
        data: the clients, without copies of samples.
        samples_per_round: B.

    Returns:
        The same arrays.

    Raises:
        ValueError: if samples_per_round is below 1, or there are copies (FedAug).

    Source: He et al. 2019 <https://arxiv.org/abs/1910.04956>, section 3, with B = 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.fedavg(local, clients_per_round=10)
        >>> data = streamed(problem.data, 2)
        >>> out = fs.simulate(
        ...     algorithm, problem.model, data, problem.test, rounds=3, classes=problem.classes
        ... )
        >>> out.metrics.samples.tolist()
        [[20, 20, 20]]
    """
    if not isinstance(samples_per_round, numbers.Integral) or samples_per_round < 1:
        least = "at least 1" if samples_per_round < 1 else "a whole number"
        raise ValueError(f"samples_per_round must be {least}, got {samples_per_round}")
    if data.copies:
        raise ValueError(
            "samples_per_round needs clients without copies of samples: leave out FedAug and "
            "rebalancing"
        )
    return dataclasses.replace(data, samples_per_round=samples_per_round)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EvalSet:
    """Pooled samples and a ragged (CSR) list of the samples to score, made by ``eval_set``.

    Runs that are scored on different clients (folds) share ``x`` and ``y``, with each other and
    with :class:`fedjax_sim.ClientData`, and differ only in integers.

    Attributes:
        x: inputs ``[n_total, *feature]``, an array or a pytree of arrays.
        y: targets ``[n_total, *target]``: int32 class labels, or targets of another task.
        index: ``int32[n]`` or ``int32[R, n]``, rows of ``x`` grouped by client. Entries after
            ``start[-1]`` are padding and are not scored.
        start: ``int32[K + 1]`` or ``int32[R, K + 1]``; client k owns ``index[start[k]:start[k +
            1]]``. A client without samples has no score.
        adapt: the samples on which clients that never train adapt before they are scored; None:
            they do not adapt.
    """

    x: PyTree
    y: Array
    index: Array
    start: Array
    adapt: ClientData | None = dataclasses.field(default=None, metadata={"added": True})

    @property
    def clients(self) -> int:
        """K; in a run with fewer clients than others, the last ones are empty."""
        return self.start.shape[-1] - 1

    def __repr__(self) -> str:
        return brief_fields(self)


def eval_set(
    x: Any,
    y: Any,
    partitions: Partition | Sequence[Partition] | None = None,
    *,
    adapt: Partition | Sequence[Partition] | None = None,
) -> EvalSet:
    """Makes an evaluation set of all samples, or of a partition's clients.

    Args:
        x: inputs ``[n_total, *feature]``, an array or a pytree of arrays; dtypes are kept.
        y: targets ``[n_total, ...]``: class labels, or targets of another task.
        partitions: samples of each client, for all runs or one for each of R runs, which may differ
            in samples and clients; None for all samples as one set, without clients.
        adapt: other samples of the same clients, which never train: an algorithm with personal
            models is also scored by those that these clients make of the server's model and these
            samples. One partition, or one for each run, like ``partitions``; None: no adaptation.

    Returns:
        A NumPy-backed evaluation set. If :func:`fedjax_sim.client_data` gets the same ``x`` and
        ``y``, the devices store them once.

    Raises:
        ValueError: if x and y differ in length, a set is empty, or a row is out of range; if adapt
            has other clients, a client without samples, or samples that are scored.

    Example:
        >>> from fedjax_sim.partition import partition_from_lists
        >>> x, y = np.zeros((6, 3)), np.arange(6) % 2
        >>> folds = [partition_from_lists([[0, 1], [2]]), partition_from_lists([[3, 4, 5, 0]])]
        >>> two = eval_set(x, y, folds)
        >>> two.index.tolist(), two.start.tolist()
        ([[0, 1, 2, 0], [0, 3, 4, 5]], [[0, 2, 3], [0, 4, 4]])
    """
    x, y = _samples(x, y)
    if partitions is None:
        whole = np.arange(len(y), dtype=np.int32)
        partitions = Partition(whole, np.array([0, len(y)], np.int32))
    runs, select = _by_run(partitions)
    for p in runs:
        if not len(p.index):
            raise ValueError("partitions must have at least one sample each, got none")
        outside = p.index[(p.index < 0) | (p.index >= len(y))]
        if len(outside):
            raise ValueError(f"partition.index must be in 0 to {len(y) - 1}, got {outside[0]}")
    most, ends = max(len(p.index) for p in runs), max(len(p.start) for p in runs)
    index = np.stack([np.pad(p.index, (0, most - len(p.index))) for p in runs])
    start = np.stack([np.pad(p.start, (0, ends - len(p.start)), mode="edge") for p in runs])
    return EvalSet(
        x=x,
        y=y,
        index=index[select].astype(np.int32),
        start=start[select].astype(np.int32),
        adapt=None if adapt is None else _to_adapt(x, y, _by_run(adapt)[0], runs, select),
    )


def _to_adapt(
    x: PyTree, y: Array, adapt: list[Partition], scored: list[Partition], select: Any
) -> ClientData:
    """Returns the samples that the clients of an evaluation set adapt on."""
    if len(adapt) != len(scored):
        raise ValueError(
            f"adapt must be {len(scored)} partitions as partitions is, got {len(adapt)}"
        )
    for mine, others in zip(adapt, scored, strict=True):
        validate_partition(mine, len(y))
        if mine.repeats or len(mine.sizes) != len(others.sizes):
            raise ValueError(
                f"adapt must have the {len(others.sizes)} clients of partitions, each with samples "
                f"of its own, got {len(mine.sizes)}"
            )
        both = np.intersect1d(mine.index, others.index)
        if both.size:
            raise ValueError(
                f"adapt must not contain samples that are scored, got {both.size}, such as row "
                f"{both[0]}: take them from the clients with client_holdout"
            )
    return ClientData(
        x=x,
        y=y,
        index=in_host_memory(np.concatenate([p.index for p in adapt]), np.int32),
        start=_starts(adapt)[select],
        capacity=int(max(p.sizes.max() for p in adapt)),
    )


def _starts(runs: list[Partition]) -> Array:
    """Returns the starts of each run in the list of all, padded to equally many clients."""
    ends, offsets = max(len(p.start) for p in runs), np.cumsum([0] + [len(p.index) for p in runs])
    starts = [np.pad(p.start, (0, ends - len(p.start)), mode="edge") for p in runs]
    return in_host_memory(np.stack(starts) + offsets[:-1, None], np.int32)


def in_host_memory(values: ArrayLike, dtype: DTypeLike | None = None) -> Array:
    """Returns a NumPy array typed as a JAX array; JAX copies it to the devices when needed."""
    return cast(Array, np.asarray(values, dtype))


def _checked_roots(root: Any, partitions: list[Partition], samples: int) -> list[NDArray[np.int64]]:
    """Returns the server's rows for each partition, which must not belong to a client."""
    common = all(np.ndim(row) == 0 for row in root)
    each = [np.asarray(rows) for rows in ([root] * len(partitions) if common else root)]
    if len(each) != len(partitions):
        raise ValueError(
            f"root must be rows, or one list of rows for each of {len(partitions)} partitions, got "
            f"{len(each)} lists"
        )
    for rows, partition in zip(each, partitions, strict=True):
        if not rows.size:
            raise ValueError("root must have at least one row, got none; use None for no root")
        if rows.dtype.kind not in "iu":
            raise ValueError(f"root must be integers [n_0], got {array_type(rows)}")
        if not 0 <= rows.min() <= rows.max() < samples:
            raise ValueError(
                f"root must be in 0 to {samples - 1}, got {rows.min()} to {rows.max()}"
            )
        if np.unique(rows).size < rows.size:
            raise ValueError("root must have each row once, got one more than once")
        overlap = np.intersect1d(rows, partition.index % samples)
        if overlap.size:
            raise ValueError(
                f"root must not contain rows of clients, got {overlap.size}, such as row "
                f"{overlap[0]}: take them from the clients with take_root"
            )
    return each


def _samples(x: Any, y: Any) -> tuple[PyTree, Array]:
    """Returns the inputs and the targets as NumPy arrays with a row for each sample."""
    targets = np.atleast_1d(plain_array("y", y))
    x = sample_arrays("x", x, len(targets))
    return x, in_host_memory(as_targets(targets, len(targets)))


def _by_run(partitions: Partition | Sequence[Partition]) -> tuple[list[Partition], Any]:
    """Returns the partitions as a list, and the index of arrays stacked over them: 0 for one."""
    if isinstance(partitions, Partition):
        return [partitions], 0
    runs = list(partitions)
    if not all(isinstance(p, Partition) for p in runs) or not runs:
        kinds = ", ".join(sorted({type(p).__name__ for p in runs})) or "none"
        raise ValueError(
            "partitions must be a Partition or a list of them, one for each run, got a list of "
            f"{kinds}; fs.partition.natural makes one from the client of each row, and "
            "partition_from_lists from the rows of each client"
        )
    return runs, slice(None)
