"""Dirichlet label skew, in its two meanings: classes over clients, and clients over classes."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.partition.deal import check_arguments, check_integer, deal, even_sizes, fill_empty
from fedjax_sim.partition.table import Partition

REDRAWS = 100
HOPELESS = 20  # with so many empty clients on average, one draw in 1e8 has none: exp(-20)


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
    that move from the largest clients to the empty ones (at once if more than 20 are empty: no
    draw would do); a larger one is refused.

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
        sizes = table.sum(axis=1)
        reached = max(reached, int(sizes.min()))
        if reached >= min_size or (min_size == 1 and (sizes == 0).sum() > HOPELESS):
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
    mixes, need = draw_mixes(rng, alpha, clients, counts.size), even_sizes(y.size, clients)
    first = 0
    while first < clients:
        # Drawing all at once and refusing what is not there has the law of one by one. So the
        # clients draw at once too, up to the first who empties a class: the others draw again
        # without it. There are at most M passes more than once through a client.
        mixes[first:] = _renormalise(mixes[first:], stock > 0, alpha, rng)
        drawn = rng.multinomial(need[first:], mixes[first:])
        short = (np.cumsum(drawn, axis=0) > stock).any(axis=1)
        served = int(short.argmax()) if short.any() else short.size
        drawn = drawn[: served + 1]
        drawn[served:] = np.minimum(drawn[served:], stock - drawn[:served].sum(axis=0))
        table[first : first + len(drawn)] += drawn
        need[first : first + len(drawn)] -= drawn.sum(axis=1)
        stock -= drawn.sum(axis=0)
        first += served
    return deal(y, rng.permutation(table), rng, f"dirichlet_classes({alpha:g})")


def check_alpha(alpha: float) -> None:
    """Checks a concentration parameter."""
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha must be positive and finite, got {alpha}")


def draw_dirichlet(rng: np.random.Generator, alpha: float, size: int) -> NDArray[np.float64]:
    """One draw of Dir(α), or its limit if the floating-point draw fails."""
    mix: NDArray[np.float64] = draw_mixes(rng, alpha, 1, size)[0]
    return mix


def draw_mixes(
    rng: np.random.Generator, alpha: float, number: int, size: int
) -> NDArray[np.float64]:
    """Draws of Dir(α), ``f64[number, size]``; its limit where the floating-point draw fails."""
    mixes = rng.dirichlet(np.full(size, alpha), number)
    failed = np.flatnonzero(~(np.abs(mixes.sum(axis=1) - 1) < 1e-6))  # NaN compares as false
    if alpha > 1:  # its limit are equal parts, at 0 one part that has all
        mixes[failed] = 1 / size
    else:
        mixes[failed] = 0.0
        mixes[failed, rng.integers(size, size=failed.size)] = 1.0
    return mixes


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
    """Mixes q, ``f64[..., M]``, restricted to the parts that are left; shape and dtype of q."""
    kept = np.where(left, q, 0.0)
    total = kept.sum(axis=-1)
    lost = total <= 1e-200
    # Where all mass was on parts that are out: a renormalised part of a Dirichlet vector is
    # Dirichlet and independent of the mass outside it, so that a fresh draw has the law that
    # underflow destroyed.
    fresh = np.zeros((int(lost.sum()), left.size))
    if lost.any():
        fresh[:, left] = draw_mixes(rng, alpha, len(fresh), int(left.sum()))
    kept[lost] = fresh
    normal: NDArray[np.float64] = kept / np.where(lost, 1.0, total)[..., None]
    return normal
