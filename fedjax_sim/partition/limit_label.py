"""The limit-label sampler ll(t, f), and its settings for a target EMD."""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.partition.deal import check_arguments, check_integer, deal
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
    """Limit-label sampler ll(t, f): most samples of a client are of the t labels that it owns.

    Client k owns a random set Ω_k of t labels, and each label is owned by Kt/M clients. A fraction
    f of each label goes evenly to its owners, the rest evenly to all clients; on balanced labels

        EMD = 2f - 2tf/M.

    Counts are exact: round(f n_y) samples of label y go to its owners, and what does not divide
    goes to the smallest clients, one sample each.

    Args:
        labels: int [n]; M is the number of different labels.
        clients: Number of clients K; Kt must be divisible by M.
        labels_per_client: t, in 1 … M.
        fraction: f, in 0 … 1.
        min_per_class: Least samples of every class at every client, taken from the owners' part
            (the thesis uses 1 when f = 1).
        seed: Of the owner sets and of the deal.

    Returns:
        The partition; every sample is used once, and no client is empty.

    Raises:
        ValueError: An argument out of its range, Kt not divisible by M, or too few samples.

    References:
        Cornelis (thesis), eq. 3.4-3.6 and §4.4.

    >>> p = limit_label(np.arange(40) % 4, 4, labels_per_client=1, fraction=0.6, seed=0)
    >>> p.name, p.sizes.tolist()
    ('ll(1, 0.6)', [10, 10, 10, 10])
    """
    y, counts, rng = check_arguments(labels, clients, seed)
    t = check_integer("labels_per_client", labels_per_client)
    check_integer("min_per_class", min_per_class)
    _check_design(clients, t, counts.size)
    if not 0 <= fraction <= 1:
        raise ValueError(f"fraction={fraction} must be in 0 to 1")
    least = int(counts.min())
    if not 0 <= min_per_class * clients <= least:
        raise ValueError(
            f"min_per_class={min_per_class} must be in 0 to {least // clients} for {clients} "
            f"clients, as the rarest class has {least} samples"
        )
    owned = np.minimum(
        np.rint(fraction * counts).astype(np.int64), counts - min_per_class * clients
    )
    owns = _owners(clients, t, counts.size, rng)
    table = np.zeros((clients, counts.size), np.int64)
    # Owners first: everybody's shares can level what they leave uneven, not the other way round.
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
            f"clients={clients} leaves {int((~table.any(axis=1)).sum())} clients empty, as the "
            f"rarest class has {least} samples; "
            + (f"use at most {most} clients" if most else "more samples are needed")
        )
    return deal(y, table, rng, f"ll({t}, {fraction:.6g})")


def _check_design(clients: int, t: int, classes: int) -> None:
    """Check that every label can have exactly Kt/M owners."""
    if not 1 <= t <= classes:
        raise ValueError(f"labels_per_client={t} must be in 1 to {classes}, the number of classes")
    block = classes // math.gcd(t, classes)
    if clients % block:
        nearby = [k for k in (clients // block * block, (clients // block + 1) * block) if k]
        step = classes // math.gcd(clients, classes)
        raise ValueError(
            f"clients={clients}, labels_per_client={t}: {clients}·{t} is not divisible by "
            f"{classes} classes; with t={t} use {' or '.join(map(str, nearby))} clients, or with "
            f"{clients} clients use t in {list(range(step, classes + 1, step))}"
        )


def _owners(clients: int, t: int, classes: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Who owns what, bool [K, M]: t per row and Kt/M per column.

    A block of lcm(t, M)/t clients takes turns, t labels each, through one random order of the
    labels; every block has an order of its own, and the clients are shuffled at the end.
    """
    block = classes // math.gcd(t, classes)
    owns = np.zeros((clients, classes), bool)
    for first in range(0, clients, block):
        turns = np.resize(rng.permutation(classes), (block, t))
        owns[np.arange(first, first + block)[:, None], turns] = True
    return rng.permutation(owns)


def ll_settings(emd: float, classes: int, clients: int | None = None) -> list[tuple[int, float]]:
    """All settings (t, f) of the limit-label sampler with a given EMD on balanced labels.

    Solves EMD = 2f - 2tf/M: f = EMD·M / (2M - 2t) for every t < M with 0 < f ≤ 1.

    Args:
        emd: Target, in 0 < EMD ≤ 2 - 2/M.
        classes: Number of classes M.
        clients: Number of clients K; if given, only t with Kt divisible by M.

    Returns:
        The settings, t ascending; at least one.

    Raises:
        ValueError: No setting reaches that EMD; the message says what can be reached.

    References:
        Cornelis (thesis), §3.3 and table 4.3 (which prints 0.86 for 7/8).

    >>> [(t, round(f, 4)) for t, f in ll_settings(1.4, 10)]
    [(1, 0.7778), (2, 0.875), (3, 1.0)]
    """
    if classes < 2:
        raise ValueError(f"classes={classes} must be 2 or more")
    step = 1 if clients is None else classes // math.gcd(clients, classes)
    if step == classes:
        raise ValueError(
            f"clients={clients} shares no factor with classes={classes}, so no ll(t, f) has skew; "
            f"use a multiple of {classes}"
        )
    largest = 2 - 2 * step / classes
    if not 0 < emd <= largest + 1e-9:
        limit = "" if clients is None else f" for {clients} clients"
        raise ValueError(
            f"emd={emd} is out of reach of ll(t, f) with {classes} classes{limit}: "
            f"allowed 0 < emd <= {largest:g} (for 0 use iid)"
        )
    choices = [(t, emd * classes / (2 * (classes - t))) for t in range(step, classes, step)]
    # The margin takes 1.0000000000000002 for the 1 that it is.
    return [(t, min(f, 1.0)) for t, f in choices if f <= 1 + 1e-9]


def limit_label_emd(labels: ArrayLike, clients: int, *, emd: float, seed: int) -> Partition:
    """Limit-label sampler at a target EMD, the possible settings in turn over the seeds.

    Takes `settings[seed % len(settings)]` of `ll_settings`. As in the thesis a pure ll(t, 1) gives
    every client at least one sample of every class, but only where clients have 100 samples or
    more on average: with the 36 of digits over 40 clients, those few would lower EMD 1.4 to 1.0.

    Args:
        labels: int [n]; the target holds for balanced labels.
        clients: Number of clients K.
        emd: Target EMD.
        seed: Chooses the setting, the owner sets and the deal.

    Returns:
        The partition, named after the target and the setting.

    Raises:
        ValueError: No setting reaches that EMD, or too few samples.

    References:
        Cornelis (thesis), §4.4: EMD 1.4 by ll(1, 7/9), ll(2, 7/8) and ll(3, 1) over four seeds.

    >>> labels = np.arange(2000) % 10
    >>> [limit_label_emd(labels, 10, emd=1.4, seed=seed).name for seed in (0, 1, 2)]
    ['emd(1.4): ll(1, 0.777778)', 'emd(1.4): ll(2, 0.875)', 'emd(1.4): ll(3, 1)']
    """
    _, counts, _ = check_arguments(labels, clients, seed)
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
