"""Dirichlet label skew, in its two meanings: classes over clients, and clients over classes."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.partition.deal import check_arguments, check_integer, deal, even_sizes, fill_empty
from fedjax_sim.partition.table import Partition

REDRAWS = 100


def dirichlet(
    labels: ArrayLike,
    clients: int,
    *,
    alpha: float,
    min_size: int = 1,
    balanced: bool = False,
    seed: int,
) -> Partition:
    r"""Each class goes to the clients by :math:`p_y \sim Dir_K(\alpha)`: skewed labels *and* sizes.

    Client k gets the share :math:`p_{y,k}` of the samples of class y, rounded so that each class
    adds up. Nothing is balanced unless asked for. If a client has fewer than min_size samples, all
    shares are drawn again, up to 100 times. After that a min_size of 1 is met by single samples
    that move from the largest clients to the empty ones; a larger one is refused.

    Args:
        labels: ``int[n]``.
        clients: K.
        alpha: α, the concentration, positive; smaller is more skewed.
        min_size: the least samples of a client, at least 1.
        balanced: deal the classes one after another, and leave a client that holds n/K samples or
            more out of the next. The sizes get closer, and the labels are no longer Dir(α): the
            same α is another skew. (Li et al. and many libraries do this unasked.)
        seed: of the shares and of the deal.

    Returns:
        The partition; every sample is used once, and no client is empty.

    Raises:
        ValueError: if alpha is not positive and finite, there are more clients than samples, or no
            draw reached min_size; the message says which one can be had.

    Source: Li, Diao, Chen, He 2022 <https://arxiv.org/abs/2102.02079>; Cornelis 2022
    <cornelis2022federated>, section 3.2.3.

    Example:
        >>> p = dirichlet(np.arange(100) % 10, 4, alpha=0.5, seed=0)
        >>> p.name, p.sizes.size, p.sizes.sum()
        ('dirichlet(0.5)', 4, np.int64(100))
    """
    y, counts, rng = check_arguments(labels, clients, seed)
    check_alpha(alpha)
    if not 1 <= check_integer("min_size", min_size) <= y.size // clients:
        raise ValueError(
            f"min_size must be in 1 to {y.size // clients} for {clients} clients, as there are "
            f"{y.size} samples, got {min_size}"
        )
    draw = _balanced_table if balanced else _table
    reached = 0
    for _ in range(REDRAWS):
        table = draw(counts, clients, alpha, rng)
        reached = max(reached, int(table.sum(axis=1).min()))
        if reached >= min_size:
            break
    if reached < min_size:
        if min_size > 1:
            raise ValueError(
                f"min_size must be at most {max(reached, 1)} with this seed, got {min_size}, which "
                f"{REDRAWS} draws of alpha={alpha:g} for {clients} clients did not reach; fewer "
                "clients or a larger alpha reach more"
            )
        fill_empty(table)
    options = f", {min_size}" if balanced or min_size > 1 else ""
    options += ", balanced" if balanced else ""
    return deal(y, table, rng, f"dirichlet({alpha:g}{options})")


def dirichlet_classes(labels: ArrayLike, clients: int, *, alpha: float, seed: int) -> Partition:
    r"""Every client draws its class mix from :math:`Dir_M(\alpha)`: skewed labels, equal sizes.

    Client k draws its samples one by one, without replacement, from :math:`q_k \sim Dir_M(\alpha)`.
    A class that has run out is left out and :math:`q_k` is renormalised, so the last clients take
    what is left. The clients are shuffled afterwards. Hsu et al. write Dir(a p) with a prior p of
    the classes, which for uniform p is α = a/M here.

    Args:
        labels: ``int[n]``.
        clients: K.
        alpha: α, the concentration of each class, positive; smaller is more skewed.
        seed: of the mixes and of the deal.

    Returns:
        The partition; every sample is used once, and client sizes differ by at most 1.

    Raises:
        ValueError: if alpha is not positive and finite, or there are more clients than samples.

    Source: Hsu, Qi, Brown 2019 <https://arxiv.org/abs/1909.06335>.

    Example:
        >>> p = dirichlet_classes(np.arange(100) % 10, 4, alpha=0.5, seed=0)
        >>> p.name, p.sizes.tolist()
        ('dirichlet_classes(0.5)', [25, 25, 25, 25])
    """
    y, counts, rng = check_arguments(labels, clients, seed)
    check_alpha(alpha)
    stock = counts.copy()
    table = np.zeros((clients, counts.size), np.int64)
    for row, size in zip(table, even_sizes(y.size, clients), strict=True):
        q = draw_dirichlet(rng, alpha, counts.size)
        need = int(size)
        while need:  # each pass fills the client or empties a class: at most M passes
            q = _renormalise(q, stock > 0, alpha, rng)
            # Drawing all at once and refusing what is not there has the law of one by one.
            taken = np.minimum(rng.multinomial(need, q), stock)
            row += taken
            stock -= taken
            need -= int(taken.sum())
    return deal(y, rng.permutation(table), rng, f"dirichlet_classes({alpha:g})")


def check_alpha(alpha: float) -> None:
    """Checks a concentration parameter."""
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha must be positive and finite, got {alpha}")


def draw_dirichlet(rng: np.random.Generator, alpha: float, size: int) -> NDArray[np.float64]:
    """One draw of Dir(α), or its limit if the floating-point draw fails."""
    p = rng.dirichlet(np.full(size, alpha))
    if np.isfinite(p).all() and abs(p.sum() - 1) < 1e-6:
        return p
    # alpha → ∞: all equal; alpha → 0: one part has all.
    return np.full(size, 1 / size) if alpha > 1 else np.eye(size)[rng.integers(size)]


def split_by_shares(total: int, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Whole numbers in these proportions that add up, ``int64[K]``; each is off by 1 at most."""
    ends = np.rint(np.cumsum(shares) * total).astype(np.int64)
    ends[-1] = total
    return np.diff(ends, prepend=0)


def _table(
    counts: NDArray[np.int64], clients: int, alpha: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Every class by its own draw of Dir_K(α), ``int64[K, M]``."""
    columns = [split_by_shares(int(n), draw_dirichlet(rng, alpha, clients)) for n in counts]
    return np.stack(columns, axis=1)


def _balanced_table(
    counts: NDArray[np.int64], clients: int, alpha: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """The same, but a client that holds its even part gets nothing of the next class."""
    table = np.zeros((clients, counts.size), np.int64)
    for label, total in enumerate(counts):
        # Some client is below n/K as long as a class is left to deal.
        below = table.sum(axis=1) * clients < counts.sum()
        shares = _renormalise(draw_dirichlet(rng, alpha, clients), below, alpha, rng)
        table[:, label] = split_by_shares(int(total), shares)
    return table


def _renormalise(
    q: NDArray[np.float64], left: NDArray[np.bool_], alpha: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """The mix q restricted to the parts that are left, ``f64`` like q."""
    kept: NDArray[np.float64] = np.where(left, q, 0.0)
    total = float(kept.sum())
    if total > 1e-200:
        return kept / total
    # All mass was on parts that are out. A renormalised part of a Dirichlet vector is Dirichlet
    # and independent of the mass outside it: a fresh draw has the law that underflow destroyed.
    kept[left] = draw_dirichlet(rng, alpha, int(left.sum()))
    return kept
