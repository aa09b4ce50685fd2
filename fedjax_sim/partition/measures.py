"""How far the clients' labels are from the labels of all data, and how unequal their sizes are."""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


def client_emds(table: ArrayLike) -> NDArray[np.float64]:
    r"""The distance of every client's label distribution from that of all data.

    .. math:: EMD_k = \sum_y \lvert p_k(y) - p(y) \rvert

    Args:
        table: ``int[N, M]``, samples of each client and class.

    Returns:
        EMD_k, ``f64[N]``, from 0 (the same distribution) to less than 2.

    Raises:
        ValueError: if the table holds no counts, or a client has no samples.

    Example:
        >>> client_emds([[4, 0], [0, 4]]).tolist()
        [1.0, 1.0]
    """
    own, pooled = _distributions(table)
    distances: NDArray[np.float64] = np.abs(own - pooled).sum(axis=1)
    return distances


def client_kls(table: ArrayLike) -> NDArray[np.float64]:
    r"""The Kullback-Leibler divergence of every client's label distribution from that of all data.

    .. math:: KL_k = \sum_y p_k(y) \ln \frac{p_k(y)}{p(y)}

    Args:
        table: ``int[N, M]``, samples of each client and class.

    Returns:
        KL_k in nats, ``f64[N]``, at least 0 and finite: a client has no class that all data lack.

    Raises:
        ValueError: if the table holds no counts, or a client has no samples.

    Source: Cornelis 2022 <cornelis2022federated>, eq. 3.2, which prints the fraction upside down
    and so has the other sign.

    Example:
        >>> client_kls([[4, 0], [0, 4]]).round(4).tolist()
        [0.6931, 0.6931]
    """
    own, pooled = _distributions(table)
    return _relative_entropies(own, pooled)


def client_jsds(table: ArrayLike) -> NDArray[np.float64]:
    r"""The Jensen-Shannon divergence of every client's label distribution from that of all data.

    .. math:: JSD_k = \tfrac12 KL(p_k \Vert m_k) + \tfrac12 KL(p \Vert m_k), \qquad
              m_k = \tfrac12 (p_k + p)

    Args:
        table: ``int[N, M]``, samples of each client and class.

    Returns:
        JSD_k in nats, ``f64[N]``, in 0 … ln 2.

    Raises:
        ValueError: if the table holds no counts, or a client has no samples.

    Example:
        >>> client_jsds([[1, 1], [3, 3]]).tolist()
        [0.0, 0.0]
    """
    own, pooled = _distributions(table)
    middle = (own + pooled) / 2
    return (_relative_entropies(own, middle) + _relative_entropies(pooled, middle)) / 2


def emd(table: ArrayLike) -> float:
    r"""The earth mover's distance of a partition: that of its clients, weighted by their samples.

    .. math:: EMD = \sum_k \frac{n_k}{\sum_l n_l} \sum_y \lvert p_k(y) - p(y) \rvert

    Args:
        table: ``int[N, M]``, samples of each client and class.

    Returns:
        EMD, in 0 … 2.

    Raises:
        ValueError: if the table holds no counts, or a client has no samples.

    Source: Zhao, Li, Lai, Suda, Civin, Chandra 2018 <https://arxiv.org/abs/1806.00582>; Cornelis
    2022 <cornelis2022federated>, eq. 3.3.

    Example:
        >>> emd([[6, 0], [0, 2]])
        0.75
    """
    return _weighted(table, client_emds(table))


def kl(table: ArrayLike) -> float:
    r"""The Kullback-Leibler divergence of a partition: that of its clients, weighted by samples.

    .. math:: KL = \sum_k \frac{n_k}{\sum_l n_l} \sum_y p_k(y) \ln \frac{p_k(y)}{p(y)}

    This is the mutual information of the client and the label of a sample.

    Args:
        table: ``int[N, M]``, samples of each client and class.

    Returns:
        KL in nats, in 0 … ln min(N, M).

    Raises:
        ValueError: if the table holds no counts, or a client has no samples.

    Source: Cornelis 2022 <cornelis2022federated>, section 3.1.

    Example:
        >>> round(kl([[5, 0], [0, 5]]), 4)
        0.6931
    """
    return _weighted(table, client_kls(table))


