"""The EMD-targeted sampler: a random mix of classes with that EMD, shifted for every client."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.partition.deal import check_arguments, check_multiple, deal, fill_empty
from fedjax_sim.partition.table import Partition

MOVES = 10_000


def robin_hood(
    labels: ArrayLike, clients: int, *, emd: float, tolerance: float = 0.01, seed: int
) -> Partition:
    r"""The EMD-targeted sampler: random class probabilities p with a given EMD, for all clients.

    Algorithm 1 of the thesis starts from a random p and moves a random part of it between two
    random classes until

    .. math:: \Bigl\lvert \sum_y \lvert p_y - \tfrac1M \rvert - EMD \Bigr\rvert \le tolerance:

    from poor to rich while the EMD is too small, from rich to poor while it is too large. Client k
    then holds the classes by p shifted by k classes, so that M clients in a row share out all data.
    Counts are the exact shares rounded up or down; the leftovers go to the smallest clients.

    Args:
        labels: ``int[n]``; the target holds for balanced labels.
        clients: K, a multiple of the number of classes M.
        emd: the target, in 0 … 2 - 2/M.
        tolerance: how far p may stay from the target, positive.
        seed: of p, the order of the clients and the deal.

    Returns:
        The partition; every sample is used once, and no client is empty.

    Raises:
        ValueError: if emd or tolerance is out of range, or clients is no multiple of M.

    Source: Cornelis 2022 <cornelis2022federated>, section 3.2.4, Algorithm 1; Zhao, Li, Lai, Suda,
    Civin, Chandra 2018 <https://arxiv.org/abs/1806.00582>.

    Example:
        >>> p = robin_hood(np.arange(400) % 4, 4, emd=1.0, seed=0)
        >>> p.name, p.sizes.tolist()
        ('robin_hood(1, 0.01)', [100, 100, 100, 100])
    """
    y, counts, rng = check_arguments(labels, clients, seed)
    classes = counts.size
    check_multiple(clients, classes)
    largest = 2 - 2 / classes
    if not 0 <= emd <= largest + 1e-9:
        raise ValueError(f"emd must be in 0 to {largest:g} with {classes} classes, got {emd}")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")
    p = _class_probabilities(emd, classes, tolerance, rng)
    shift = rng.permutation(clients) % classes
    exact = p[np.arange(classes) - shift[:, None]] * counts * classes / clients
    table = np.floor(exact).astype(np.int64)
    for label, left in enumerate(counts - table.sum(axis=0)):
        # The fractions add up to ``left`` and each is below 1: enough clients have one.
        members = np.flatnonzero(exact[:, label] - table[:, label] > 1e-9)
        size_then_chance = np.lexsort((rng.random(members.size), table[members].sum(axis=1)))
        table[members[size_then_chance[:left]], label] += 1
    fill_empty(table)
    return deal(y, table, rng, f"robin_hood({emd:g}, {tolerance:g})")


def _class_probabilities(
    emd: float, classes: int, tolerance: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Random class probabilities with that EMD, ``f64[M]``.

    Algorithm 1 has no bound: its moves can jump over the target for ever. After 10,000 of them one
    class is made rich and all others equally poor, at exactly the target.
    """
    p = rng.dirichlet(np.ones(classes))
    for _ in range(MOVES):
        found = np.abs(p - 1 / classes).sum()
        if abs(found - emd) <= tolerance:
            return p
        pair = rng.choice(classes, 2, replace=False)
        poor, rich = pair[np.argsort(p[pair])]
        most = p[poor] if found < emd else (p[poor] - p[rich]) / 2  # below 0: back from the rich
        moved = most * rng.random()
        p[rich] += moved
        p[poor] -= moved
    # The mix at 2 - 2/M holds one class; the EMD is linear on the way to it from equal parts.
    share = emd / (2 - 2 / classes)
    return (1 - share) / classes + share * (np.arange(classes) == p.argmax())
