"""How far the clients' labels are from the labels of all."""

import numpy as np
from numpy.typing import ArrayLike, NDArray


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
    counts = np.asarray(table)
    if counts.ndim != 2 or not counts.size or np.any(counts < 0):
        raise ValueError(f"table must be counts [N, M], 0 or more, got shape {counts.shape}")
    sizes = counts.sum(axis=1, keepdims=True)
    empty = np.flatnonzero(sizes == 0)
    if empty.size:
        raise ValueError(f"table: clients {empty.tolist()} have no samples, so no distribution")
    gaps = np.abs(counts / sizes - counts.sum(axis=0) / counts.sum())
    distances: NDArray[np.float64] = gaps.sum(axis=1)
    return distances


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
    return float(np.average(client_emds(table), weights=np.sum(table, axis=1)))


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
