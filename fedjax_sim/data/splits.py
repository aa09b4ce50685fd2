"""Who trains and who is scored: folds of clients, and a part of each client's own samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.partition.table import Partition, partition_from_lists


class Fold(NamedTuple):
    """One way to deal N clients to three roles; each an ``int64`` array of clients, ascending.

    Attributes:
        train: those that train.
        validation: those that choose the round (or a setting).
        test: those that are reported.
    """

    train: NDArray[np.int64]
    validation: NDArray[np.int64]
    test: NDArray[np.int64]


def client_folds(clients: int, folds: int = 5, *, seed: int) -> list[Fold]:
    r"""Cross-validation by client: each client is a test client in exactly one fold.

    The clients, in random order, are cut into F parts whose sizes differ by at most one. Fold f
    tests on part f and trains on

    .. math:: N - 2 \lceil N / F \rceil

    clients, equally many in every fold, so that all folds run as one batch; the others, part f + 1
    and what the rounding leaves (at most two clients), are its validation clients.

    All folds at once: ``client_data(x, y, [take_clients(p, fold.train) for fold in made])`` trains,
    and ``eval_set(x, y, [take_clients(p, fold.test) for fold in made])`` is scored.

    Args:
        clients: N.
        folds: F, at least 3; 5 gives 3/5 for training and 1/5 each for validation and test.
        seed: of the order.

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
            f"clients must suffice for {folds} folds and leave one to train, got {clients}"
        )
    parts = np.array_split(np.random.default_rng(seed).permutation(clients), folds)
    made = []
    for f in range(folds):
        others = np.concatenate(parts[f + 1 :] + parts[:f])
        last = len(others) - train
        made.append(Fold(np.sort(others[last:]), np.sort(others[:last]), np.sort(parts[f])))
    return made


def take_clients(partition: Partition, clients: ArrayLike) -> Partition:
    """The samples of some clients alone.

    Args:
        partition: of N clients.
        clients: ``int[K]``, which of them, each once.

    Returns:
        A partition of K clients, in the order given.

    Raises:
        ValueError: if clients are no different numbers from 0 to N - 1.

    Example:
        >>> p = partition_from_lists([[0, 1], [2], [3, 4, 5]])
        >>> take_clients(p, [2, 0]).index.tolist(), take_clients(p, [2, 0]).start.tolist()
        ([3, 4, 5, 0, 1], [0, 3, 5])
    """
    lists, chosen = partition.lists, np.asarray(clients)
    whole = chosen.ndim == 1 and chosen.dtype.kind in "iu" and chosen.size > 0
    if not whole or not 0 <= chosen.min() <= chosen.max() < len(lists):
        raise ValueError(
            f"clients must be integers [K] in 0 to {len(lists) - 1}, got {_short(clients)}"
        )
    if np.unique(chosen).size < chosen.size:
        raise ValueError(f"clients must have a client once, got {_short(clients)}")
    return _with_lists(partition, [lists[k] for k in chosen])


def _with_lists(partition: Partition, lists: Sequence[ArrayLike]) -> Partition:
    """Other samples, and all else that a partition says of itself."""
    made = partition_from_lists(lists)
    return dataclasses.replace(partition, index=made.index, start=made.start)


def _short(values: ArrayLike) -> str:
    """On one line, however many."""
    return np.array2string(np.asarray(values), threshold=8, edgeitems=3, max_line_width=1000)


def client_holdout(
    partition: Partition, fraction: float, *, seed: int | None = None
) -> tuple[Partition, Partition]:
    """A share of each client's own samples, kept from training.

    A client with two or more samples has at least one in each part; a single one is trained on.

    Args:
        partition: of N clients.
        fraction: in 0 < fraction < 1; ``round(fraction * n_k)`` samples are held out.
        seed: of the random choice; None holds out each client's last samples: if neighbours
            resemble each other (text, time series), a random share would be no test.

    Returns:
        The training and the test samples, each a partition of N clients; in the second a client may
        be empty.

    Raises:
        ValueError: if fraction is out of range, or samples occur more than once.

    Example:
        >>> train, test = client_holdout(partition_from_lists([range(10), [10]]), 0.2)
        >>> train.sizes.tolist(), test.index.tolist(), test.start.tolist()
        ([8, 1], [8, 9], [0, 2, 2])
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must be above 0 and below 1, got {fraction}")
    if partition.repeats:
        raise ValueError(
            "partition must have every sample once: hold out before sharing or augmenting"
        )
    rng = None if seed is None else np.random.default_rng(seed)
    kept, held = [], []
    for own in partition.lists:
        order = own if rng is None else rng.permutation(own)
        n = len(own)
        out = min(max(round(fraction * n), 1), n - 1)
        kept.append(order[: n - out])
        held.append(order[n - out :])
    return _with_lists(partition, kept), _with_lists(partition, held)


def take_root(
    labels: ArrayLike, partition: Partition, size: int, *, seed: int
) -> tuple[Partition, NDArray[np.int64]]:
    """Takes a small balanced set from the clients and gives it to the server.

    Each class gives as many samples; if the size is no multiple of the classes, random ones give
    one more. The samples are random, but the last one of a client is never taken.

    Args:
        labels: ``int[n]``, of the pooled samples.
        partition: of N clients.
        size: of the server's set, at least 1; in Ozdayi et al. 5 % of the training data.
        seed: of all that is random.

    Returns:
        What the clients keep, and the server's rows, ``int64[size]``, ascending: ``root`` of
        :func:`fedjax_sim.data.client_data`.

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
    if partition.repeats:
        raise ValueError(
            "partition must have every sample once: take the server's before sharing or augmenting"
        )
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
            f"{classes[short]} lacks {wanted[short]} samples; try a smaller one or another seed"
        )
    lists = np.split(partition.index[~taken], np.cumsum(left)[:-1])
    return _with_lists(partition, lists), np.sort(partition.index[taken])


def shift_rows(partitions: Sequence[Partition], rows: int) -> list[Partition]:
    """Moves partition r to the r-th of several copies of the samples, laid end to end.

    Args:
        partitions: R of them.
        rows: n, the samples of one copy.

    Raises:
        ValueError: if a partition has copies, or rows beyond n: shift, then augment.

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
