"""Samplers that give a sample to an owner of its label with probability q."""

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
from fedjax_sim.partition.owners import check_design, draw_owners
from fedjax_sim.partition.table import Partition


def limit_label_q(
    labels: ArrayLike, clients: int, *, labels_per_client: int, q: float, seed: int
) -> Partition:
    r"""The sampler ll_q(t, q): a sample goes to an owner of its label with probability q.

    Client k owns a random set :math:`\Omega_k` of t labels, and each label has Kt/M owners. For a
    sample of label y the probabilities of the clients are

    .. math:: \frac{qM}{tK} \;\text{ for } y \in \Omega_k, \qquad
              \frac{1 - q}{K - tK/M} \;\text{ for } y \notin \Omega_k,

    and on balanced labels

    .. math:: EMD = 2 \lvert q - t/M \rvert.

    Every sample is drawn, so that sizes and the measured EMD vary a little with the seed: more with
    fewer samples per client, and upwards if q is near t/M. A client that got nothing takes one
    sample of the largest.

    Args:
        labels: ``int[n]``; M is the number of different labels.
        clients: K; Kt must be divisible by M.
        labels_per_client: t, in 1 … M - 1.
        q: a probability, in 0 … 1; q = t/M has no skew.
        seed: of the owner sets, the draws and the deal.

    Returns:
        The partition; every sample is used once, and no client is empty.

    Raises:
        ValueError: if an argument is out of range, there is one class only, or Kt is not divisible
            by M.

    Source: Cornelis 2022 <cornelis2022federated>, section 3.2.5, eq. 3.10 to 3.13.

    Example:
        >>> p = limit_label_q(np.arange(400) % 4, 4, labels_per_client=2, q=0.9, seed=0)
        >>> p.name, p.sizes.tolist()
        ('ll_q(2, 0.9)', [90, 100, 113, 97])
    """
    y, counts, rng = check_arguments(labels, clients, seed)
    t = check_integer("labels_per_client", labels_per_client)
    if counts.size < 2:
        raise ValueError(f"labels must have at least 2 classes for q={q}, got 1")
    check_design(clients, t, counts.size, counts.size - 1)
    if not 0 <= q <= 1:
        raise ValueError(f"q must be in 0 to 1, got {q}")
    owns = draw_owners(clients, t, counts.size, rng)
    table = np.zeros((clients, counts.size), np.int64)
    for label, total in enumerate(counts):
        owned = rng.binomial(total, q)
        for amount, who in ((owned, owns[:, label]), (total - owned, ~owns[:, label])):
            table[who, label] = rng.multinomial(amount, np.full(who.sum(), 1 / who.sum()))
    fill_empty(table)
    return deal(y, table, rng, f"ll_q({t}, {q:.6g})")


def q_sampler(labels: ArrayLike, clients: int, *, q: float, seed: int) -> Partition:
    r"""The q-sampler: one group of clients for each label, which gets a sample with probability q.

    The clients make M equal groups. A sample of label y goes to a member of group y with
    probability q, and to one of each other group with probability (1 - q)/(M - 1). This is
    :func:`fedjax_sim.partition.limit_label_q` with t = 1; on balanced labels

    .. math:: EMD = 2 \lvert q - 1/M \rvert.

    Args:
        labels: ``int[n]``; M is the number of different labels.
        clients: K, a multiple of M.
        q: a probability, in 0 … 1; q = 1/M has no skew.
        seed: of the groups, the draws and the deal.

    Returns:
        The partition; every sample is used once, and no client is empty.

    Raises:
        ValueError: if q is out of range, there is one class only, or clients is no multiple of M.

    Source: Cornelis 2022 <cornelis2022federated>, section 3.2.2, eq. 3.7 and 3.8. The text before
    eq. 3.7 prints (1 - q)/(1 - M), the equation itself (1 - q)/(m - 1).

    Example:
        >>> q_sampler(np.arange(400) % 4, 4, q=0.7, seed=0).name
        'q(0.7)'
    """
    _, counts, _ = check_arguments(labels, clients, seed)
    check_multiple(clients, counts.size)
    partition = limit_label_q(labels, clients, labels_per_client=1, q=q, seed=seed)
    return replace(partition, name=f"q({q:.6g})")
