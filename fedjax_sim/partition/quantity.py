"""Samplers that do not look at the labels: even sizes, and skewed ones."""

import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim.partition.deal import check_arguments, even_sizes
from fedjax_sim.partition.dirichlet import check_alpha, draw_dirichlet, split_by_shares
from fedjax_sim.partition.table import Partition, partition_from_lists


def iid(labels: ArrayLike, clients: int, *, seed: int) -> Partition:
    """Shuffle all samples and cut them into equal parts; classes are not stratified.

    Args:
        labels: int [n]; only their number matters.
        clients: Number of clients K.
        seed: Of the shuffle.

    Returns:
        The partition; every sample is used once, and sizes differ by at most 1.

    Raises:
        ValueError: clients is not in 1 … n.

    >>> iid(np.zeros(10, int), 4, seed=0).sizes.tolist()
    [3, 3, 2, 2]
    """
    y, _, rng = check_arguments(labels, clients, seed)
    cuts = np.cumsum(even_sizes(y.size, clients))[:-1]
    return partition_from_lists(np.split(rng.permutation(y.size), cuts), "iid")


def quantity_skew(labels: ArrayLike, clients: int, *, alpha: float, seed: int) -> Partition:
    """Draw the sizes from Dir_K(alpha) and deal a shuffle of all samples by them.

    Every client has one sample; the other n - K are split by the shares and rounded so that they
    add up.

    Args:
        labels: int [n]; only their number matters.
        clients: Number of clients K.
        alpha: Concentration, positive; smaller is more skewed.
        seed: Of the sizes and of the shuffle.

    Returns:
        The partition; every sample is used once, and no client is empty.

    Raises:
        ValueError: alpha is not positive and finite, or clients exceeds the number of samples.

    References:
        Li et al., "Federated Learning on Non-IID Data Silos", quantity skew.

    >>> p = quantity_skew(np.zeros(100, int), 4, alpha=1.0, seed=0)
    >>> p.name, p.sizes.tolist()
    ('quantity(1)', [39, 58, 2, 1])
    """
    y, _, rng = check_arguments(labels, clients, seed)
    check_alpha(alpha)
    sizes = 1 + split_by_shares(y.size - clients, draw_dirichlet(rng, alpha, clients))
    order = rng.permutation(y.size)
    return partition_from_lists(np.split(order, np.cumsum(sizes)[:-1]), f"quantity({alpha:g})")
