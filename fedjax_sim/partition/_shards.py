"""Samplers that give each client few labels, as in McMahan et al. and in NIID-Bench."""

import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim.partition._limit_label import draw_shares
from fedjax_sim.partition.deal import check_arguments, check_integer, deal, even_sizes
from fedjax_sim.partition.table import Partition, partition_from_owners


def shards(labels: ArrayLike, clients: int, *, shards_per_client: int = 2, seed: int) -> Partition:
    """Sorts samples by label, cuts them into equal shards, and deals each client some shards.

    A shard holds one label, or two at a boundary; a client has about as many labels as shards, or
    fewer if two of its shards have the same label.

    Args:
        labels: ``int[n]``.
        clients: K.
        shards_per_client: s; there are Ks shards of n/(Ks) samples, or one more.
        seed: random seed.

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
    why = f" for {y.size} samples and {clients} clients"
    each = check_integer("shards_per_client", shards_per_client, 1, y.size // clients, why)
    shuffled = rng.permutation(y.size)
    by_label = shuffled[np.argsort(y[shuffled], kind="stable")]
    owner = np.empty(y.size, np.int64)
    shard_owner = rng.permutation(np.repeat(np.arange(clients), each))
    owner[by_label] = np.repeat(shard_owner, even_sizes(y.size, clients * each))
    return partition_from_owners(owner, clients, f"shards({each})")


def label_sets(labels: ArrayLike, clients: int, *, labels_per_client: int, seed: int) -> Partition:
    r"""Gives each client t random labels, and splits each label evenly among its owners.

    This is :math:`\#C = t` of NIID-Bench. A client's first label is assigned in turn, so that every
    label has an owner; the others are random. Labels therefore differ in their number of owners,
    and clients in size; :func:`fedjax_sim.partition.limit_label` with f = 1 has equally many
    owners.

    Args:
        labels: ``int[n]``; M is the number of different labels.
        clients: K.
        labels_per_client: t, in 1 … M, and at least M/K. With fewer clients than labels, more than
            one is assigned in turn.
        seed: random seed.

    Returns:
        The partition; every sample is used once, and no client is empty.

    Raises:
        ValueError: if t is out of range, or a label has fewer samples than owners, so that a client
            would be empty.

    Source: Li, Diao, Chen, He 2022 <https://arxiv.org/abs/2102.02079>, quantity-based label
    imbalance; labels are assigned in turn as in the authors' code.

    Example:
        >>> p = label_sets(np.arange(40) % 4, 4, labels_per_client=1, seed=0)
        >>> p.name, p.sizes.tolist()
        ('label_sets(1)', [10, 10, 10, 10])
    """
    y, counts, rng = check_arguments(labels, clients, seed)
    classes = counts.size
    in_turn = -(-classes // clients)
    why = f" with {classes} classes and {clients} clients"
    t = check_integer("labels_per_client", labels_per_client, in_turn, classes, why)
    order = np.resize(rng.permutation(classes), (clients, in_turn))
    chance, rows = rng.random((clients, classes)), np.arange(clients)[:, None]
    chance[rows, order] = -1.0
    owns = np.zeros((clients, classes), bool)
    owns[rows, np.argpartition(chance, t - 1, axis=1)[:, :t]] = True
    columns = np.zeros((classes, clients), np.int64)
    draw_shares(owns, rng).add_to(columns, counts)
    empty = int((~columns.any(axis=0)).sum())
    if empty:
        raise ValueError(
            f"clients must all get samples, got {clients}, of which {empty} are empty as a label "
            f"has {int(counts.min())}; use fewer clients or more labels_per_client"
        )
    return deal(y, columns.T, rng, f"label_sets({t})")
