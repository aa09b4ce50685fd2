"""Samplers that give every sample to an owner of its label with probability q."""

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from fedjax_sim.partition.deal import (
    check_arguments,
    check_integer,
    check_multiple,
    deal,
    fill_empty,
)
from fedjax_sim.partition.limit_label import check_design, draw_owners
from fedjax_sim.partition.table import Partition


def limit_label_q(
    labels: ArrayLike, clients: int, *, labels_per_client: int, q: float, seed: int
) -> Partition:
    """Limit-label-q sampler ll_q(t, q): a sample goes to an owner of its label with probability q.

    Client k owns a random set Ω_k of t labels, and each label is owned by Kt/M clients. A sample
    of label y goes to each client with y in Ω_k with probability qM/(tK), to each other client
    with probability (1 - q)/(K - tK/M); on balanced labels

        EMD = 2|q - t/M|.

    Every sample is drawn, so sizes and the measured EMD vary a little with the seed: the fewer
    samples per client, the more, and upwards where q is near t/M. A client that got nothing takes
    one sample of the largest.

    Args:
        labels: int [n]; M is the number of different labels.
        clients: Number of clients K; Kt must be divisible by M.
        labels_per_client: t, in 1 … M - 1.
        q: Probability in 0 … 1; q = t/M has no skew.
        seed: Of the owner sets, the draws and the deal.

    Returns:
        The partition; every sample is used once, and no client is empty.

    Raises:
        ValueError: An argument out of its range, one class only, or Kt not divisible by M.

    References:
        Cornelis (thesis), §3.2.5, eq. 3.10-3.13.

    >>> p = limit_label_q(np.arange(400) % 4, 4, labels_per_client=2, q=0.9, seed=0)
    >>> p.name, p.sizes.tolist()
    ('ll_q(2, 0.9)', [90, 100, 113, 97])
    """
    y, counts, rng = check_arguments(labels, clients, seed)
    t = check_integer("labels_per_client", labels_per_client)
    if counts.size < 2:
        raise ValueError(f"labels hold 1 class; q={q} needs 2 or more")
    check_design(clients, t, counts.size, counts.size - 1)
    if not 0 <= q <= 1:
        raise ValueError(f"q={q} must be in 0 to 1")
    owns = draw_owners(clients, t, counts.size, rng)
    table = np.zeros((clients, counts.size), np.int64)
    for label, total in enumerate(counts):
        owned = rng.binomial(total, q)
        for amount, who in ((owned, owns[:, label]), (total - owned, ~owns[:, label])):
            table[who, label] = rng.multinomial(amount, np.full(who.sum(), 1 / who.sum()))
    fill_empty(table)
    return deal(y, table, rng, f"ll_q({t}, {q:.6g})")


def q_sampler(labels: ArrayLike, clients: int, *, q: float, seed: int) -> Partition:
    """q-sampler: one group of clients per label, which gets a sample with probability q.

    The clients make M equal groups. A sample of label y goes to a member of group y with
    probability q, of each other group with probability (1 - q)/(M - 1). This is `limit_label_q`
    with t = 1; on balanced labels

        EMD = 2|q - 1/M|.

    Args:
        labels: int [n]; M is the number of different labels.
        clients: Number of clients K, a multiple of M.
        q: Probability in 0 … 1; q = 1/M has no skew.
        seed: Of the groups, the draws and the deal.

    Returns:
        The partition; every sample is used once, and no client is empty.

    Raises:
        ValueError: q out of its range, one class only, or clients not a multiple of M.

    References:
        Cornelis (thesis), §3.2.2, eq. 3.7-3.8 (which print (1 - q)/(1 - M)).

    >>> q_sampler(np.arange(400) % 4, 4, q=0.7, seed=0).name
    'q(0.7)'
    """
    _, counts, _ = check_arguments(labels, clients, seed)
    check_multiple(clients, counts.size)
    partition = limit_label_q(labels, clients, labels_per_client=1, q=q, seed=seed)
    return replace(partition, name=f"q({q:.6g})")
