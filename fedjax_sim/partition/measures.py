"""Measures of label skew, and of the skew of client sizes."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray


def client_emds(table: ArrayLike) -> NDArray[np.float64]:
    r"""Computes the distance (EMD) of each client's label distribution from the overall one.

    .. math:: EMD_k = \sum_y \lvert p_k(y) - p(y) \rvert

    Args:
        table: ``int[N, M]``, samples of each client and class; no client may be empty.

    Returns:
        EMD_k, ``f64[N]``, from 0 (the same distribution) to below 2.

    Raises:
        ValueError: if the table does not hold counts, or a client has no samples.

    Example:
        >>> client_emds([[4, 0], [0, 4]]).tolist()
        [1.0, 1.0]
    """
    clients, pooled = _distributions(table)
    distances: NDArray[np.float64] = np.abs(clients - pooled).sum(axis=1)
    return distances


def client_kls(table: ArrayLike) -> NDArray[np.float64]:
    r"""Computes the KL divergence of each client's label distribution from the overall one.

    .. math:: KL_k = \sum_y p_k(y) \ln \frac{p_k(y)}{p(y)}

    in nats, ``f64[N]``, at least 0 and finite; for a table as in ``client_emds``.

    Source: Cornelis 2022 <cornelis2022federated>, eq. 3.2, which prints the fraction inverted and
    thus the opposite sign.

    Example:
        >>> client_kls([[4, 0], [0, 4]]).round(4).tolist()
        [0.6931, 0.6931]
    """
    return _relative_entropies(*_distributions(table))


def client_jsds(table: ArrayLike) -> NDArray[np.float64]:
    r"""Computes the Jensen-Shannon divergence of each client's label distribution from the overall.

    .. math:: JSD_k = \tfrac12 KL(p_k \Vert m_k) + \tfrac12 KL(p \Vert m_k), \qquad
              m_k = \tfrac12 (p_k + p)

    in nats, ``f64[N]``, in 0 … ln 2; for a table as in ``client_emds``.

    Example:
        >>> client_jsds([[1, 1], [3, 3]]).tolist()
        [0.0, 0.0]
    """
    clients, pooled = _distributions(table)
    middle = (clients + pooled) / 2
    return (_relative_entropies(clients, middle) + _relative_entropies(pooled, middle)) / 2


def emd(table: ArrayLike) -> float:
    r"""Computes the earth mover's distance of a partition, the weighted mean of its clients'.

    .. math:: EMD = \sum_k \frac{n_k}{\sum_l n_l} \sum_y \lvert p_k(y) - p(y) \rvert

    in 0 … 2; for a table as in ``client_emds``.

    Source: Zhao, Li, Lai, Suda, Civin, Chandra 2018 <https://arxiv.org/abs/1806.00582>; Cornelis
    2022 <cornelis2022federated>, eq. 3.3.

    Example:
        >>> emd([[6, 0], [0, 2]])
        0.75
    """
    return _weighted_mean(table, client_emds(table))


def labelled_emd(tables: Iterable[NDArray[np.int64]]) -> float | None:
    """Returns the mean EMD of several tables, each of its clients with labels; None without labels.

    >>> labelled_emd([np.array([[6, 0], [0, 2], [0, 0]])]), labelled_emd([np.array([[0, 0]])])
    (0.75, None)
    """
    known = (table[table.any(axis=1)] for table in tables)
    each = [emd(table) for table in known if len(table)]
    return float(np.mean(each)) if each else None


def kl(table: ArrayLike) -> float:
    r"""Computes the mean of ``client_kls`` weighted by samples.

    .. math:: KL = \sum_k \frac{n_k}{\sum_l n_l} \sum_y p_k(y) \ln \frac{p_k(y)}{p(y)}

    in nats, in 0 … ln min(N, M). It is the mutual information of a sample's client and label.

    Source: Cornelis 2022 <cornelis2022federated>, section 3.1.

    Example:
        >>> round(kl([[5, 0], [0, 5]]), 4)
        0.6931
    """
    return _weighted_mean(table, client_kls(table))


def jsd(table: ArrayLike) -> float:
    r"""Computes the mean of ``client_jsds`` weighted by samples.

    .. math:: JSD = \sum_k \frac{n_k}{\sum_l n_l} JSD_k

    in nats, in 0 … ln 2.

    Example:
        >>> jsd([[1, 1], [3, 3]])
        0.0
    """
    return _weighted_mean(table, client_jsds(table))


def c_score(table: ArrayLike) -> float:
    r"""Computes the class imbalance score, the unweighted mean of ``client_emds``.

    .. math:: C = \frac1N \sum_k \sum_y \lvert p_k(y) - p(y) \rvert

    in 0 … 2.

    Source: Xue, Klabjan, Luo 2021 <https://arxiv.org/abs/2108.07433>, section V-C (5.1 in its first
    version), with values in Table I.

    Example:
        >>> c_score([[6, 0], [0, 2]])
        1.0
    """
    return float(np.mean(client_emds(table)))


class SizeStatistics(NamedTuple):
    """Statistics of the client sizes n_k.

    Attributes:
        min: the smallest size.
        max: the largest size.
        mean: mean number of samples per client.
        std: population standard deviation over the N clients.
        gini: Gini coefficient, 0 for equal sizes and near 1 if one client has nearly all samples.
    """

    min: int
    max: int
    mean: float
    std: float
    gini: float


def size_statistics(sizes: ArrayLike) -> SizeStatistics:
    r"""Computes statistics of the client sizes.

    .. math:: std^2 = \frac1N \sum_k (n_k - \bar n)^2, \qquad
              Gini = \frac{1}{2 N^2 \bar n} \sum_k \sum_l \lvert n_k - n_l \rvert

    Args:
        sizes: ``int[N]``, number of samples n_k of each client.

    Returns:
        The statistics; the Gini coefficient is in 0 … 1 - 1/N.

    Raises:
        ValueError: if the sizes are not counts, or are all 0.

    Example:
        >>> size_statistics([1, 3])
        SizeStatistics(min=1, max=3, mean=2.0, std=1.0, gini=0.25)
    """
    n = np.sort(np.asarray(sizes))
    if n.ndim != 1 or not n.size or n[0] < 0 or not n.any():
        raise ValueError(
            f"sizes must be samples per client [N], at least 0 and not all 0, got {sizes!r}"
        )
    # In ascending order, the k-th size is the larger one of k pairs, the smaller of N - 1 - k.
    pairs = float((2 * np.arange(n.size) + 1 - n.size) @ n)
    gini = pairs / (n.size * float(n.sum()))
    return SizeStatistics(int(n[0]), int(n[-1]), float(n.mean()), float(n.std()), gini)


def _distributions(table: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the label distribution of each client, ``f64[N, M]``, and of all data, ``f64[M]``."""
    counts = np.asarray(table)
    if counts.ndim != 2 or not counts.size or np.any(counts < 0):
        raise ValueError(f"table must be counts [N, M], at least 0, got shape {counts.shape}")
    sizes = counts.sum(axis=1, keepdims=True)
    empty = np.flatnonzero(sizes == 0)
    if empty.size:
        raise ValueError(f"table must give every client a sample, got none for {empty.tolist()}")
    return counts / sizes, counts.sum(axis=0) / counts.sum()


def _weighted_mean(table: ArrayLike, per_client: NDArray[np.float64]) -> float:
    return float(np.average(per_client, weights=np.sum(table, axis=1)))


def _relative_entropies(p: NDArray[np.float64], q: NDArray[np.float64]) -> NDArray[np.float64]:
    from scipy.special import rel_entr  # takes a fifth of a second to import

    entropies: NDArray[np.float64] = rel_entr(p, q).sum(axis=1)
    return entropies
