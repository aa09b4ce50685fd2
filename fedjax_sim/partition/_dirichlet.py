"""Dirichlet label skew in its two forms: over clients for each class, or over classes for each."""

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
    r"""Splits each class over clients by :math:`p_y \sim Dir_K(\alpha)`: skewed labels *and* sizes.

    Client k gets a share :math:`p_{y,k}` of the samples of class y, rounded to the same total. If a
    client has fewer than min_size samples, all shares are drawn again, up to 100 times. After that,
    for a min_size of 1, single samples move from the largest clients to the empty ones (at once if
    more than 20 are empty, as redrawing is hopeless); a larger min_size raises ValueError.

    Args:
        labels: ``int[n]``.
        clients: K.
        alpha: α, the concentration, positive; smaller is more skewed.
        min_size: minimum number of samples of a client, at least 1.
        balanced: deal the classes one by one, and skip clients that already hold n/K samples or
            more. Sizes get closer, but labels no longer follow Dir(α), so that the same α gives a
            different skew. (Li et al. and many libraries do this by default.)
        seed: random seed.

    Returns:
        The partition; every sample is used once, and no client is empty.

    Raises:
        ValueError: if alpha is not positive and finite, there are more clients than samples, or no
            draw reached min_size; the message has the largest min_size that was reached.

    Source: Li, Diao, Chen, He 2022 <https://arxiv.org/abs/2102.02079>; Cornelis 2022
    <cornelis2022federated>, section 3.2.3.

    Example:
        >>> p = dirichlet(np.arange(100) % 10, 4, alpha=0.5, seed=0)
        >>> p.name, p.sizes.size, p.sizes.sum()
        ('dirichlet(0.5)', 4, np.int64(100))
    """
    y, counts, rng = check_arguments(labels, clients, seed)
    check_alpha(alpha)
    why = f" for {clients} clients and {y.size} samples"
    check_integer("min_size", min_size, 1, y.size // clients, why)
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
                f"{REDRAWS} draws of alpha={alpha:g} for {clients} clients did not reach; use "
                "fewer clients or a larger alpha"
            )
        fill_empty(table)
    options = f", {min_size}" if balanced or min_size > 1 else ""
    options += ", balanced" if balanced else ""
    return deal(y, table, rng, f"dirichlet({alpha:g}{options})")


def dirichlet_classes(labels: ArrayLike, clients: int, *, alpha: float, seed: int) -> Partition:
    r"""Draws each client's class mix from :math:`Dir_M(\alpha)`: skewed labels, equal sizes.

    Client k draws its samples one by one, without replacement, from :math:`q_k \sim Dir_M(\alpha)`.
    When a class runs out, :math:`q_k` is renormalised over the others, so that the last clients
    take the remaining samples; clients are shuffled afterwards. Hsu et al. write Dir(a p) with a
    prior p of the classes; for uniform p, α = a/M here.

    Args:
        labels: ``int[n]``.
        clients: K.
        alpha: α, the concentration of each class, positive; smaller is more skewed.
        seed: random seed.

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
        # Drawing all samples at once and discarding the excess is distributed like drawing one by
        # one. So all clients draw at once, up to the first that empties a class; the others draw
        # again without it. At most M passes visit a client again.
        mixes[first:] = _renormalise(mixes[first:], stock > 0, alpha, rng)
        samples = rng.multinomial(need[first:], mixes[first:])
        short = (np.cumsum(samples, axis=0) > stock).any(axis=1)
        served = int(short.argmax()) if short.any() else short.size
        samples = samples[: served + 1]
        samples[served:] = np.minimum(samples[served:], stock - samples[:served].sum(axis=0))
        table[first : first + len(samples)] += samples
        need[first : first + len(samples)] -= samples.sum(axis=1)
        stock -= samples.sum(axis=0)
        first += served
    return deal(y, rng.permutation(table), rng, f"dirichlet_classes({alpha:g})")


def check_alpha(alpha: float) -> None:
    """Raises ValueError unless a concentration is positive and finite."""
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha must be positive and finite, got {alpha}")


def draw_dirichlet(rng: np.random.Generator, alpha: float, size: int) -> NDArray[np.float64]:
    """Draws one vector of Dir(α), see :func:`draw_mixes`."""
    mix: NDArray[np.float64] = draw_mixes(rng, alpha, 1, size)[0]
    return mix


def draw_mixes(
    rng: np.random.Generator, alpha: float, number: int, size: int
) -> NDArray[np.float64]:
    """Draws ``f64[number, size]`` from Dir(α), or from its limit where floating point fails."""
    mixes = rng.dirichlet(np.full(size, alpha), number)
    failed = np.flatnonzero(~(np.abs(mixes.sum(axis=1) - 1) < 1e-6))  # NaN compares as false
    if alpha > 1:  # the limits: equal parts for α → ∞, a single part for α → 0
        mixes[failed] = 1 / size
    else:
        mixes[failed] = 0.0
        mixes[failed, rng.integers(size, size=failed.size)] = 1.0
    return mixes


def split_by_shares(total: int, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Splits a total into integers in these proportions, each off by at most 1, ``int64[K]``."""
    ends = np.rint(np.cumsum(shares) * total).astype(np.int64)
    ends[-1] = total
    return np.diff(ends, prepend=0)


def _table(
    counts: NDArray[np.int64], clients: int, alpha: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Splits each class by its own draw of Dir_K(α), ``int64[K, M]``."""
    columns = [split_by_shares(int(n), draw_dirichlet(rng, alpha, clients)) for n in counts]
    return np.stack(columns, axis=1)


def _balanced_table(
    counts: NDArray[np.int64], clients: int, alpha: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Splits classes like :func:`_table`, but skips clients that already hold n/K samples."""
    table = np.zeros((clients, counts.size), np.int64)
    for label, total in enumerate(counts):
        # Some client is below n/K as long as a class remains.
        below = table.sum(axis=1) * clients < counts.sum()
        shares = _renormalise(draw_dirichlet(rng, alpha, clients), below, alpha, rng)
        table[:, label] = split_by_shares(int(total), shares)
    return table


def _renormalise(
    q: NDArray[np.float64], left: NDArray[np.bool_], alpha: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Restricts mixes q, ``f64[..., M]``, to the parts that are left, and renormalises them."""
    kept = np.where(left, q, 0.0)
    total = kept.sum(axis=-1)
    lost = total <= 1e-200
    # No mass left: a renormalised part of a Dirichlet vector is Dirichlet and independent of the
    # mass outside it, so that a fresh draw has the distribution lost to underflow.
    fresh = np.zeros((int(lost.sum()), left.size))
    if lost.any():
        fresh[:, left] = draw_mixes(rng, alpha, len(fresh), int(left.sum()))
    kept[lost] = fresh
    normal: NDArray[np.float64] = kept / np.where(lost, 1.0, total)[..., None]
    return normal
