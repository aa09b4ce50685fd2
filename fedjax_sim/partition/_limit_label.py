"""Limit-label samplers ll(t, f) and ll_q(t, q): each client owns t labels."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.partition.deal import (
    check_arguments,
    check_integer,
    check_multiple,
    check_range,
    deal,
    fill_empty,
)
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
    r"""Deals most samples of each label to its owners: the limit-label sampler ll(t, f).

    Client k owns a random set :math:`\Omega_k` of t labels, and each label has Kt/M owners. A
    fraction f of each label is split evenly among its owners, the rest evenly among all clients.
    On balanced labels

    .. math:: EMD = 2f - \frac{2tf}{M};

    on others it is f times the EMD of ll(t, 1), see :func:`fedjax_sim.partition.limit_label_emd`.
    Exactly round(f n_y) samples of label y go to its owners; remainders go to the smallest clients,
    one sample each.

    Args:
        labels: ``int[n]``; M is the number of different labels.
        clients: K; Kt must be divisible by M.
        labels_per_client: t, in 1 … M.
        fraction: f, in 0 … 1.
        min_per_class: minimum number of samples of each class for each client, taken from the
            owners' part (the thesis uses 1 if f = 1).
        seed: random seed.

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
    t = _check_owners(clients, labels_per_client, counts.size, counts.size)
    check_range("fraction", fraction, 0, 1)
    table = draw_design(counts, clients, t, min_per_class, rng).columns(fraction).T
    empty = int((~table.any(axis=1)).sum())
    if empty:
        owners = int(np.rint(fraction * counts).min())  # of the rarest class, with a sample each
        block = counts.size // math.gcd(t, counts.size)
        most = owners * counts.size // t // block * block
        raise ValueError(
            f"clients must all get samples, got {clients}, of which {empty} are empty as the "
            f"rarest class has {counts.min()}; "
            + (f"use at most {most} clients" if most else "more samples are needed")
        )
    return deal(y, table, rng, limit_label_name(t, fraction, min_per_class))


def limit_label_name(t: int, fraction: float, min_per_class: int, digits: int = 6) -> str:
    """Returns the text form of a limit-label sampler."""
    least = f", {min_per_class}" if min_per_class else ""
    return f"ll({t}, {fraction:.{digits}g}{least})"


def limit_label_q(
    labels: ArrayLike, clients: int, *, labels_per_client: int, q: float, seed: int
) -> Partition:
    r"""Deals each sample to an owner of its label with probability q: the sampler ll_q(t, q).

    Client k owns a random set :math:`\Omega_k` of t labels, and each label has Kt/M owners. A
    sample of label y goes to client k with probability

    .. math:: \frac{qM}{tK} \;\text{ for } y \in \Omega_k, \qquad
              \frac{1 - q}{K - tK/M} \;\text{ for } y \notin \Omega_k,

    and on balanced labels

    .. math:: EMD = 2 \lvert q - t/M \rvert.

    As every sample is drawn, sizes and the measured EMD vary a little with the seed: more with
    fewer samples per client, and upwards if q is near t/M. An empty client takes one sample from
    the largest.

    Args:
        labels: ``int[n]``; M is the number of different labels.
        clients: K; Kt must be divisible by M.
        labels_per_client: t, in 1 … M - 1.
        q: a probability, in 0 … 1; q = t/M has no skew.
        seed: random seed.

    Returns:
        The partition; every sample is used once, and no client is empty.

    Raises:
        ValueError: if an argument is out of range, there is only one class, or Kt is not divisible
            by M.

    Source: Cornelis 2022 <cornelis2022federated>, section 3.2.5, eq. 3.10 to 3.13.

    Example:
        >>> p = limit_label_q(np.arange(400) % 4, 4, labels_per_client=2, q=0.9, seed=0)
        >>> p.name, p.sizes.tolist()
        ('ll_q(2, 0.9)', [90, 100, 113, 97])
    """
    y, counts, rng = check_arguments(labels, clients, seed)
    if counts.size < 2:
        raise ValueError(f"labels must have at least 2 classes for q={q}, got 1")
    t = _check_owners(clients, labels_per_client, counts.size, counts.size - 1)
    check_range("q", q, 0, 1)
    owns = _draw_owners(clients, t, counts.size, rng)
    table = np.zeros((clients, counts.size), np.int64)
    for label, total in enumerate(counts):
        owned = rng.binomial(total, q)
        for amount, who in ((owned, owns[:, label]), (total - owned, ~owns[:, label])):
            table[who, label] = rng.multinomial(amount, np.full(who.sum(), 1 / who.sum()))
    fill_empty(table)
    return deal(y, table, rng, f"ll_q({t}, {q:.6g})")


