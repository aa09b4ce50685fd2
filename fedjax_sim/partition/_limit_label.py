"""The limit-label sampler ll(t, f)."""

import math

import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim.partition.deal import check_arguments, check_integer, deal
from fedjax_sim.partition.owners import check_design, draw_design
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

    .. math:: EMD = 2f - \frac{2tf}{M},

    and on others it is f times the EMD of ll(t, 1), which
    :func:`fedjax_sim.partition.limit_label_emd` takes into account.

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
    design = draw_design(counts, clients, t, min_per_class, rng)
    table = design.columns(fraction).T
    empty = int((~table.any(axis=1)).sum())
    if empty:
        least = int(counts.min())
        owned = np.rint(fraction * counts).astype(np.int64)
        block = counts.size // math.gcd(t, counts.size)
        most = int(owned.min()) * counts.size // t // block * block
        raise ValueError(
            f"clients must all get samples, got {clients}, of which {empty} are empty as the "
            f"rarest class has {least}; "
            + (f"use at most {most} clients" if most else "more samples are needed")
        )
    return deal(y, table, rng, limit_label_name(t, fraction, min_per_class))


def limit_label_name(t: int, fraction: float, min_per_class: int, digits: int = 6) -> str:
    """The text form.

    >>> limit_label_name(3, 1.0, 1)
    'll(3, 1, 1)'
    """
    least = f", {min_per_class}" if min_per_class else ""
    return f"ll({t}, {fraction:.{digits}g}{least})"
