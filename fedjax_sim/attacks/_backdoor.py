"""A backdoor: samples with a trigger and the attackers' label."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.attacks._malicious import Malicious, check_malicious
from fedjax_sim.base import ClientData
from fedjax_sim.base.words import array_type
from fedjax_sim.data.clients import EvalSet, eval_set, in_host_memory
from fedjax_sim.partition import Partition


def backdoor(
    data: ClientData,
    test: EvalSet | tuple[Any, Any],
    malicious: Malicious,
    classes: int,
    target: int = 0,
    share: float = 0.5,
    size: int = 3,
) -> tuple[ClientData, EvalSet]:
    r"""Stamps a trigger on samples of malicious clients and labels them as the target.

    The trigger is a square of the brightest value of the clients' images, in the lower right
    corner. ``round(share n_k)`` samples of a malicious client carry it, whatever their class. Each
    test sample of another class gets an additional copy with the trigger. The score
    ``attack_success`` of ``fs.tasks.classification(M, backdoor=True)`` is the share of these copies
    that a model classifies as the target. With :class:`fedjax_sim.sending.scaling` it is the
    paper's model replacement.

    Args:
        data: the clients.
        test: the samples to score, a pair (x, y) or made by :func:`fedjax_sim.data.eval_set`.
        malicious: ``bool[N]``.
        classes: M, the number of classes.
        target: the class that the attackers want.
        share: the share of a malicious client's samples with the trigger.
        size: height and width of the trigger in pixels.

    Returns:
        The clients, with the samples with the trigger appended to x and y; and the evaluation set,
        where y is M + target for a copy with the trigger.

    Raises:
        ValueError: if a setting is out of range, data are not images of classes, their labels were
            changed before, or they have copies of samples (FedAug, rebalancing).

    Source: Bagdasaryan et al. 2018 <https://arxiv.org/abs/1807.00459>, with the pixel pattern of Gu
    et al. 2017 <https://arxiv.org/abs/1708.06733>.

    Example:
        >>> import fedjax_sim as fs
        >>> digits = fs.load_dataset("digits")
        >>> parts = fs.partition.iid(digits.train_y, 10, seed=0)
        >>> data = fs.client_data(digits.train_x, digits.train_y, parts)
        >>> test, malicious = (digits.test_x, digits.test_y), np.arange(10) < 2
        >>> poisoned, scored = backdoor(data, test, malicious, 10, target=3, share=0.25)
        >>> (len(poisoned.y) - len(data.y), len(scored.y) - len(digits.test_y))
        (72, 322)
    """
    check_malicious(malicious, data)
    x, y = np.asarray(data.x), np.asarray(data.y)
    if x.ndim != 4 or y.ndim != 1 or y.dtype.kind != "i":
        raise ValueError(
            f"backdoor is for images [n, H, W, C] of classes, got x {array_type(x)} and "
            f"y {array_type(y)}"
        )
    if data.relabel is not None or data.copies:
        what = "labels that were changed before" if data.relabel is not None else "copies"
        raise ValueError(f"data must have its original labels and samples, got {what}")
    if target not in range(classes):
        raise ValueError(f"target must be a class, in 0..{classes - 1}, got {target}")
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1], got {share}")
    height, width = x.shape[1:3]
    if size not in range(1, min(height, width) + 1):
        raise ValueError(
            f"size must be in 1..{min(height, width)}, as images are {height} x {width}, got {size}"
        )
    examples = test if isinstance(test, EvalSet) else eval_set(*test)
    white = x.max()
    poisoned = _poisoned(data, x, malicious, target, share, size, white)
    return poisoned, _triggered(examples, classes, target, size, white)


def _stamped(x: NDArray[Any], size: int, white: Any) -> NDArray[Any]:
    """Returns images with the trigger."""
    stamped = x.copy()
    stamped[:, -size:, -size:] = white
    return stamped


def _poisoned(
    data: ClientData,
    x: NDArray[Any],
    malicious: Malicious,
    target: int,
    share: float,
    size: int,
    white: Any,
) -> ClientData:
    index, y = np.array(data.index), np.asarray(data.y)
    entries = [np.empty(0, np.int64)]
    for run, start in enumerate(np.atleast_2d(data.start)):
        for k in np.flatnonzero(malicious):
            own = np.random.default_rng([run, int(k)]).permutation(
                np.arange(start[k], start[k + 1])
            )
            entries.append(own[: round(share * len(own))])
    chosen = np.concatenate(entries)
    rows, place = np.unique(index[chosen], return_inverse=True)
    index[chosen] = len(x) + place
    return dataclasses.replace(
        data,
        x=in_host_memory(np.concatenate([x, _stamped(x[rows], size, white)])),
        y=in_host_memory(np.concatenate([y, np.full(len(rows), target, y.dtype)])),
        index=in_host_memory(index),
    )


def _triggered(examples: EvalSet, classes: int, target: int, size: int, white: Any) -> EvalSet:
    x, y = np.asarray(examples.x), np.asarray(examples.y)
    runs = zip(np.atleast_2d(examples.index), np.atleast_2d(examples.start), strict=True)
    lists = [np.split(index[: start[-1]], start[1:-1]) for index, start in runs]
    others = [[own[y[own] != target] for own in clients] for clients in lists]
    rows = np.unique(np.concatenate([own for clients in others for own in clients]))

    def with_copies(clients: list[NDArray[Any]], others: list[NDArray[Any]]) -> Partition:
        both = [
            np.concatenate([own, len(x) + np.searchsorted(rows, wanted)])
            for own, wanted in zip(clients, others, strict=True)
        ]
        start = np.cumsum([0, *map(len, both)]).astype(np.int32)
        return Partition(np.concatenate(both).astype(np.int32), start)

    partitions = [*map(with_copies, lists, others)]
    made = eval_set(
        np.concatenate([x, _stamped(x[rows], size, white)]),
        np.concatenate([y, np.full(len(rows), classes + target, y.dtype)]),
        partitions if examples.index.ndim == 2 else partitions[0],
    )
    return dataclasses.replace(made, adapt=examples.adapt)
