"""Samplers that do not look at the labels: even sizes, and skewed ones."""

import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim.partition._dirichlet import check_alpha, draw_dirichlet, split_by_shares
from fedjax_sim.partition.deal import check_arguments, even_sizes
from fedjax_sim.partition.table import Partition, partition_from_lists


def iid(labels: ArrayLike, clients: int, *, seed: int) -> Partition:
    """All samples are shuffled and cut into equal parts; classes are not stratified.

    Args:
        labels: ``int[n]``; only their number matters.
        clients: K.
        seed: of the shuffle.

    Returns:
        The partition; every sample is used once, and sizes differ by at most 1.

    Raises:
        ValueError: if clients is not in 1 … n.

    Example:
        >>> iid(np.zeros(10, int), 4, seed=0).sizes.tolist()
        [3, 3, 2, 2]
    """
    y, _, rng = check_arguments(labels, clients, seed)
    cuts = np.cumsum(even_sizes(y.size, clients))[:-1]
    return partition_from_lists(np.split(rng.permutation(y.size), cuts), "iid")


def quantity(labels: ArrayLike, clients: int, *, alpha: float, seed: int) -> Partition:
    r"""The sizes are drawn from :math:`Dir_K(\alpha)`, and a shuffle of the samples dealt by them.

    Every client has one sample; the other n - K are split by the shares, rounded so that they add
    up.

    Args:
        labels: ``int[n]``; only their number matters.
        clients: K.
        alpha: α, the concentration, positive; smaller is more skewed.
        seed: of the sizes and of the shuffle.

    Returns:
        The partition; every sample is used once, and no client is empty.

    Raises:
        ValueError: if alpha is not positive and finite, or there are more clients than samples.

    Source: Li, Diao, Chen, He 2022 <https://arxiv.org/abs/2102.02079>, quantity skew.

    Example:
        >>> p = quantity(np.zeros(100, int), 4, alpha=1.0, seed=0)
        >>> p.name, p.sizes.tolist()
        ('quantity(1)', [39, 58, 2, 1])
    """
    y, _, rng = check_arguments(labels, clients, seed)
    check_alpha(alpha)
    sizes = 1 + split_by_shares(y.size - clients, draw_dirichlet(rng, alpha, clients))
    order = rng.permutation(y.size)
    return partition_from_lists(np.split(order, np.cumsum(sizes)[:-1]), f"quantity({alpha:g})")
