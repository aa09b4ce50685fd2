"""XorMixup: samples that clients send in code, and the server makes out with its own."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.data.masked import plain_array
from fedjax_sim.data.targets import class_labels
from fedjax_sim.partition import Partition


class XorMixup(NamedTuple):
    """The pooled samples with those that the server has made.

    Attributes:
        x: ``uint8[n + K, *feature]``; the K last are what the server has made.
        y: ``int32[n + K]``.
        root: ``int64[n_0 + K]``, rows of the server's samples: its own, then those.
        made_of: ``int64[K, 3]``, the rows behind each: whose class it has, what it was coded with,
          and what the server made it out with.
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
    r"""Clients send XORs of two of their samples, which the server undoes with one like it.

    .. math:: \tilde x = x_i \oplus x_j, \qquad \hat x = \tilde x \oplus x_b, \qquad
              y_j = y_b \ne y_i, \qquad \hat y = y_i

    bit by bit, with :math:`x_i, x_j` of one client and :math:`x_b` of the server. What comes out is
    :math:`x_i`, as far as :math:`x_j` and :math:`x_b` are alike. Every client draws i and j
    uniformly; one that has no such pair sends nothing. Any method whose server trains on samples of
    its own trains on these too: ``server.train_on_root``, ``server.train_beside``. (In the paper
    the server trains alone, once, and clients only use its model.) The K messages are as large as
    samples; no traffic of a run holds them but that of ``train_beside``.

    Args:
        x: ``uint8[n, *feature]``, the pooled samples.
        y: ``int[n]``, their classes.
        partition: of N clients, without copies.
        root: ``int[n_0]``, rows of the server's own samples.
        samples: that every client sends.
        seed: of all that is random.

    Returns:
        For :func:`fedjax_sim.data.client_data`: ``x``, ``y`` and ``root``; the partition stays.

    Raises:
        ValueError: if x is not uint8, samples is not positive, root has no rows, or no client has
            a pair.

    Source: Shin, Hwang, Kim, Park, Bennis, Kim, "XOR mixup: privacy-preserving data augmentation
    for one-shot federated learning", 2020 <https://arxiv.org/abs/2006.05148>.

    Example:
        >>> from fedjax_sim.partition import partition_from_lists
        >>> x = np.array([[0b1100], [0b1010], [0b1010]], np.uint8)
        >>> made = xor_mixup(x, [0, 1, 1], partition_from_lists([[0, 1]]), [2], samples=1, seed=0)
        >>> made.x[3:].tolist(), made.y[3:].tolist(), made.root.tolist()
        ([[12]], [0], [2, 3])
    """
    pixels, rows = np.asarray(x), np.asarray(root)
    labels = class_labels(plain_array("y", y), len(pixels), None)
    if pixels.dtype != np.uint8:
        raise ValueError(f"x must be uint8, whose bits are exchanged, got {pixels.dtype}")
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    if not rows.size:
        raise ValueError("root must have a row at least, got none")
    if partition.repeats:
        raise ValueError("partition must have every sample once: code samples before sharing them")
    rng, triples = np.random.default_rng(seed), []
    held = {label: rows[labels[rows] == label] for label in np.unique(labels[rows])}
    for mine in partition.lists:
        pairs = _pairs(mine, labels, held, samples, rng)
        triples += [(i, j, rng.choice(held[labels[j]])) for i, j in pairs]
    if not triples:
        raise ValueError(
            "partition must have a client with samples of two classes, one of them the server's; "
            "none has"
        )
    made_of = np.array(triples, np.int64)
    target, coded_with, undone_with = made_of.T
    new = pixels[target] ^ pixels[coded_with] ^ pixels[undone_with]
    first = len(pixels)
    return XorMixup(
        np.concatenate([pixels, new]),
        np.concatenate([labels, labels[target]]),
        np.concatenate([rows, np.arange(first, first + len(new))]).astype(np.int64),
        made_of,
    )


def _pairs(
    mine: NDArray[np.int32],
    labels: NDArray[np.int32],
    held: dict[int, NDArray[np.int64]],
    samples: int,
    rng: np.random.Generator,
) -> list[tuple[int, int]]:
    """Samples of one client, of two classes, the second one of the server's: uniform pairs."""
    own = labels[mine]
    known = np.isin(own, list(held))
    # Of each sample, how many of the others it may be coded with: as likely is it drawn.
    many = np.array([int(np.sum(known & (own != label))) for label in own])
    if not many.sum():
        return []
    found = []
    for first in rng.choice(len(mine), samples, p=many / many.sum()):
        others = mine[known & (own != own[first])]
        found.append((int(mine[first]), int(rng.choice(others))))
    return found
