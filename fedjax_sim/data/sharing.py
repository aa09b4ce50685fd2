"""Samples that clients share: a common subset for all clients, and XOR mixups for the server."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.data.arrays import plain_array
from fedjax_sim.data.targets import class_labels
from fedjax_sim.partition.table import Partition

BLOCK = 1 << 20  # positions that are permuted at once


def share(
    labels: ArrayLike, partition: Partition, beta: float, alpha: float = 1.0, *, seed: int
) -> Partition:
    r"""Shares a balanced set G of the clients' samples; each client receives a random part of it.

    G has :math:`\beta n / M` random samples of each class, rounded, out of the n samples that the
    clients hold, and is removed from the clients that held it. Each client then receives its own
    random fraction :math:`\alpha` of each class of G. With equally frequent classes and clients of
    equal size, a client's EMD shrinks, on average, to

    .. math:: EMD_k' = \frac{1 - \beta}{1 - \beta + \alpha \beta N} EMD_k.

    Args:
        labels: ``int[n]``, classes in 0 … M - 1.
        partition: of N clients.
        beta: β, the size of G as a fraction of all samples, above 0 and below 1.
        alpha: α, the fraction of G that each client receives, above 0 and at most 1.
        seed: random seed.

    Returns:
        The clients' samples; samples of G may belong to several clients. The samples sent to each
        client, :math:`\alpha \beta n`, count as traffic before the first round.

    Raises:
        ValueError: if a setting or a label is out of range, or a class has too few samples for G.

    Source: Zhao, Li, Lai, Suda, Civin, Chandra, "Federated learning with non-IID data", 2018
    <https://arxiv.org/abs/1806.00582>, section 4. In the paper, G comes from held-out data and also
    trains the initial model; here G is part of the clients' data and the initial model is random,
    so that methods are comparable.

    Example:
        >>> from fedjax_sim.partition import label_table, partition_from_lists
        >>> y = np.repeat([0, 1], 10)
        >>> p = partition_from_lists([range(10), range(10, 20)])
        >>> label_table(y, share(y, p, beta=0.2, alpha=0.5, seed=0), 2).tolist()
        [[9, 1], [1, 9]]
    """
    if not 0 < beta < 1:
        raise ValueError(f"beta must be above 0 and below 1, got {beta}")
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be above 0 and at most 1, got {alpha}")
    y = class_labels(np.asarray(labels), np.size(labels), None, "labels")
    rng = np.random.default_rng(seed)
    held = np.unique(partition.index)
    if held[-1] >= len(y):
        raise ValueError("partition must have no copies yet, got some: share before augmenting")
    classes = np.arange(int(y.max()) + 1)
    count = round(beta * held.size / classes.size)
    common = []
    for label in classes:
        members = held[y[held] == label]
        if count > members.size:
            raise ValueError(
                f"beta must take at most the {members.size} samples of class {label}, got {beta}, "
                f"which takes {count} of each class"
            )
        common.append(rng.permutation(members)[:count])
    part, clients = round(alpha * count), partition.sizes.size
    shared = np.zeros(len(y), bool)
    shared[np.concatenate(common)] = True
    kept = ~shared[partition.index]
    owner = np.repeat(np.arange(clients), partition.sizes)[kept]
    received = [_random_parts(members, part, clients, rng).ravel() for members in common]
    index = np.concatenate([partition.index[kept], *received])
    owner = np.concatenate([owner, *[np.repeat(np.arange(clients), part)] * classes.size])
    start = np.append(0, np.cumsum(np.bincount(owner, minlength=clients)))
    order = owner * len(y) + index  # one sort of numbers takes a fifth of a sort by two keys
    order.sort()
    return Partition(
        (order % len(y)).astype(np.int32),
        start.astype(np.int32),
        f"{partition.name}, sharing {beta:g} by {alpha:g}",
        repeats=True,
        sent=part * classes.size,
    )


def _random_parts(
    members: NDArray[np.int32], part: int, clients: int, rng: np.random.Generator
) -> NDArray[np.int32]:
    """Draws ``part`` of the members for each client without replacement, ``int32[N, part]``."""
    if part == members.size:
        return np.tile(members, (clients, 1))
    parts = np.empty((clients, part), np.int32)
    # In blocks of clients: the permutations of all clients together would be N times G.
    block = max(1, BLOCK // members.size)
    for first in range(0, clients, block):
        rows = parts[first : first + block]
        rows[:] = rng.permuted(np.tile(members, (len(rows), 1)), axis=1)[:, :part]
    return parts


class XorMixup(NamedTuple):
    """Pooled samples with the server's decoded samples appended.

    Attributes:
        x: ``uint8[n + K, *feature]``; the last K are the decoded samples.
        y: ``int32[n + K]``.
        root: ``int64[n_0 + K]``, rows of the server's samples: its own, then the decoded ones.
        made_of: ``int64[K, 3]``, rows i, j and b behind each decoded sample.
    """

    x: NDArray[np.uint8]
    y: NDArray[np.int32]
    root: NDArray[np.int64]
    made_of: NDArray[np.int64]


def xor_mixup(
    x: ArrayLike,
    y: ArrayLike,
    partition: Partition,
    root: ArrayLike,
    *,
    samples: int,
    seed: int,
) -> XorMixup:
    r"""Encodes clients' samples by XOR and decodes them at the server with its own samples.

    .. math:: \tilde x = x_i \oplus x_j, \qquad \hat x = \tilde x \oplus x_b, \qquad
              y_j = y_b \ne y_i, \qquad \hat y = y_i

    bit by bit, with :math:`x_i, x_j` of one client and :math:`x_b` of the server. The result is
    close to :math:`x_i` if :math:`x_j` and :math:`x_b` are similar. Each client draws i and j
    uniformly; a client without such a pair sends nothing. Any method whose server trains on its own
    samples can use the result: ``server.train_on_root``, ``server.train_beside``. (In the paper
    only the server trains, once, and clients only use its model.) The K messages are as large as
    samples; only ``train_beside`` counts them in a run's traffic.

    Args:
        x: pooled samples, ``uint8[n, *feature]``.
        y: their classes, ``int[n]``.
        partition: of N clients, without copies.
        root: ``int[n_0]``, rows of the server's own samples.
        samples: number of samples that each client sends.
        seed: random seed.

    Returns:
        ``x``, ``y`` and ``root`` for :func:`fedjax_sim.data.client_data`, with the same partition.

    Raises:
        ValueError: if x is not uint8, samples is not positive, root is empty or out of range, or
            no client has a pair.

    Source: Shin, Hwang, Kim, Park, Bennis, Kim, "XOR mixup: privacy-preserving data augmentation
    for one-shot federated learning", 2020 <https://arxiv.org/abs/2006.05148>.

    Example:
        >>> from fedjax_sim.partition import partition_from_lists
        >>> x = np.array([[0b1100], [0b1010], [0b1010]], np.uint8)
        >>> mixup = xor_mixup(x, [0, 1, 1], partition_from_lists([[0, 1]]), [2], samples=1, seed=0)
        >>> mixup.x[3:].tolist(), mixup.y[3:].tolist(), mixup.root.tolist()
        ([[12]], [0], [2, 3])
    """
    pixels, rows = plain_array("x", x), np.asarray(root)
    labels = class_labels(plain_array("y", y), len(pixels), None)
    if pixels.dtype != np.uint8:
        raise ValueError(f"x must be uint8, as its bits are exchanged, got {pixels.dtype}")
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    if not rows.size:
        raise ValueError("root must have at least one row, got none")
    if rows.dtype.kind not in "iu" or not 0 <= rows.min() <= rows.max() < len(pixels):
        raise ValueError(
            f"root must be integers in 0 to {len(pixels) - 1}, got {rows.min()} to {rows.max()}"
        )
    partition.check_unshared("use xor_mixup before sharing")
    rng, triples = np.random.default_rng(seed), []
    of_server = {label: rows[labels[rows] == label] for label in np.unique(labels[rows])}
    for positions in partition.lists:
        pairs = _draw_pairs(positions, labels, of_server, samples, rng)
        triples += [(i, j, rng.choice(of_server[labels[j]])) for i, j in pairs]
    if not triples:
        raise ValueError(
            "partition must have a client with samples of two classes, of which the server has "
            "one, got none"
        )
    made_of = np.array(triples, np.int64)
    i, j, b = made_of.T
    decoded = pixels[i] ^ pixels[j] ^ pixels[b]
    first = len(pixels)
    return XorMixup(
        np.concatenate([pixels, decoded]),
        np.concatenate([labels, labels[i]]),
        np.concatenate([rows, np.arange(first, first + len(decoded))]).astype(np.int64),
        made_of,
    )


def _draw_pairs(
    positions: NDArray[np.int32],
    labels: NDArray[np.int32],
    of_server: dict[int, NDArray[np.int64]],
    samples: int,
    rng: np.random.Generator,
) -> list[tuple[int, int]]:
    """Draws uniform pairs of one client's samples, the second of another class of the server."""
    classes = labels[positions]
    known = np.isin(classes, list(of_server))
    # The number of partners of each sample, in proportion to which it is drawn.
    partners = np.array([int(np.sum(known & (classes != label))) for label in classes])
    if not partners.sum():
        return []
    pairs = []
    for first in rng.choice(len(positions), samples, p=partners / partners.sum()):
        others = positions[known & (classes != classes[first])]
        pairs.append((int(positions[first]), int(rng.choice(others))))
    return pairs
