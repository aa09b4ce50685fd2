"""Samplers that give a client few labels, as in McMahan et al. and in NIID-Bench."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.partition.deal import check_arguments, check_integer, deal, even_sizes
from fedjax_sim.partition.owners import draw_shares
from fedjax_sim.partition.table import Partition, partition_from_owners


def shards(labels: ArrayLike, clients: int, *, shards_per_client: int = 2, seed: int) -> Partition:
    """The samples are sorted by label and cut into equal shards, of which every client gets some.

    A shard holds one label, or two where it reaches over an end; a client has about as many labels
    as shards, or fewer if two of its shards are alike.

    Args:
        labels: ``int[n]``.
        clients: K.
        shards_per_client: s; there are Ks shards of n/(Ks) samples, or one more.
        seed: of the order within a label, and of who gets which shards.

    Returns:
        The partition; every sample is used once, and client sizes differ by at most s.

    Raises:
        ValueError: if there are fewer samples than shards.

    Source: McMahan et al. 2017 <https://arxiv.org/abs/1602.05629>, section 3: 200 shards of 300
    samples of MNIST, 2 for each of 100 clients.

    Example:
        >>> p = shards(np.arange(40) % 4, 4, seed=0)
        >>> p.name, p.sizes.tolist()
        ('shards(2)', [10, 10, 10, 10])
    """
    y, _, rng = check_arguments(labels, clients, seed)
    each = check_integer("shards_per_client", shards_per_client)
    if not 1 <= each <= y.size // clients:
        raise ValueError(
            f"shards_per_client must be in 1 to {y.size // clients} for {y.size} samples at "
            f"{clients} clients, got {each}"
        )
    shuffled = rng.permutation(y.size)
    by_label = shuffled[np.argsort(y[shuffled], kind="stable")]
    owner = np.empty(y.size, np.int64)
    of_shard = rng.permutation(np.repeat(np.arange(clients), each))
    owner[by_label] = np.repeat(of_shard, even_sizes(y.size, clients * each))
    return partition_from_owners(owner, clients, f"shards({each})")


def label_sets(labels: ArrayLike, clients: int, *, labels_per_client: int, seed: int) -> Partition:
    r"""Every client owns t random labels, and the samples of a label go evenly to its owners.

    This is :math:`\#C = t` of NIID-Bench. One label is dealt in turns, so that each has an owner;
    the others are random. So labels have different numbers of owners, and clients different sizes:
    with equal numbers of owners it is :func:`fedjax_sim.partition.limit_label` with f = 1.

    Args:
        labels: ``int[n]``; M is the number of different labels.
        clients: K.
        labels_per_client: t, in 1 … M, and at least M/K. With fewer clients than labels more than
            one is dealt in turns.
        seed: of the label sets and of the deal.

    Returns:
        The partition; every sample is used once, and no client is empty.

    Raises:
        ValueError: if t is out of range, or a client's labels have fewer samples than owners, so
            that it gets none.

    Source: Li, Diao, Chen, He 2022 <https://arxiv.org/abs/2102.02079>, quantity-based label
    imbalance; the labels in turns are as in the authors' code.

    Example:
        >>> p = label_sets(np.arange(40) % 4, 4, labels_per_client=1, seed=0)
        >>> p.name, p.sizes.tolist()
        ('label_sets(1)', [10, 10, 10, 10])
    """
    y, counts, rng = check_arguments(labels, clients, seed)
    t = check_integer("labels_per_client", labels_per_client)
    classes = counts.size
    in_turns = -(-classes // clients)
    if not in_turns <= t <= classes:
        raise ValueError(
            f"labels_per_client must be in {in_turns} to {classes} with {classes} classes and "
            f"{clients} clients, got {t}"
        )
    owns = _label_sets(clients, t, classes, in_turns, rng)
    columns = np.zeros((classes, clients), np.int64)
    draw_shares(owns, rng).add_to(columns, counts)
    empty = int((~columns.any(axis=0)).sum())
    if empty:
        raise ValueError(
            f"clients must all get samples, got {clients}, of which {empty} are empty as a label "
            f"has {int(counts.min())}; use fewer clients or more labels_per_client"
        )
    return deal(y, columns.T, rng, f"label_sets({t})")


def _label_sets(
    clients: int, t: int, classes: int, in_turns: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Which client owns which label, ``bool[K, M]``: t in a row, at least one in a column."""
    order = np.resize(rng.permutation(classes), (clients, in_turns))
    chance, rows = rng.random((clients, classes)), np.arange(clients)[:, None]
    chance[rows, order] = -1.0
    owns = np.zeros((clients, classes), bool)
    owns[rows, np.argpartition(chance, t - 1, axis=1)[:, :t]] = True
    return owns
