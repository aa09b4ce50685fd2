"""Dirichlet label skew, in its two meanings: classes over clients, and clients over classes."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.partition.deal import check_arguments, deal, even_sizes
from fedjax_sim.partition.table import Partition

REDRAWS = 100


def dirichlet_over_clients(
    labels: ArrayLike, clients: int, *, alpha: float, seed: int
) -> Partition:
    """Spread every class over the clients by p_y ~ Dir_K(alpha): skewed labels *and* sizes.

    Client k gets the share p_{y,k} of the samples of class y, rounded so that each class adds up.
    Nothing is balanced. Only a client left with no sample at all makes the shares be drawn anew, up
    to 100 times; then single samples move from the largest clients to the empty ones.

    Args:
        labels: int [n].
        clients: Number of clients K.
        alpha: Concentration, positive; smaller is more skewed.
        seed: Of the shares and of the deal.

    Returns:
        The partition; every sample is used once, and no client is empty.

    Raises:
        ValueError: alpha is not positive and finite, or clients exceeds the number of samples.

    References:
        Li et al., "Federated Learning on Non-IID Data Silos"; Cornelis (thesis), §3.2.3.

    >>> p = dirichlet_over_clients(np.arange(100) % 10, 4, alpha=0.5, seed=0)
    >>> p.name, p.sizes.size, p.sizes.sum()
    ('dirichlet(0.5)', 4, np.int64(100))
    """
    y, counts, rng = check_arguments(labels, clients, seed)
    _check_alpha(alpha)
    for _ in range(REDRAWS):
        shares = np.stack([_dirichlet(rng, alpha, clients) for _ in counts])
        ends = np.rint(np.cumsum(shares, axis=1) * counts[:, None]).astype(np.int64)
        ends[:, -1] = counts
        table = np.diff(ends, axis=1, prepend=0).T
        if table.any(axis=1).all():
            break
    for empty in np.flatnonzero(~table.any(axis=1)):
        giver = table.sum(axis=1).argmax()
        label = table[giver].argmax()
        table[giver, label] -= 1
        table[empty, label] += 1
    return deal(y, table, rng, f"dirichlet({alpha:g})")


def dirichlet_over_classes(
    labels: ArrayLike, clients: int, *, alpha: float, seed: int
) -> Partition:
    """Draw the class mix of every client from Dir_M(alpha): skewed labels, equal sizes.

    Client k draws its samples one by one, without replacement, from q_k ~ Dir_M(alpha); a class
    that has run out is left out and q_k is renormalised, so the last clients take what is left.
    The clients are shuffled afterwards. Hsu et al. write Dir(a p) with a prior p of the classes,
    which for uniform p is alpha = a/M here.

    Args:
        labels: int [n].
        clients: Number of clients K.
        alpha: Concentration of each class, positive; smaller is more skewed.
        seed: Of the mixes and of the deal.

    Returns:
        The partition; every sample is used once, and client sizes differ by at most 1.

    Raises:
        ValueError: alpha is not positive and finite, or clients exceeds the number of samples.

    References:
        Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
        Classification".

    >>> p = dirichlet_over_classes(np.arange(100) % 10, 4, alpha=0.5, seed=0)
    >>> p.name, p.sizes.tolist()
    ('dirichlet_classes(0.5)', [25, 25, 25, 25])
    """
    y, counts, rng = check_arguments(labels, clients, seed)
    _check_alpha(alpha)
    stock = counts.copy()
    table = np.zeros((clients, counts.size), np.int64)
    for row, size in zip(table, even_sizes(y.size, clients), strict=True):
        q = _dirichlet(rng, alpha, counts.size)
        need = int(size)
        while need:  # each pass fills the client or empties a class: at most M passes
            q = _renormalise(q, stock > 0, alpha, rng)
            # Drawing all at once and refusing what is not there has the law of one by one.
            taken = np.minimum(rng.multinomial(need, q), stock)
            row += taken
            stock -= taken
            need -= int(taken.sum())
    return deal(y, rng.permutation(table), rng, f"dirichlet_classes({alpha:g})")


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha={alpha} must be positive and finite")


def _dirichlet(rng: np.random.Generator, alpha: float, size: int) -> NDArray[np.float64]:
    """One draw of Dir(alpha), or its limit where the floating-point draw fails."""
    p = rng.dirichlet(np.full(size, alpha))
    if np.isfinite(p).all() and abs(p.sum() - 1) < 1e-6:
        return p
    # alpha → ∞: all equal; alpha → 0: all in one place.
    return np.full(size, 1 / size) if alpha > 1 else np.eye(size)[rng.integers(size)]


def _renormalise(
    q: NDArray[np.float64], left: NDArray[np.bool_], alpha: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """The mix q restricted to the classes that are left, float64 [M]."""
    kept: NDArray[np.float64] = np.where(left, q, 0.0)
    total = float(kept.sum())
    if total > 1e-200:
        return kept / total
    # All mass was on classes that ran out. A renormalised part of a Dirichlet vector is Dirichlet
    # and independent of the mass outside it: a fresh draw has the law that underflow destroyed.
    kept[left] = _dirichlet(rng, alpha, int(left.sum()))
    return kept
