"""Splits by client: folds, holdouts, the server's root set, and natural test samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.data.dataset import Dataset
from fedjax_sim.partition.table import Partition, partition_from_lists


class Fold(NamedTuple):
    """A split of N clients into three roles; each field is ``int64``, ascending client numbers.

    Attributes:
        train: clients to train on.
        validation: clients used to select the round or a setting.
        test: clients used for the final score.
    """

    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]


def client_folds(clients: int, folds: int = 5, *, seed: int) -> list[Fold]:
    r"""Splits clients for cross-validation; each client is a test client in exactly one fold.

    The clients, in random order, are cut into F parts whose sizes differ by at most one. Fold f
    tests on part f and trains on

    .. math:: N - 2 \lceil N / F \rceil

    clients, the same number in every fold, so that all folds run as one batch. Its validation
    clients are the others: part f + 1 and at most two clients left over from rounding.

    To run all folds at once, train on
    ``client_data(x, y, [take_clients(p, fold.train) for fold in folds])`` and score
    ``eval_set(x, y, [take_clients(p, fold.test) for fold in folds])``.

    Args:
        clients: N.
        folds: F, at least 3; 5 gives 3/5 for training and 1/5 each for validation and test.
        seed: random seed of the order.

    Returns:
        F folds.

    Raises:
        ValueError: if there are fewer than 3 folds, or no client would be left to train.

    Source: Xue, Klabjan, Luo 2021 <https://arxiv.org/abs/2108.07433>, sections IV-B and C: 60, 20
    and 20 of 100 clients; 85, 29 and 29 of 143; 98, 33 and 33 of 164.

    Example:
        >>> [tuple(map(len, fold)) for fold in client_folds(143, seed=0)]
        [(85, 29, 29), (85, 29, 29), (85, 29, 29), (85, 30, 28), (85, 30, 28)]
    """
    if folds < 3:
        raise ValueError(f"folds must be at least 3 (train, validation, test), got {folds}")
    train = clients - 2 * -(-clients // folds)
    if clients < folds or train < 1:
        raise ValueError(
            f"clients must be enough for {folds} folds with one left to train, got {clients}"
        )
    parts = np.array_split(np.random.default_rng(seed).permutation(clients), folds)
    result = []
    for f in range(folds):
        others = np.concatenate(parts[f + 1 :] + parts[:f])
        first = len(others) - train
        result.append(Fold(np.sort(others[first:]), np.sort(others[:first]), np.sort(parts[f])))
    return result


def take_clients(partition: Partition, clients: ArrayLike) -> Partition:
    """Selects some clients of a partition.

    Args:
        partition: of N clients.
        clients: ``int[K]``, distinct client numbers.

    Returns:
        A partition of K clients, in the given order.

    Raises:
        ValueError: if clients are not distinct integers in 0 to N - 1.

    Example:
        >>> p = partition_from_lists([[0, 1], [2], [3, 4, 5]])
        >>> take_clients(p, [2, 0]).index.tolist(), take_clients(p, [2, 0]).start.tolist()
        ([3, 4, 5, 0, 1], [0, 3, 5])
    """
    lists, numbers = partition.lists, np.asarray(clients)
    valid = numbers.ndim == 1 and numbers.dtype.kind in "iu" and numbers.size > 0
    text = np.array2string(numbers, threshold=8, edgeitems=3, max_line_width=1000)
    if not valid or not 0 <= numbers.min() <= numbers.max() < len(lists):
        raise ValueError(f"clients must be integers [K] in 0 to {len(lists) - 1}, got {text}")
    if np.unique(numbers).size < numbers.size:
        raise ValueError(f"clients must have each client once, got {text}")
    return _replace_lists(partition, [lists[k] for k in numbers])


def _replace_lists(partition: Partition, lists: Sequence[ArrayLike]) -> Partition:
    new = partition_from_lists(lists)
    return dataclasses.replace(partition, index=new.index, start=new.start)


def client_holdout(
    partition: Partition, fraction: float, *, seed: int | None = None
) -> tuple[Partition, Partition]:
    """Holds out a share of each client's samples from training.

    A client with two or more samples has at least one in each part; a single sample is trained on.

    Args:
        partition: of N clients.
        fraction: in 0 < fraction < 1; ``round(fraction * n_k)`` samples are held out.
        seed: random seed; None holds out each client's last samples. Use None if neighbouring
            samples are similar (text, time series), as a random share would leak into training.

    Returns:
        The training and the test samples, each a partition of N clients; clients may be empty in
        the second.

    Raises:
        ValueError: if fraction is out of range, or samples occur more than once.

    Example:
        >>> train, test = client_holdout(partition_from_lists([range(10), [10]]), 0.2)
        >>> train.sizes.tolist(), test.index.tolist(), test.start.tolist()
        ([8, 1], [8, 9], [0, 2, 2])
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must be above 0 and below 1, got {fraction}")
    partition.check_unshared("hold out before sharing or augmenting")
    rng = None if seed is None else np.random.default_rng(seed)
    train, test = [], []
    for positions in partition.lists:
        order = positions if rng is None else rng.permutation(positions)
        n = len(positions)
        held_out = min(max(round(fraction * n), 1), n - 1)
        train.append(order[: n - held_out])
        test.append(order[n - held_out :])
    return _replace_lists(partition, train), _replace_lists(partition, test)