def q_sampler(labels: ArrayLike, clients: int, *, q: float, seed: int) -> Partition:
    r"""Deals each sample to its label's group of clients with probability q: the q-sampler.

    The clients form M equal groups. A sample of label y goes to a member of group y with
    probability q, and to each other group with probability (1 - q)/(M - 1). This is
    :func:`fedjax_sim.partition.limit_label_q` with t = 1; on balanced labels

    .. math:: EMD = 2 \lvert q - 1/M \rvert.

    Args:
        labels: ``int[n]``; M is the number of different labels.
        clients: K, a multiple of M.
        q: a probability, in 0 … 1; q = 1/M has no skew.
        seed: random seed.

    Returns:
        The partition; every sample is used once, and no client is empty.

    Raises:
        ValueError: if q is out of range, there is only one class, or clients is not a multiple of
            M.

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


def _check_owners(clients: int, labels_per_client: int, classes: int, most: int) -> int:
    """Returns t, if it is in 1 … most and every label can have exactly Kt/M owners."""
    t = check_integer("labels_per_client", labels_per_client, 1, most, f" with {classes} classes")
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
    return t


def _draw_owners(clients: int, t: int, classes: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draws the owners of each label: ``bool[K, M]``, t in each row and Kt/M in each column.

    Each block of lcm(t, M)/t clients deals a random order of the labels in turn, t labels each; the
    clients are shuffled at the end. If the last block is cut short, columns differ by at most 1.
    """
    block = classes // math.gcd(t, classes)
    owns = np.zeros((clients, classes), bool)
    for first in range(0, clients, block):
        turns = np.resize(rng.permutation(classes), (block, t))[: clients - first]
        owns[np.arange(first, first + len(turns))[:, None], turns] = True
    return rng.permutation(owns)


class Shares(NamedTuple):
    """The clients among which each label is split, and a random number for each of them."""

    members: list[NDArray[np.int64]]
    chances: list[NDArray[np.float64]]

    def add_to(self, columns: NDArray[np.int64], amounts: NDArray[np.int64]) -> None:
        """Splits ``int64[M]`` samples evenly; remainders go to the smallest clients.

        ``columns``, ``int64[M, K]``, counts the samples of each label and client; changed in place.
        """
        sizes = columns.sum(axis=0)
        for column, amount, who, chance in zip(
            columns, amounts.tolist(), self.members, self.chances, strict=True
        ):
            if not amount:
                continue
            each, left = divmod(amount, who.size)
            gains = np.full(who.size, each)
            if left:
                # Sizes are integers, so that chance only breaks ties.
                gains[np.argpartition(sizes[who] + chance, left - 1)[:left]] += 1
            column[who] += gains
            sizes[who] += gains


def draw_shares(owns: NDArray[np.bool_], rng: np.random.Generator) -> Shares:
    """Draws a random order of the owners of each label, ``bool[K, M]``."""
    members = [np.flatnonzero(column) for column in owns.T]
    return Shares(members, [rng.random(who.size) for who in members])


class Design(NamedTuple):
    """All random choices of a limit-label partition, from which a table follows for any f."""

    counts: NDArray[np.int64]
    owners: Shares
    everyone: Shares
    min_per_class: int

    def columns(self, fraction: float, *, filled: bool = False) -> NDArray[np.int64]:
        """Returns the table ``int64[M, K]``; ``filled`` moves samples to empty clients."""
        clients = self.everyone.members[0].size
        owned = np.minimum(
            np.rint(fraction * self.counts).astype(np.int64),
            self.counts - self.min_per_class * clients,
        )
        columns = np.zeros((self.counts.size, clients), np.int64)
        # Owners first, as the shares of all clients can level their remainders, but not vice versa.
        self.owners.add_to(columns, owned)
        self.everyone.add_to(columns, self.counts - owned)
        if filled:
            fill_empty(columns.T)
        return columns


def draw_design(
    counts: NDArray[np.int64],
    clients: int,
    t: int,
    min_per_class: int,
    rng: np.random.Generator,
) -> Design:
    """Draws a design; raises ValueError if the rarest class is too small for min_per_class."""
    least = int(counts.min())
    why = f" for {clients} clients, as the rarest class has {least} samples"
    check_integer("min_per_class", min_per_class, 0, least // clients, why)
    owns = _draw_owners(clients, t, counts.size, rng)
    return Design(
        counts, draw_shares(owns, rng), draw_shares(np.ones_like(owns), rng), min_per_class
    )
