"""The EMD-targeted sampler: a random mix of classes with that EMD, shifted for every client."""

import math

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
    random classes until the EMD is within the tolerance of the target: from poor to rich while it
    is too small, from rich to poor while it is too large. Client k then holds the classes by p
    shifted by k classes, so that M clients in a row share out all data. The EMD is that of these
    shares on the labels as they are; on balanced ones it is the
    :math:`\sum_y \lvert p_y - \tfrac1M \rvert` of the thesis.

    Counts are the exact shares rounded up or down, the leftovers to the smallest clients. With
    fewer than some 100 samples a client that alone moves the measured EMD off the target;
    :func:`fedjax_sim.partition.limit_label_emd` counts whole samples.

    Args:
        labels: ``int[n]``, of any distribution.
        clients: K, a multiple of the number of classes M.
        emd: the target, in 0 … :math:`2 - 2 \sum_y p(y)^2`, which is 2 - 2/M on balanced labels.
        tolerance: how far the EMD of the shares may stay from the target, positive.
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
    largest = float(2 - 2 * np.square(counts / counts.sum()).sum())
    if not 0 <= emd <= largest + 1e-9:
        raise ValueError(
            f"emd must be in 0 to {math.floor(largest * 1e4) / 1e4:g} with these {classes} "
            f"classes, got {emd}"
        )
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")
    p = _class_probabilities(emd, counts, tolerance, rng)
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
    emd: float, counts: NDArray[np.int64], tolerance: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Random class probabilities with that EMD, ``f64[M]``.

    Algorithm 1 has no bound: its moves can jump over the target for ever. After 10,000 of them
    random classes give all that they have until the EMD is too large, and the mix is then drawn
    towards equal parts, on the way to which the EMD falls linearly to 0.
    """
    classes = counts.size
    shifted = (np.arange(classes) - np.arange(classes)[:, None]) % classes
    pooled = counts / counts.sum()

    def reached(p: NDArray[np.float64]) -> float:
        shares = p[shifted] * pooled  # of M clients in a row; those of each class add up
        return float(np.abs(shares - np.outer(shares.sum(axis=1), pooled)).sum())

    p = rng.dirichlet(np.ones(classes))
    for _ in range(MOVES):
        found = reached(p)
        if abs(found - emd) <= tolerance:
            return p
        pair = rng.choice(classes, 2, replace=False)
        poor, rich = pair[np.argsort(p[pair])]
        most = p[poor] if found < emd else (p[poor] - p[rich]) / 2  # below 0: back from the rich
        moved = most * rng.random()
        p[rich] += moved
        p[poor] -= moved
    rich = p.argmax()
    for poor in rng.permutation(np.delete(np.arange(classes), rich)):
        if reached(p) < emd:
            p[rich] += p[poor]
            p[poor] = 0.0
    return 1 / classes + (p - 1 / classes) * min(emd / reached(p), 1.0)