def take_root(
    labels: ArrayLike, partition: Partition, size: int, *, seed: int
) -> tuple[Partition, NDArray[np.int64]]:
    """Moves a small class-balanced set of samples from the clients to the server.

    Classes contribute equally; if the size is not a multiple of their number, randomly chosen ones
    contribute one more. Samples are random, but a client's last one is never taken.

    Args:
        labels: ``int[n]``, labels of the pooled samples.
        partition: of N clients.
        size: size of the server's set, at least 1; Ozdayi et al. use 5 % of the training data.
        seed: random seed.

    Returns:
        The clients' remaining samples, and the server's rows, ``int64[size]``, ascending: ``root``
        of :func:`fedjax_sim.data.client_data`.

    Raises:
        ValueError: if size is out of range, a class has too few samples that can be taken, or
            samples occur more than once.

    Source: Ozdayi, Kantarcioglu, Iyer, "Improving accuracy of federated learning in non-IID
    settings", 2020 <https://arxiv.org/abs/2010.15582>, section 3.1.

    Example:
        >>> p = partition_from_lists([[0, 1, 2], [3, 4, 5]])
        >>> kept, root = take_root([0, 0, 0, 1, 1, 1], p, 4, seed=0)
        >>> kept.sizes.tolist(), root.tolist()
        ([1, 1], [0, 2, 3, 5])
    """
    if not 1 <= size < len(partition.index):
        raise ValueError(f"size must be in 1..{len(partition.index) - 1}, got {size}")
    partition.check_unshared("take the server's before sharing or augmenting")
    rng = np.random.default_rng(seed)
    y = np.asarray(labels)[partition.index]
    classes, label = np.unique(y, return_inverse=True)
    wanted = np.full(classes.size, size // classes.size)
    wanted[rng.permutation(classes.size)[: size % classes.size]] += 1
    owner = np.repeat(np.arange(partition.sizes.size), partition.sizes)
    left = partition.sizes.copy()
    taken = np.zeros(y.size, bool)
    for entry in rng.permutation(y.size):
        if wanted[label[entry]] and left[owner[entry]] > 1:
            wanted[label[entry]] -= 1
            left[owner[entry]] -= 1
            taken[entry] = True
    if wanted.any():
        short = int(np.flatnonzero(wanted)[0])
        raise ValueError(
            f"size must leave every client its last sample, got {size}: class "
            f"{classes[short]} lacks {wanted[short]} samples; try a smaller size or another seed"
        )
    lists = np.split(partition.index[~taken], np.cumsum(left)[:-1])
    return _replace_lists(partition, lists), np.sort(partition.index[taken])


def shift_rows(partitions: Sequence[Partition], rows: int) -> list[Partition]:
    """Shifts partition r to the r-th of several copies of the samples, laid end to end.

    Args:
        partitions: R partitions.
        rows: n, the number of samples in one copy.

    Raises:
        ValueError: if a partition has copies or rows beyond n: shift before augmenting.

    Example:
        >>> p = partition_from_lists([[0, 1], [2]])
        >>> [q.index.tolist() for q in shift_rows([p, p], 3)]
        [[0, 1, 2], [3, 4, 5]]
    """
    largest = max((int(p.index.max(initial=0)) for p in partitions), default=0)
    if largest >= rows:
        raise ValueError(f"partitions must have rows in 0 to {rows - 1}, got {largest}")
    return [
        dataclasses.replace(p, index=(p.index + r * rows).astype(np.int32))
        for r, p in enumerate(partitions)
    ]


def _natural_clients(dataset: Dataset, partition: Partition) -> NDArray[np.int64] | None:
    """Returns the natural client that each client of a partition is, ``int64[N]``, or None."""
    if dataset.train_client is None or partition.repeats:
        return None
    owner = dataset.train_client[partition.index].astype(np.int64)
    first = owner[partition.start[:-1]]
    whole = np.array_equal(owner, np.repeat(first, partition.sizes))
    return first if whole and np.unique(first).size == first.size else None


def own_test(dataset: Dataset, partition: Partition) -> Partition | None:
    """Returns each natural client's own test samples.

    Args:
        dataset: data set with the natural client of every training and test sample.
        partition: partition of the training samples, such as
            :func:`fedjax_sim.partition.natural`.

    Returns:
        Positions of test samples, for :func:`fedjax_sim.data.eval_set`, with clients in the order
        of the partition, some possibly empty; test samples of other clients are left out. None if
        the partition's clients are not natural clients, or have no test samples.

    Example:
        >>> from fedjax_sim import data, partition
        >>> last = [False, False, False, True, True]
        >>> mine = data.from_arrays(
        ...     "mine", np.eye(5), [0, 1, 0, 1, 1], test=last, client=list("ccabb")
        ... )
        >>> clients = partition.natural(mine.train_client)
        >>> own_test(mine, clients) is None
        True
        >>> mine = mine._replace(test_client=np.array([2, 1]))
        >>> own_test(mine, clients).lists
        [array([], dtype=int32), array([0], dtype=int32)]
    """
    clients = _natural_clients(dataset, partition)
    if clients is None or dataset.test_client is None:
        return None
    position = np.full(max(clients.max(), dataset.test_client.max(initial=0)) + 1, -1)
    position[clients] = np.arange(clients.size)
    client = position[dataset.test_client]
    rows = np.flatnonzero(client >= 0)
    if not rows.size:
        return None
    index = rows[np.argsort(client[rows], kind="stable")]
    ends = np.cumsum(np.bincount(client[rows], minlength=clients.size))
    return Partition(index.astype(np.int32), np.append(0, ends).astype(np.int32), partition.name)


def names_of(dataset: Dataset, partition: Partition) -> Sequence[str]:
    """Returns the names of a partition's natural clients; () if they are not natural clients."""
    clients = _natural_clients(dataset, partition) if dataset.client_names else None
    return () if clients is None else [dataset.client_names[k] for k in clients]
