"""From arrays and partitions to the engine's :class:`fedjax_sim.ClientData`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from fedjax_sim.base import Array, ClientData
from fedjax_sim.data.masked import plain_array
from fedjax_sim.data.targets import as_targets
from fedjax_sim.partition.table import Partition, validate_partition


def client_data(
    x: Any,
    y: Any,
    partitions: Partition | Sequence[Partition],
    *,
    root: ArrayLike | Sequence[ArrayLike] | None = None,
) -> ClientData:
    """Pooled samples with one partition, or with one for each seed.

    Args:
        x: ``[n_total, *feature]``; the dtype is kept.
        y: ``[n_total, ...]``: class labels in 0 … M - 1, or any targets of another task.
        partitions: one, or R with equally many clients: then ``start`` is ``int32[R, N + 1]`` into
            one list of integers; samples are never copied. With copies, as from
            :func:`fedjax_sim.data.fedaug`, n_k and an epoch are those of the other samples.
        root: ``int[n_0]``, rows of the server's own samples (:func:`fedjax_sim.data.take_root`),
            for all runs, or a list of R such; None: it has none.

    Returns:
        A NumPy-backed :class:`fedjax_sim.ClientData`.

    Raises:
        ValueError: if y are no targets or partitions no partitions; if a partition does not fit the
            samples or has a client without one, or the partitions differ in their number of
            clients; if root does not fit the samples, or holds samples of a client.

    Example:
        >>> from fedjax_sim import partition
        >>> y = np.arange(8) % 2
        >>> data = client_data(np.zeros((8, 3)), y, [partition.iid(y, 4, seed=s) for s in (0, 1)])
        >>> data.start.tolist()
        [[0, 2, 4, 6, 8], [8, 10, 12, 14, 16]]
    """
    many, stacked = as_runs(x, y, partitions)
    clients = {len(p.start) - 1 for p in many}
    if len(clients) != 1:
        raise ValueError(f"partitions must have equally many clients, got {sorted(clients)}")
    for p in many:
        validate_partition(p, len(y))
    offsets = np.cumsum([0] + [len(p.index) for p in many[:-1]])
    starts = np.stack([p.start + o for p, o in zip(many, offsets, strict=True)]).astype(np.int32)
    roots = [] if root is None else _roots(root, many, len(y))
    edges = np.cumsum([sum(len(p.index) for p in many), *map(len, roots)]).astype(np.int32)
    copies = any((p.index >= len(y)).any() for p in many)
    own = np.array([[np.sum(k < len(y)) for k in p.lists] for p in many] if copies else 0, np.int32)
    shared = any(p.sent for p in many)
    return ClientData(
        x=in_host_memory(x),
        y=in_host_memory(as_targets(np.asarray(y), len(x))),
        index=in_host_memory(np.concatenate([*(p.index for p in many), *roots]), np.int32),
        start=starts[stacked],
        capacity=int(max([np.diff(p.start).max() for p in many] + [len(r) for r in roots])),
        budget=own[stacked] if copies else None,
        root=np.stack([edges[:-1], edges[1:]], axis=1)[stacked] if roots else None,
        copies=copies,
        sent=np.array([p.sent for p in many], np.int32)[stacked] if shared else None,
    )


def streamed(data: ClientData, samples_per_round: int) -> ClientData:
    r"""The same clients, whose samples come in by the round: online learning.

    .. math:: \text{in round } t \text{ a client has its samples } tB,\ \dots,\ (t + 1)B - 1
              \text{ alone}

    They come in the order of the client's list, whether or not it trains; one whose samples have
    all come in takes no step. If models count by samples (``weighting.by_samples``), then by those
    that came in; if all count equally, a model that took no step counts too. The server's own
    samples do not stream.

    With one epoch the loss that a round reports, ``Result.metrics.loss``, is that of samples on
    which no model was trained before. Times ``metrics.samples``, summed over the rounds, it is the
    online loss :math:`\sum_t \ell_t(w_t)`; less that of the best fixed model, it is the regret.

    Refused in the first round: what reads the samples of clients beside their training, such as a
    poll, a finish or peers, and models that return in a later round.

    Args:
        data: the clients, without copies of samples.
        samples_per_round: B.

    Returns:
        The same arrays.

    Raises:
        ValueError: if samples_per_round is below 1, or there are copies (FedAug).

    Source: He et al. 2019 <https://arxiv.org/abs/1910.04956>, section 3, whose B is 1.

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
    if samples_per_round < 1:
        raise ValueError(f"samples_per_round must be at least 1, got {samples_per_round}")
    if data.copies:
        raise ValueError(
            "samples_per_round needs clients without copies of samples: leave out FedAug and "
            "rebalancing"
        )
    return dataclasses.replace(data, samples_per_round=samples_per_round)


def in_host_memory(values: ArrayLike, dtype: DTypeLike | None = None) -> Array:
    """A NumPy array under the type that the engine's fields have; JAX copies it to the devices."""
    return cast(Array, np.asarray(values, dtype))


def _roots(root: Any, partitions: list[Partition], samples: int) -> list[NDArray[np.int64]]:
    """The server's rows for each partition, none of them a client's."""
    common = all(np.ndim(row) == 0 for row in root)
    each = [np.asarray(rows) for rows in ([root] * len(partitions) if common else root)]
    if len(each) != len(partitions):
        raise ValueError(
            f"root must be rows, or one list of rows for each of {len(partitions)} partitions, got "
            f"{len(each)} lists"
        )
    for rows, partition in zip(each, partitions, strict=True):
        if not rows.size:
            raise ValueError("root must have a row at least, got none; without a root give None")
        if not 0 <= rows.min() <= rows.max() < samples:
            raise ValueError(
                f"root must be in 0 to {samples - 1}, got {rows.min()} to {rows.max()}"
            )
        if np.unique(rows).size < rows.size:
            raise ValueError("root must have a row once, got one more than once")
        theirs = np.intersect1d(rows, partition.index % samples)
        if theirs.size:
            raise ValueError(
                f"root must have no client's rows, got {theirs.size}, row {theirs[0]} first: take "
                "them from the clients, see take_root"
            )
    return each


def as_runs(
    x: Any, y: Any, partitions: Partition | Sequence[Partition]
) -> tuple[list[Partition], Any]:
    """The partitions of all runs, and which part of an array that is stacked from them to take.

    Returns:
        A list of one or R partitions; the index 0 for a single one, whose arrays have no axis of
        runs, else all.

    Raises:
        ValueError: if x and y differ in length or are masked, y are no targets, or partitions no
            partitions.
    """
    if len(x) != len(y):
        raise ValueError(f"x and y must have as many rows, got {len(x)} and {len(y)}")
    plain_array("x", x)
    as_targets(plain_array("y", y), len(x))
    if isinstance(partitions, Partition):
        return [partitions], 0
    many = list(partitions)
    if not all(isinstance(p, Partition) for p in many) or not many:
        kinds = ", ".join(sorted({type(p).__name__ for p in many})) or "none"
        raise ValueError(
            "partitions must be a Partition or a list of them, one for each run, got a list of "
            f"{kinds}; fs.partition.partition_from_lists makes one of each client's rows"
        )
    return many, slice(None)
