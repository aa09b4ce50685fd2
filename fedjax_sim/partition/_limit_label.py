"""The limit-label sampler ll(t, f), by its settings or by a target EMD."""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.partition.deal import check_arguments, check_integer, deal
from fedjax_sim.partition.expected import ll_settings
from fedjax_sim.partition.table import Partition


def limit_label(
    labels: ArrayLike,
    clients: int,
    *,
    labels_per_client: int,
    fraction: float = 1.0,
    min_per_class: int = 0,
    seed: int,
) -> Partition:
    r"""The limit-label sampler ll(t, f): most samples of a client have one of its own t labels.

    Client k owns a random set :math:`\Omega_k` of t labels, and each label has Kt/M owners. A
    fraction f of each label goes evenly to its owners, the rest evenly to all clients. On balanced
    labels

    .. math:: EMD = 2f - \frac{2tf}{M}.

    The counts are exact: round(f n_y) samples of label y go to its owners, and what cannot be
    divided goes to the smallest clients, one sample each.

    Args:
        labels: ``int[n]``; M is the number of different labels.
        clients: K; Kt must be divisible by M.
        labels_per_client: t, in 1 … M.
        fraction: f, in 0 … 1.
        min_per_class: the least samples of every class at every client, taken from the owners' part
            (the thesis uses 1 if f = 1).
        seed: of the owner sets and of the deal.

    Returns:
        The partition; every sample is used once, and no client is empty.

    Raises:
        ValueError: if an argument is out of range, Kt is not divisible by M, or there are too few
            samples.

    Source: Cornelis 2022 <cornelis2022federated>, eq. 3.4 to 3.6 and section 4.4.

    Example:
        >>> p = limit_label(np.arange(40) % 4, 4, labels_per_client=1, fraction=0.6, seed=0)
        >>> p.name, p.sizes.tolist()
        ('ll(1, 0.6)', [10, 10, 10, 10])
    """
    y, counts, rng = check_arguments(labels, clients, seed)
    t = check_integer("labels_per_client", labels_per_client)
    check_integer("min_per_class", min_per_class)
    check_design(clients, t, counts.size, counts.size)
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction must be in 0 to 1, got {fraction}")
    least = int(counts.min())
    if not 0 <= min_per_class * clients <= least:
        raise ValueError(
            f"min_per_class must be in 0 to {least // clients} for {clients} clients, as the "
            f"rarest class has {least} samples, got {min_per_class}"
        )
    owned = np.minimum(
        np.rint(fraction * counts).astype(np.int64), counts - min_per_class * clients
    )
    owns = draw_owners(clients, t, counts.size, rng)
    table = np.zeros((clients, counts.size), np.int64)
    # Owners first: the shares of all can level what theirs leave uneven, not the other way round.
    for amount, who in ((owned, owns), (counts - owned, np.ones_like(owns))):
        for label in range(counts.size):
            members = np.flatnonzero(who[:, label])
            each, left = divmod(int(amount[label]), members.size)
            table[members, label] += each
            size_then_chance = np.lexsort((rng.random(members.size), table[members].sum(axis=1)))
            table[members[size_then_chance[:left]], label] += 1
    if not table.any(axis=1).all():
        block = counts.size // math.gcd(t, counts.size)
        most = int(owned.min()) * counts.size // t // block * block
        raise ValueError(
            f"clients must all get samples, got {clients}, of which "
            f"{int((~table.any(axis=1)).sum())} are empty as the rarest class has {least}; "
            + (f"use at most {most} clients" if most else "more samples are needed")
        )
    return deal(y, table, rng, f"ll({t}, {fraction:.6g})")


def check_design(clients: int, t: int, classes: int, most: int) -> None:
    """Checks that t is in 1 … most, and that every label can have exactly Kt/M owners."""
    if not 1 <= t <= most:
        raise ValueError(
            f"labels_per_client must be in 1 to {most} with {classes} classes, got {t}"
        )
    block = classes // math.gcd(t, classes)
    if clients % block:
        nearby = [k for k in (clients // block * block, (clients // block + 1) * block) if k]
        step = classes // math.gcd(clients, classes)
        choices = list(range(step, most + 1, step))
        raise ValueError(
            f"clients times labels_per_client must be a multiple of {classes}, the number of "
            f"classes, got {clients}·{t}; with t={t} use {' or '.join(map(str, nearby))} clients"
            + (f", or with {clients} clients use t in {choices}" if choices else "")
        )


def draw_owners(clients: int, t: int, classes: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which client owns which label: ``bool[K, M]``, t in a row and Kt/M in a column.

    A block of lcm(t, M)/t clients takes turns, t labels each, through one random order of the
    labels. Every block has its own order, and the clients are shuffled at the end.
    """
    block = classes // math.gcd(t, classes)
    owns = np.zeros((clients, classes), bool)
    for first in range(0, clients, block):
        turns = np.resize(rng.permutation(classes), (block, t))
        owns[np.arange(first, first + block)[:, None], turns] = True
    return rng.permutation(owns)


def limit_label_emd(labels: ArrayLike, clients: int, *, emd: float, seed: int) -> Partition:
    """The limit-label sampler at a target EMD; different seeds take different settings.

    It takes ``settings[seed % len(settings)]`` of :func:`fedjax_sim.partition.ll_settings`. As in
    the thesis, a pure ll(t, 1) gives every client at least one sample of every class, but only if
    clients have 100 samples or more on average: with the 36 of digits over 40 clients, those few
    would lower EMD 1.4 to 1.0.

    Args:
        labels: ``int[n]``; the target holds for balanced labels.
        clients: K.
        emd: the target EMD.
        seed: chooses the setting, the owner sets and the deal.

    Returns:
        The partition, named after the target and the setting.

    Raises:
        ValueError: if no setting reaches that EMD, or there are too few samples.

    Source: Cornelis 2022 <cornelis2022federated>, section 4.4: EMD 1.4 by ll(1, 7/9), ll(2, 7/8)
    and ll(3, 1) over four seeds.

    Example:
        >>> labels = np.arange(2000) % 10
        >>> [limit_label_emd(labels, 10, emd=1.4, seed=seed).name for seed in (0, 1, 2)]
        ['emd(1.4): ll(1, 0.777778)', 'emd(1.4): ll(2, 0.875)', 'emd(1.4): ll(3, 1)']
    """
    _, counts, _ = check_arguments(labels, clients, seed)
    if counts.size < 2:
        raise ValueError(f"labels must have at least 2 classes for an EMD of {emd}, got 1")
    settings = ll_settings(emd, counts.size, clients)
    t, f = settings[seed % len(settings)]
    partition = limit_label(
        labels,
        clients,
        labels_per_client=t,
        fraction=f,
        min_per_class=int(f == 1 and counts.sum() >= 100 * clients),
        seed=seed,
    )
    return replace(partition, name=f"emd({emd:g}): {partition.name}")
