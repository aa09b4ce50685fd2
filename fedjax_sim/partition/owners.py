"""Which client owns which label, and how the samples of a label are shared out."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.partition.deal import fill_empty


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
    labels. Every block has its own order, and the clients are shuffled at the end. If the clients
    do not fill the last block, the columns differ by at most 1.
    """
    block = classes // math.gcd(t, classes)
    owns = np.zeros((clients, classes), bool)
    for first in range(0, clients, block):
        turns = np.resize(rng.permutation(classes), (block, t))[: clients - first]
        owns[np.arange(first, first + len(turns))[:, None], turns] = True
    return rng.permutation(owns)


class Shares(NamedTuple):
    """Who takes part in each label, and in which order what cannot be divided is handed out.

    Attributes:
        members: of each label, the clients, ``int64[...]``.
        chances: of each label, a random number in 0 … 1 for each of them.
    """

    members: list[NDArray[np.int64]]
    chances: list[NDArray[np.float64]]

    def add_to(self, columns: NDArray[np.int64], amounts: NDArray[np.int64]) -> None:
        """Divides some samples of every label evenly; the smallest clients get one more.

        Args:
            columns: ``int64[M, K]``, the samples of every label and client; changed in place.
            amounts: ``int64[M]``; 0 where nobody takes part.
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
                # Sizes are whole numbers, so that chance decides among equal ones alone.
                gains[np.argpartition(sizes[who] + chance, left - 1)[:left]] += 1
            column[who] += gains
            sizes[who] += gains


def draw_shares(owns: NDArray[np.bool_], rng: np.random.Generator) -> Shares:
    """The owners of every label, ``bool[K, M]``, in a random order."""
    members = [np.flatnonzero(column) for column in owns.T]
    return Shares(members, [rng.random(who.size) for who in members])


class Design(NamedTuple):
    """All of a limit-label partition but f, so that f can be looked for.

    Attributes:
        counts: n_y, ``int64[M]``.
        owners: of every label.
        everyone: all clients, for every label.
        min_per_class: the least samples of every class at every client.
    """

    counts: NDArray[np.int64]
    owners: Shares
    everyone: Shares
    min_per_class: int

    def columns(self, fraction: float, *, filled: bool = False) -> NDArray[np.int64]:
        """The samples of every label and client, ``int64[M, K]``; filled: nobody has none."""
        clients = self.everyone.members[0].size
        owned = np.minimum(
            np.rint(fraction * self.counts).astype(np.int64),
            self.counts - self.min_per_class * clients,
        )
        columns = np.zeros((self.counts.size, clients), np.int64)
        # Owners first: the shares of all can level what theirs leave uneven, not the other way
        # round.
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
    """Draws the owners, and who gets what cannot be divided.

    Raises:
        ValueError: if the rarest class has too few samples for min_per_class.
    """
    least = int(counts.min())
    if not 0 <= min_per_class * clients <= least:
        raise ValueError(
            f"min_per_class must be in 0 to {least // clients} for {clients} clients, as the "
            f"rarest class has {least} samples, got {min_per_class}"
        )
    owns = draw_owners(clients, t, counts.size, rng)
    return Design(
        counts, draw_shares(owns, rng), draw_shares(np.ones_like(owns), rng), min_per_class
    )
