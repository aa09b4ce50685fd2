"""Samplers with a target EMD: limit-label on any labels, and the thesis' Algorithm 1."""

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.partition._limit_label import Design, draw_design, limit_label_name
from fedjax_sim.partition.deal import (
    check_arguments,
    check_multiple,
    check_range,
    deal,
    fill_empty,
)
from fedjax_sim.partition.table import Partition

HALVINGS = 14  # bisection steps for f; single samples do the rest
SHORT = 0.02  # how far the maximum EMD of a setting may be below the target with in_turn
MOVES = 10_000


def limit_label_emd(
    labels: ArrayLike,
    clients: int,
    *,
    emd: float,
    in_turn: bool = False,
    min_per_class: int = 0,
    seed: int,
) -> Partition:
    r"""Searches for the limit-label partition ll(t, f) with a target EMD on these labels.

    For fixed owners, EMD is linear in f on any labels:

    .. math:: EMD(f) = f \cdot EMD(1), \qquad EMD(1) = 2 - 2 \sum_y p(y)^2 \text{ for } t = 1.

    As samples are whole, this holds only approximately: f is bisected on the actual table, and
    single samples are then moved until the measured EMD is as close to the target as possible, to
    about 2/n.

    All seeds use the same t, the smallest with which every label has an owner: 1, unless there are
    more classes than clients. If Kt is not divisible by M, numbers of owners differ by at most one.

    Args:
        labels: ``int[n]``, of any distribution.
        clients: K, at least 2.
        emd: the target EMD.
        in_turn: cycle by seed through all t whose EMD(1) reaches the target, as the thesis does
            over its four seeds. Seeds then differ in kind and not only by chance, which changes the
            meaning of ± over seeds. A t that falls short by at most 0.02 counts, with f = 1, so
            that nearly balanced labels keep the ll(3, 1) of the thesis.
        min_per_class: minimum number of samples of each class for each client, taken from the
            owners' part (the thesis uses 1); reduces the largest EMD.
        seed: random seed, which also selects t if in_turn.

    Returns:
        The partition, named after the target and the setting.

    Raises:
        ValueError: if the EMD cannot be reached, or there are too few samples for min_per_class.
            The message has the smallest or largest EMD.

    Source: Cornelis 2022 <cornelis2022federated>, section 4.4: EMD 1.4 by ll(1, 7/9), ll(2, 7/8)
    and ll(3, 1) over four seeds.

    Example:
        >>> labels = np.arange(2000) % 10
        >>> limit_label_emd(labels, 10, emd=1.4, seed=1).name
        'emd(1.4): ll(1, 0.7775)'
        >>> for seed in (0, 1, 2):
        ...     limit_label_emd(labels, 10, emd=1.4, in_turn=True, seed=seed).name
        'emd(1.4, in_turn): ll(1, 0.7775)'
        'emd(1.4, in_turn): ll(2, 0.8775)'
        'emd(1.4, in_turn): ll(3, 1)'
    """
    y, counts, _ = check_arguments(labels, clients, seed)
    if counts.size < 2:
        raise ValueError(f"labels must have at least 2 classes for an EMD of {emd}, got 1")
    if clients < 2:
        raise ValueError(f"clients must be at least 2 for an EMD of {emd}, got {clients}")
    if not 0 < emd < math.inf:
        raise ValueError(f"emd must be above 0 (that is iid), got {emd}")
    settings: list[tuple[int, Design, NDArray[np.int64], np.random.Generator]] = []
    for t in range(-(-counts.size // clients), counts.size):
        rng = np.random.default_rng(seed)
        design = draw_design(counts, clients, t, min_per_class, rng)
        top = design.columns(1.0, filled=True)
        most = _table_emd(top)
        if not settings and emd > most + 1e-9:
            raise ValueError(
                f"emd must be at most {math.floor(most * 1e4) / 1e4:g} for these labels and "
                f"{clients} clients, by {limit_label_name(t, 1, min_per_class)}, got {emd}"
            )
        if emd > most + SHORT:
            break
        settings.append((t, design, top, rng))
        if not in_turn:
            break
    t, design, top, rng = settings[seed % len(settings)]
    columns, fraction = _search_fraction(design, top, emd, rng)
    options = (", in_turn" if in_turn else "") + (
        f", min_per_class={min_per_class}" if min_per_class else ""
    )
    setting = limit_label_name(t, fraction, min_per_class, digits=4)
    return deal(y, columns.T, rng, f"emd({emd:g}{options}): {setting}")


def reachable_emd(labels: ArrayLike, clients: int, *, seed: int) -> tuple[float, float]:
    """Computes the smallest and largest EMD of :func:`limit_label_emd` on these labels.

    Args:
        labels: ``int[n]``, of any distribution.
        clients: K.
        seed: random seed of the owners.

    Returns:
        The two EMDs; both 0 with one class or one client, where no EMD above 0 is possible.

    Raises:
        ValueError: if clients is not in 1 … n, or labels are not classes.

    Example:
        >>> reachable_emd(np.arange(2000) % 10, 10, seed=0), reachable_emd([0, 0], 2, seed=0)
        ((0.0, 1.8), (0.0, 0.0))
    """
    _, counts, rng = check_arguments(labels, clients, seed)
    if min(counts.size, clients) < 2:
        return 0.0, 0.0
    design = draw_design(counts, clients, -(-counts.size // clients), 0, rng)
    least, most = (_table_emd(design.columns(share, filled=True)) for share in (0.0, 1.0))
    return least, most


def _table_emd(columns: NDArray[np.int64]) -> float:
    """Computes the EMD of a table ``int64[M, K]``, in which clients may be empty."""
    pooled = columns.sum(axis=1) / columns.sum()
    return float(np.abs(columns - np.outer(pooled, columns.sum(axis=0))).sum() / columns.sum())


def _search_fraction(
    design: Design, top: NDArray[np.int64], emd: float, rng: np.random.Generator
) -> tuple[NDArray[np.int64], float]:
    """Bisects f for a target EMD; returns the table, ``int64[M, K]``, and f."""
    low, high, below, above = 0.0, 1.0, design.columns(0.0, filled=True), top
    least = _table_emd(below)
    if emd < least - 1e-9:
        raise ValueError(
            f"emd must be at least {math.ceil(least * 1e4) / 1e4:g}, as whole samples cannot be "
            f"dealt more evenly to {top.shape[1]} clients, got {emd}"
        )
    if emd >= _table_emd(above):
        return above, 1.0
    # The target stays between the EMDs of ``below`` and ``above``, even if EMD is not monotone.
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        columns = design.columns(middle, filled=True)
        if _table_emd(columns) <= emd:
            low, below = middle, columns
        else:
            high, above = middle, columns
    return _move_samples(below, above, emd, rng), (low + high) / 2


def _move_samples(
    below: NDArray[np.int64], above: NDArray[np.int64], emd: float, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Moves single samples from one table towards another until the EMD is closest to a target."""
    # Both tables have the same samples of each label, so that givers and takers match by label.
    change, cells = (above - below).ravel(), np.arange(below.size)
    givers, takers = (np.repeat(cells, np.maximum(sign * change, 0)) for sign in (-1, 1))
    order = rng.permutation(np.stack([givers, takers], axis=1))

    def after(number: int) -> NDArray[np.int64]:
        gains = [np.bincount(order[:number, i], minlength=below.size) for i in (0, 1)]
        columns = below + (gains[1] - gains[0]).reshape(below.shape)
        fill_empty(columns.T)
        return columns

    first, last = 0, len(order)
    while last - first > 1:
        middle = (first + last) // 2
        if _table_emd(after(middle)) <= emd:
            first = middle
        else:
            last = middle
    return min((after(first), after(last)), key=lambda columns: abs(_table_emd(columns) - emd))


def robin_hood(
    labels: ArrayLike, clients: int, *, emd: float, tolerance: float = 0.01, seed: int
) -> Partition:
    r"""Draws random class probabilities with a target EMD and shifts them for each client.

    Algorithm 1 of the thesis starts from random probabilities p and moves random amounts between
    two random classes until the EMD is within the tolerance: from poor to rich while it is too
    small, from rich to poor while it is too large. Client k holds the classes in proportion to p
    shifted by k classes, so that M consecutive clients share all data. The EMD is computed on the
    given labels; on balanced labels it is the :math:`\sum_y \lvert p_y - \tfrac1M \rvert` of the
    thesis.

    Counts are the exact shares rounded up or down, with remainders for the smallest clients. Below
    about 100 samples a client, this rounding moves the measured EMD off the target;
    :func:`fedjax_sim.partition.limit_label_emd` works on whole samples.

    Args:
        labels: ``int[n]``, of any distribution.
        clients: K, a multiple of the number of classes M.
        emd: the target EMD, in 0 … :math:`2 - 2 \sum_y p(y)^2`, which is 2 - 2/M on balanced
            labels.
        tolerance: largest difference between the EMD of the shares and the target, positive.
        seed: random seed.

    Returns:
        The partition; every sample is used once, and no client is empty.

    Raises:
        ValueError: if emd or tolerance is out of range, or clients is not a multiple of M.

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
    if emd > largest + 1e-9 or not emd >= 0:
        most = math.floor(largest * 1e4) / 1e4
        check_range("emd", emd, 0, most, f" with these {classes} classes")
    if not tolerance > 0:
        raise ValueError(f"tolerance must be positive, got {tolerance}")
    p = _class_probabilities(emd, counts, tolerance, rng)
    shift = rng.permutation(clients) % classes
    exact = p[np.arange(classes) - shift[:, None]] * counts * classes / clients
    table = np.floor(exact).astype(np.int64)
    for label, left in enumerate(counts - table.sum(axis=0)):
        # The fractions sum to ``left`` and each is below 1, so enough clients have one.
        members = np.flatnonzero(exact[:, label] - table[:, label] > 1e-9)
        size_then_chance = np.lexsort((rng.random(members.size), table[members].sum(axis=1)))
        table[members[size_then_chance[:left]], label] += 1
    fill_empty(table)
    return deal(y, table, rng, f"robin_hood({emd:g}, {tolerance:g})")


def _class_probabilities(
    emd: float, counts: NDArray[np.int64], tolerance: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Draws class probabilities with a target EMD, ``f64[M]``.

    Algorithm 1 may jump over the target forever. After 10,000 moves, random classes therefore give
    everything to the richest until the EMD is too large, and p is then interpolated towards equal
    parts, along which the EMD falls linearly to 0.
    """
    classes = counts.size
    shifted = (np.arange(classes) - np.arange(classes)[:, None]) % classes
    pooled = counts / counts.sum()

    def emd_of(p: NDArray[np.float64]) -> float:
        shares = p[shifted] * pooled  # of M consecutive clients; each class sums to its share
        return float(np.abs(shares - np.outer(shares.sum(axis=1), pooled)).sum())

    p = rng.dirichlet(np.ones(classes))
    for _ in range(MOVES):
        current = emd_of(p)
        if abs(current - emd) <= tolerance:
            return p
        pair = rng.choice(classes, 2, replace=False)
        poor, rich = pair[np.argsort(p[pair])]
        most = p[poor] if current < emd else (p[poor] - p[rich]) / 2  # negative: from the rich
        amount = most * rng.random()
        p[rich] += amount
        p[poor] -= amount
    rich = p.argmax()
    for poor in rng.permutation(np.delete(np.arange(classes), rich)):
        if emd_of(p) < emd:
            p[rich] += p[poor]
            p[poor] = 0.0
    return 1 / classes + (p - 1 / classes) * min(emd / emd_of(p), 1.0)
