"""How far the clients' labels are from the labels of all, and how unequal their sizes are."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import rel_entr


def client_emds(table: ArrayLike) -> NDArray[np.float64]:
    """Distance of every client's label distribution from that of all data.

        EMD_k = Σ_y |p_k(y) - p(y)|

    Args:
        table: Samples per client and class, int [N, M].

    Returns:
        EMD_k, float64 [N], from 0 (as all) up to less than 2.

    Raises:
        ValueError: Not a table of counts, or clients without samples.

    >>> client_emds([[4, 0], [0, 4]]).tolist()
    [1.0, 1.0]
    """
    own, pooled = _distributions(table)
    distances: NDArray[np.float64] = np.abs(own - pooled).sum(axis=1)
    return distances


def client_kls(table: ArrayLike) -> NDArray[np.float64]:
    """Kullback-Leibler divergence of every client's label distribution from that of all data.

        KL_k = Σ_y p_k(y) ln(p_k(y) / p(y))

    Args:
        table: Samples per client and class, int [N, M].

    Returns:
        KL_k in nats, float64 [N], 0 or more and finite: a client has no class that all data lack.

    Raises:
        ValueError: Not a table of counts, or clients without samples.

    References:
        Cornelis (thesis), eq. 3.2 (which prints the fraction upside down, so with the other sign).

    >>> client_kls([[4, 0], [0, 4]]).round(4).tolist()
    [0.6931, 0.6931]
    """
    own, pooled = _distributions(table)
    divergences: NDArray[np.float64] = rel_entr(own, pooled).sum(axis=1)
    return divergences


def client_jsds(table: ArrayLike) -> NDArray[np.float64]:
    """Jensen-Shannon divergence between every client's label distribution and that of all data.

        JSD_k = KL(p_k || m)/2 + KL(p || m)/2,  m = (p_k + p)/2

    Args:
        table: Samples per client and class, int [N, M].

    Returns:
        JSD_k in nats, float64 [N], in 0 … ln 2.

    Raises:
        ValueError: Not a table of counts, or clients without samples.

    >>> client_jsds([[1, 1], [3, 3]]).tolist()
    [0.0, 0.0]
    """
    own, pooled = _distributions(table)
    middle = (own + pooled) / 2
    halves: NDArray[np.float64] = (rel_entr(own, middle) + rel_entr(pooled, middle)) / 2
    return halves.sum(axis=1)


def emd(table: ArrayLike) -> float:
    """Earth mover's distance of a partition, clients weighted by their samples.

        EMD = Σ_k n_k/Σn · Σ_y |p_k(y) - p(y)|

    Args:
        table: Samples per client and class, int [N, M].

    Returns:
        EMD, in 0 … 2.

    Raises:
        ValueError: Not a table of counts, or clients without samples.

    References:
        Zhao et al., "Federated Learning with Non-IID Data"; Cornelis (thesis), eq. 3.3.

    >>> emd([[6, 0], [0, 2]])
    0.75
    """
    return _weighted(table, client_emds(table))


def kl(table: ArrayLike) -> float:
    """Kullback-Leibler divergence of a partition, clients weighted by their samples.

        KL = Σ_k n_k/Σn · Σ_y p_k(y) ln(p_k(y) / p(y))

    This is the mutual information of the client and the label of a sample.

    Args:
        table: Samples per client and class, int [N, M].

    Returns:
        KL in nats, in 0 … ln min(N, M).

    Raises:
        ValueError: Not a table of counts, or clients without samples.

    References:
        Cornelis (thesis), §3.1.

    >>> round(kl([[5, 0], [0, 5]]), 4)
    0.6931
    """
    return _weighted(table, client_kls(table))


def jsd(table: ArrayLike) -> float:
    """Jensen-Shannon divergence of a partition, clients weighted by their samples.

        JSD = Σ_k n_k/Σn · JSD_k

    Args:
        table: Samples per client and class, int [N, M].

    Returns:
        JSD in nats, in 0 … ln 2.

    Raises:
        ValueError: Not a table of counts, or clients without samples.

    >>> jsd([[1, 1], [3, 3]])
    0.0
    """
    return _weighted(table, client_jsds(table))


def c_score(table: ArrayLike) -> float:
    """Class imbalance score of a partition: the mean of EMD_k, every client alike.

        C = 1/N Σ_k Σ_y |p_k(y) - p(y)|

    Args:
        table: Samples per client and class, int [N, M].

    Returns:
        C-score, in 0 … 2.

    Raises:
        ValueError: Not a table of counts, or clients without samples.

    References:
        Xue, Klabjan, Luo, "Aggregation Delayed Federated Learning" (RADFed), §IV-A.

    >>> c_score([[6, 0], [0, 2]])
    1.0
    """
    return float(np.mean(client_emds(table)))


class SizeStatistics(NamedTuple):
    """Samples per client n_k in five numbers; `gini` is 0 for equal sizes, near 1 for one owner."""

    min: int
    max: int
    mean: float
    std: float
    gini: float


def size_statistics(sizes: ArrayLike) -> SizeStatistics:
    """How unequal the client sizes are.

        std² = Σ_k (n_k - n̄)²/N,  Gini = Σ_k Σ_l |n_k - n_l| / (2 N² n̄)

    Args:
        sizes: Samples per client n_k, int [N].

    Returns:
        Smallest, largest, mean, standard deviation (of all N clients, not an estimate) and Gini
        coefficient, in 0 … 1 - 1/N.

    Raises:
        ValueError: Not a list of sizes, or no samples at all.

    >>> size_statistics([1, 3])
    SizeStatistics(min=1, max=3, mean=2.0, std=1.0, gini=0.25)
    """
    n = np.sort(np.asarray(sizes))
    if n.ndim != 1 or not n.size or n[0] < 0 or not n.any():
        raise ValueError(f"sizes must be samples per client [N], 0 or more, got {sizes!r}")
    # In ascending order the k-th size is the larger one of k pairs, the smaller one of N - 1 - k.
    pairs = float((2 * np.arange(n.size) + 1 - n.size) @ n)
    gini = pairs / (n.size * float(n.sum()))
    return SizeStatistics(int(n[0]), int(n[-1]), float(n.mean()), float(n.std()), gini)


def _distributions(table: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Label distribution of every client, [N, M], and of all data, [M]."""
    counts = np.asarray(table)
    if counts.ndim != 2 or not counts.size or np.any(counts < 0):
        raise ValueError(f"table must be counts [N, M], 0 or more, got shape {counts.shape}")
    sizes = counts.sum(axis=1, keepdims=True)
    empty = np.flatnonzero(sizes == 0)
    if empty.size:
        raise ValueError(f"table: clients {empty.tolist()} have no samples, so no distribution")
    return counts / sizes, counts.sum(axis=0) / counts.sum()


def _weighted(table: ArrayLike, per_client: NDArray[np.float64]) -> float:
    return float(np.average(per_client, weights=np.sum(table, axis=1)))
