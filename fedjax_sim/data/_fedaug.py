"""Augmentation against label skew: which samples to copy, and how often."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.data.targets import class_labels
from fedjax_sim.partition.table import Partition, label_table


class FedAug(NamedTuple):
    """Result of :func:`fedjax_sim.data.fedaug`.

    Attributes:
        partition: the clients' samples and copies, for :func:`fedjax_sim.data.client_data`.
        level: ``f64[N]``, level L of each client; 0 if it needs no copies.
        missing: ``bool[N, M]``, classes to raise without a sample at the client.
    """

    partition: Partition
    level: NDArray[np.float64]
    missing: NDArray[np.bool_]


def augmentation_level(counts: ArrayLike, emd: float) -> float:
    r"""Computes the number of samples L to which a client must raise rare classes to reach an EMD.

    With :math:`n_1 \ge \dots \ge n_M` and :math:`s_i = n_1 + \dots + n_i`, the client needs T
    samples in total, and

    .. math:: T = \max_{1 \le i < M} \frac{2 s_i}{EMD^* + 2i/M}, \qquad
              L = \min_{1 \le k < M} \frac{T - s_{M-k}}{k}.

    The minimising k is the number of classes that are raised. If all other classes have more than
    the mean T/M, this equals the formula of the thesis,

    .. math:: L = \frac{2ks_{M-k} - EMD^* s_{M-k} M}{2kM + EMD^* kM - 2k^2}.

    If a class lies between L and the mean, the formula of the thesis is too small, and the client
    stays above EMD*.

    Args:
        counts: ``[M]``, number of samples of each class, or their shares.
        emd: EMD*, the target for :math:`\sum_y |p_k(y) - 1/M|`, at least 0.

    Returns:
        L; 0 if the client is at or below EMD*.

    Raises:
        ValueError: if emd is negative.

    Source: Cornelis 2022 <cornelis2022federated>, eq. 5.4 and Algorithm 4 (which prints the sorting
    order reversed).

    Example:
        >>> counts = [0.46] * 2 + [0.01] * 8  # ll(2, 0.9): EMD 1.44
        >>> round(augmentation_level(counts, 0.4), 4), augmentation_level(counts, 1.5)
        (0.1725, 0.0)
    """
    if not emd >= 0:
        raise ValueError(f"emd must be at least 0, got {emd}")
    sums = np.cumsum(np.sort(np.asarray(counts, float))[::-1])
    classes = sums.size
    first = np.arange(1, classes)
    total = np.max(2 * sums[:-1] / (emd + 2 * first / classes), initial=0.0)
    if total <= sums[-1]:
        return 0.0
    return float(np.min((total - sums[:-1]) / (classes - first)))


def fedaug(labels: ArrayLike, partition: Partition, emd: float) -> FedAug:
    """Copies samples of rare classes until each client is at or below a target EMD (FedAug).

    Classes below L (see ``augmentation_level``) are raised to L, rounded;
    within a class, samples are copied equally often, up to one. A class without a sample at the
    client cannot be raised: it is reported as missing, and the client's EMD stays above the target.

    Args:
        labels: ``int[n]``, classes in 0 … M - 1.
        partition: of N clients.
        emd: EMD*, the target, at least 0.

    Returns:
        The copies and their levels. Add transforms of :mod:`fedjax_sim.augment` to the local
        update, as unaltered copies are useless.

    Raises:
        ValueError: if emd or a label is negative.

    Source: Cornelis 2022 <cornelis2022federated>, chapter 5. (The thesis does not specify
    the clients' weights: here n_k and E count only the original samples.)

    Example:
        >>> from fedjax_sim.partition import partition_from_lists
        >>> plan = fedaug([0, 0, 0, 0, 1], partition_from_lists([range(5)]), 0.2)
        >>> plan.partition.index.tolist(), plan.level.round(2).tolist()  # 5 + 4: a copy of sample 4
        ([0, 1, 2, 3, 4, 9, 9], [2.67])
    """
    y = class_labels(np.asarray(labels), np.size(labels), None, "labels")
    classes = int(y.max()) + 1
    counts = label_table(y, partition, classes)
    level = np.array([augmentation_level(row, emd) for row in counts])
    lacking = np.maximum(np.round(level)[:, None].astype(np.int64) - counts, 0)
    owner = np.repeat(np.arange(len(counts)), partition.sizes)
    cell = owner * classes + y[partition.index % len(y)]
    name = f"{partition.name}, FedAug to {emd:g}"
    copied, missing = _add_copies(partition, cell, lacking.ravel(), len(y), name)
    return FedAug(copied, level, missing.reshape(counts.shape))


def rebalance(labels: ArrayLike, partition: Partition, alpha: float = 1.0) -> Partition:
    r"""Copies samples of globally rare classes (Astraea's global rebalancing).

    A class whose total :math:`C_y` is below the mean :math:`\bar C` is raised to

    .. math:: C_y \left(\bar C / C_y\right)^\alpha

    samples, rounded, with copies spread as evenly as possible over its samples and clients.

    Args:
        labels: ``int[n]``, classes in 0 … M - 1.
        partition: of N clients.
        alpha: α, at least 0; 0 adds no copies, 1 raises rare classes to the mean.

    Returns:
        The clients' samples and copies.

    Raises:
        ValueError: if alpha or a label is negative, or there would be more than 2³¹ - 1 copies.

    Source: Duan, Liu, Chen, Tan, Ren, Qiao, Liang, "Astraea: self-balancing federated learning for
    improving classification accuracy of mobile deep learning applications", ICCD 2019
    <https://arxiv.org/abs/1907.01132>. (In the paper a client's steps grow with its
    copies; in :func:`fedjax_sim.data.client_data` they do not.)

    Example:
        >>> from fedjax_sim.partition import partition_from_lists
        >>> rebalance([0, 0, 0, 0, 0, 1], partition_from_lists([range(3), range(3, 6)])).index
        array([ 0,  1,  2,  3,  4,  5, 11, 11], dtype=int32)
    """
    if not alpha >= 0:
        raise ValueError(f"alpha must be at least 0, got {alpha}")
    y = class_labels(np.asarray(labels), np.size(labels), None, "labels")
    held = y[partition.index % len(y)].astype(np.int64)
    counts = np.bincount(held, minlength=int(y.max()) + 1)
    ratio = np.where(counts > 0, np.maximum(counts.mean() / np.maximum(counts, 1), 1.0), 1.0)
    with np.errstate(over="ignore"):
        lacking = np.round(counts * (ratio**alpha - 1))
    most = np.iinfo(np.int32).max  # the largest position
    if not lacking.sum() <= most:
        raise ValueError(f"alpha must make at most {most:,} copies, got {alpha}")
    name = f"{partition.name}, rebalanced"
    return _add_copies(partition, held, lacking.astype(np.int64), len(y), name)[0]


def _add_copies(
    partition: Partition,
    cell: NDArray[np.int64],
    lacking: NDArray[np.int64],
    samples: int,
    name: str,
) -> tuple[Partition, NDArray[np.bool_]]:
    """Copies ``lacking[c]`` samples in each cell c, at the clients that have them.

    ``cell`` is the cell (a class, or a class of a client) of each entry of the index. Also returns
    ``bool[cells]``, the cells that lack samples but have none to copy.
    """
    real = np.flatnonzero(partition.index < samples)
    real = real[np.argsort(cell[real], kind="stable")]
    size = np.bincount(cell[real], minlength=len(lacking))
    end = np.cumsum(size)
    copies = [
        real[end[c] - size[c] + np.arange(lacking[c]) * size[c] // lacking[c]]
        for c in np.flatnonzero((lacking > 0) & (size > 0))
    ]
    entries = np.concatenate([np.zeros(0, np.int64), *copies])
    owner = np.repeat(np.arange(len(partition.sizes)), partition.sizes)
    index = np.concatenate([partition.index, partition.index[entries] + samples])
    owner = np.concatenate([owner, owner[entries]])
    order = np.lexsort((index, owner))
    sizes = np.bincount(owner, minlength=len(partition.sizes))
    start = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
    rows = index[order].astype(np.int32)
    copied = dataclasses.replace(partition, index=rows, start=start, name=name, repeats=True)
    return copied, (lacking > 0) & (size == 0)
