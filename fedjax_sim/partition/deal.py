"""Shared parts of all samplers: argument checks, and dealing samples by a table of counts."""

import heapq
import math
import operator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.base.words import array_type
from fedjax_sim.partition.table import Partition, partition_from_owners


def check_range(name: str, value: float, least: float, most: float, why: str = "") -> None:
    """Raises ValueError if a number is out of range; ``why`` explains the range."""
    if not least <= value <= most:
        raise ValueError(f"{name} must be in {least:.9g} to {most:.9g}{why}, got {str(value)[:20]}")


def check_integer(
    name: str, value: Any, least: float = -math.inf, most: float = math.inf, why: str = ""
) -> int:
    """Returns the value as an int, see :func:`check_range`; raises TypeError if it is not one."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {value!r}") from None
    check_range(name, number, least, most, why)
    return number


def check_arguments(
    labels: ArrayLike, clients: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], np.random.Generator]:
    """Checks the arguments that all label-based samplers have.

    Returns the class of each sample, ``int64[n]``, as its rank among the labels that occur; the
    number of samples of each class, ``int64[M]``; the random generator.
    """
    y = np.asarray(labels)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        instead = "samplers for any targets are iid, quantity, power_law and natural"
        if y.dtype.kind in "UO":
            instead = "number texts by fs.data.from_arrays"
        raise ValueError(f"labels must be classes, int [n], got {array_type(y)}: {instead}")
    _, rng = check_number(y, clients, seed)
    _, y, counts = np.unique(y, return_inverse=True, return_counts=True)
    return y.astype(np.int64), counts.astype(np.int64), rng


def check_number(targets: ArrayLike, clients: int, seed: int) -> tuple[int, np.random.Generator]:
    """Checks clients and seed, and returns the number of samples and the random generator."""
    samples = np.shape(targets)[0]
    check_integer("clients", clients, 1, samples, ", the number of samples")
    if check_integer("seed", seed) < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    return samples, np.random.default_rng(seed)


def check_multiple(clients: int, classes: int) -> None:
    """Raises ValueError unless the clients can form one equal group for each class."""
    if clients % classes:
        below = clients // classes * classes
        nearby = " or ".join(str(k) for k in (below, below + classes) if k)
        raise ValueError(
            f"clients must be a multiple of {classes}, the number of classes, got {clients}: "
            f"use {nearby}"
        )


def deal(
    y: NDArray[np.int64], table: NDArray[np.int64], rng: np.random.Generator, name: str
) -> Partition:
    """Deals random samples of each class to clients by a table of counts, ``int64[K, M]``."""
    clients = np.arange(len(table))
    owner = np.empty(y.size, np.int64)
    by_class = np.split(np.argsort(y, kind="stable"), np.cumsum(table.sum(axis=0))[:-1])
    for members, column in zip(by_class, table.T, strict=True):
        owner[rng.permutation(members)] = np.repeat(clients, column)
    return partition_from_owners(owner, len(table), name)


def fill_empty(table: NDArray[np.int64]) -> None:
    """Moves one sample of the largest client to each empty client of ``int64[K, M]``, in place."""
    sizes = table.sum(axis=1)
    empties = np.flatnonzero(sizes == 0).tolist()
    if not empties:
        return
    # A heap of clients, largest first: a search for each empty client would cost K each.
    largest = [(-size, client) for client, size in enumerate(sizes.tolist())]
    heapq.heapify(largest)
    for empty in empties:
        size, giver = largest[0]
        label = table[giver].argmax()
        table[giver, label] -= 1
        table[empty, label] += 1
        heapq.heapreplace(largest, (size + 1, giver))


def even_sizes(samples: int, clients: int) -> NDArray[np.int64]:
    """Splits a number of samples into parts that differ by at most 1, ``int64[clients]``."""
    return (samples + clients - 1 - np.arange(clients, dtype=np.int64)) // clients
