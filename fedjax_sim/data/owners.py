"""The natural clients that a data set names, and the test samples of each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.data.dataset import Dataset
from fedjax_sim.partition.table import Partition


def natural_clients(dataset: Dataset, partition: Partition) -> NDArray[np.int64] | None:
    """Returns the natural client that each client of a partition is.

    Args:
        dataset: whose training samples are dealt.
        partition: of N clients, none of them empty.

    Returns:
        ``int64[N]``, positions in ``client_names``; None if the data name no clients, a client
        holds samples of several, or two clients hold samples of one.
    """
    if dataset.train_client is None or partition.repeats:
        return None
    owner = dataset.train_client[partition.index].astype(np.int64)
    first = owner[partition.start[:-1]]
    whole = np.array_equal(owner, np.repeat(first, partition.sizes))
    return first if whole and np.unique(first).size == first.size else None


def own_test(dataset: Dataset, partition: Partition) -> Partition | None:
    """Returns the test samples of each client of a partition, as the data set has them.

    Args:
        dataset: with the natural client of every training and test sample.
        partition: of its training samples, such as :func:`fedjax_sim.partition.natural`.

    Returns:
        Positions of test samples, for :func:`fedjax_sim.data.eval_set`, with the clients in the
        order of the partition; some may be empty. Test samples of other clients are left out. None
        if the clients are not natural ones, or none of them has a test sample.

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
    clients = natural_clients(dataset, partition)
    if clients is None or dataset.test_client is None:
        return None
    place = np.full(max(clients.max(), dataset.test_client.max(initial=0)) + 1, -1)
    place[clients] = np.arange(clients.size)
    client = place[dataset.test_client]
    rows = np.flatnonzero(client >= 0)
    if not rows.size:
        return None
    index = rows[np.argsort(client[rows], kind="stable")]
    ends = np.cumsum(np.bincount(client[rows], minlength=clients.size))
    return Partition(index.astype(np.int32), np.append(0, ends).astype(np.int32), partition.name)


def names_of(dataset: Dataset, partition: Partition) -> Sequence[str]:
    """Returns the names of the natural clients of a partition; nothing if they have none."""
    clients = natural_clients(dataset, partition) if dataset.client_names else None
    return () if clients is None else [dataset.client_names[k] for k in clients]
