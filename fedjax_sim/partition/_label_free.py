"""Samplers that ignore the labels: even and skewed sizes, and natural clients."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.base.words import array_type
from fedjax_sim.partition._dirichlet import check_alpha, draw_dirichlet, split_by_shares
from fedjax_sim.partition.deal import check_integer, check_number, even_sizes
from fedjax_sim.partition.table import Partition, partition_from_lists, partition_from_owners


def iid(labels: ArrayLike, clients: int, *, seed: int) -> Partition:
    """Shuffles all samples and cuts them into equal parts, without stratification by class.

    Args:
        labels: ``[n, ...]``, any targets; only their number is used.
        clients: K.
        seed: random seed.

    Returns:
        The partition; every sample is used once, and sizes differ by at most 1.

    Raises:
        ValueError: if clients is not in 1 … n.

    Example:
        >>> iid(np.zeros(10, int), 4, seed=0).sizes.tolist()
        [3, 3, 2, 2]
    """
    samples, rng = check_number(labels, clients, seed)
    return _deal_sizes(even_sizes(samples, clients), rng, "iid")


def quantity(labels: ArrayLike, clients: int, *, alpha: float, seed: int) -> Partition:
    r"""Draws the client sizes from :math:`Dir_K(\alpha)` and deals shuffled samples.

    Each client gets one sample; the other n - K are split by the shares, rounded to the same total.

    Args:
        labels: ``[n, ...]``, any targets; only their number is used.
        clients: K.
        alpha: α, the concentration, positive; smaller is more skewed.
        seed: random seed.

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
    samples, rng = check_number(labels, clients, seed)
    check_alpha(alpha)
    sizes = 1 + split_by_shares(samples - clients, draw_dirichlet(rng, alpha, clients))
    return _deal_sizes(sizes, rng, f"quantity({alpha:g})")


def power_law(labels: ArrayLike, clients: int, *, exponent: float, seed: int) -> Partition:
    r"""Deals shuffled samples with client sizes that follow a power law of a random rank.

    .. math:: n_{(r)} - 1 \propto r^{-a}, \qquad r = 1, \dots, K

    Each client gets one sample; the other n - K are split by these shares, rounded to the same
    total. The seed changes which client has which size, but not the sizes.

    Args:
        labels: ``[n, ...]``, any targets; only their number is used.
        clients: K.
        exponent: a, at least 0; 0 is even, larger is more skewed.
        seed: random seed.

    Returns:
        The partition; every sample is used once, and no client is empty.

    Raises:
        ValueError: if the exponent is negative or not finite, or there are more clients than
            samples.

    Source: Li et al. 2020 <https://arxiv.org/abs/1812.06127>, whose client sizes follow a power
    law.

    Example:
        >>> p = power_law(np.zeros(100, int), 4, exponent=1, seed=0)
        >>> p.name, sorted(p.sizes.tolist())
        ('power_law(1)', [13, 16, 24, 47])
    """
    samples, rng = check_number(labels, clients, seed)
    if not 0 <= exponent < math.inf:
        raise ValueError(f"exponent must be at least 0 and finite, got {exponent}")
    shares = np.arange(1, clients + 1, dtype=np.float64) ** -exponent
    sizes = 1 + split_by_shares(samples - clients, shares / shares.sum())
    return _deal_sizes(rng.permutation(sizes), rng, f"power_law({exponent:g})")


def natural(groups: ArrayLike, *, min_size: int = 1) -> Partition:
    """Makes each natural group (speaking role, hospital, writer) a client, in the order of its id.

    Args:
        groups: the group of each sample, n integers or texts.
        min_size: smallest group to use; samples of smaller groups are unused.

    Returns:
        The partition; each sample of a selected group is used once.

    Raises:
        ValueError: if groups are not integers or texts ``[n]``, or no group has min_size samples.

    Example:
        >>> p = natural([7, 3, 7, 7, 9], min_size=1)
        >>> p.name, p.sizes.tolist(), p.index.tolist()
        ('natural', [1, 3, 1], [1, 0, 2, 3, 4])
        >>> natural(["b", "c", "a"]).index.tolist()
        [2, 0, 1]
    """
    group = np.asarray(groups)
    if group.dtype == object and all(isinstance(name, str) for name in group):  # as of pandas
        group = group.astype(np.str_)
    if group.ndim != 1 or not group.size or group.dtype.kind not in "iuU":
        raise ValueError(f"groups must be integers or texts [n], got {array_type(group)}")
    _, rank, sizes = np.unique(group, return_inverse=True, return_counts=True)
    check_integer("min_size", min_size, 1, sizes.max(), ", the size of the largest group")
    kept = np.flatnonzero(sizes >= min_size)
    by_group = np.split(np.argsort(rank, kind="stable"), np.cumsum(sizes)[:-1])
    name = f"natural({min_size})" if min_size > 1 else "natural"
    return partition_from_lists([by_group[rank] for rank in kept], name)


def _deal_sizes(sizes: NDArray[np.int64], rng: np.random.Generator, name: str) -> Partition:
    owner = np.empty(sizes.sum(), np.int64)
    owner[rng.permutation(owner.size)] = np.repeat(np.arange(sizes.size), sizes)
    return partition_from_owners(owner, sizes.size, name)