def jsd(table: ArrayLike) -> float:
    r"""The Jensen-Shannon divergence of a partition: that of its clients, weighted by samples.

    .. math:: JSD = \sum_k \frac{n_k}{\sum_l n_l} JSD_k

    Args:
        table: ``int[N, M]``, samples of each client and class.

    Returns:
        JSD in nats, in 0 … ln 2.

    Raises:
        ValueError: if the table holds no counts, or a client has no samples.

    Example:
        >>> jsd([[1, 1], [3, 3]])
        0.0
    """
    return _weighted(table, client_jsds(table))


def c_score(table: ArrayLike) -> float:
    r"""The class imbalance score of a partition: the mean of EMD_k, each client counting once.

    .. math:: C = \frac1N \sum_k \sum_y \lvert p_k(y) - p(y) \rvert

    Args:
        table: ``int[N, M]``, samples of each client and class.

    Returns:
        The C-score, in 0 … 2.

    Raises:
        ValueError: if the table holds no counts, or a client has no samples.

    Source: Xue, Klabjan, Luo 2021 <https://arxiv.org/abs/2108.07433>, section V-C (5.1 in its first
    version); Table I has the values of its data sets.

    Example:
        >>> c_score([[6, 0], [0, 2]])
        1.0
    """
    return float(np.mean(client_emds(table)))


class SizeStatistics(NamedTuple):
    """The client sizes n_k in five numbers.

    Attributes:
        min: the smallest.
        max: the largest.
        mean: samples per client.
        std: the standard deviation over all N clients; it is not an estimate.
        gini: the Gini coefficient, 0 for equal sizes and near 1 if one client has nearly all.
    """

    min: int
    max: int
    mean: float
    std: float
    gini: float


def size_statistics(sizes: ArrayLike) -> SizeStatistics:
    r"""How unequal the client sizes are.

    .. math:: std^2 = \frac1N \sum_k (n_k - \bar n)^2, \qquad
              Gini = \frac{1}{2 N^2 \bar n} \sum_k \sum_l \lvert n_k - n_l \rvert

    Args:
        sizes: ``int[N]``, the samples of each client, n_k.

    Returns:
        Smallest, largest, mean, standard deviation and Gini coefficient; the latter is in 0 … 1 -
        1/N.

    Raises:
        ValueError: if the sizes are no list of counts, or there are no samples at all.

    Example:
        >>> size_statistics([1, 3])
        SizeStatistics(min=1, max=3, mean=2.0, std=1.0, gini=0.25)
    """
    n = np.sort(np.asarray(sizes))
    if n.ndim != 1 or not n.size or n[0] < 0 or not n.any():
        raise ValueError(
            f"sizes must be samples per client [N], at least 0 and not all 0, got {sizes!r}"
        )
    # In ascending order the k-th size is the larger one of k pairs, the smaller one of N - 1 - k.
    pairs = float((2 * np.arange(n.size) + 1 - n.size) @ n)
    gini = pairs / (n.size * float(n.sum()))
    return SizeStatistics(int(n[0]), int(n[-1]), float(n.mean()), float(n.std()), gini)


def _distributions(table: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The label distributions of every client, ``f64[N, M]``, and of all data, ``f64[M]``."""
    counts = np.asarray(table)
    if counts.ndim != 2 or not counts.size or np.any(counts < 0):
        raise ValueError(f"table must be counts [N, M], at least 0, got shape {counts.shape}")
    sizes = counts.sum(axis=1, keepdims=True)
    empty = np.flatnonzero(sizes == 0)
    if empty.size:
        raise ValueError(f"table must give every client a sample, got none for {empty.tolist()}")
    return counts / sizes, counts.sum(axis=0) / counts.sum()


def _weighted(table: ArrayLike, per_client: NDArray[np.float64]) -> float:
    return float(np.average(per_client, weights=np.sum(table, axis=1)))


def _relative_entropies(
    own: NDArray[np.float64], other: NDArray[np.float64]
) -> NDArray[np.float64]:
    from scipy.special import rel_entr  # a fifth of a second, which only this is worth

    entropies: NDArray[np.float64] = rel_entr(own, other).sum(axis=1)
    return entropies
