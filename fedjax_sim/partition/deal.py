"""What all samplers share: checked arguments, and samples dealt by a table of counts."""

import operator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedjax_sim.partition.table import Partition


def check_integer(name: str, value: Any) -> int:
    """The value as an int; a TypeError that names the argument if it is no integer.

    >>> check_integer("clients", 2.5)
    Traceback (most recent call last):
    TypeError: clients=2.5 must be an integer
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be an integer") from None


def check_arguments(
    labels: ArrayLike, clients: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], np.random.Generator]:
    """Check what every sampler is given.

    Args:
        labels: int [n].
        clients: Number of clients K.
        seed: Seed of the sampler's random numbers, 0 or more.

    Returns:
        The class of every sample, int64 [n], as its rank among the labels that occur (so no class
        is empty); samples per class, int64 [M]; the random generator.

    Raises:
        ValueError: labels are not a list of integers, clients is not in 1 … n, or seed < 0.
        TypeError: clients or seed is not an integer.
    """
    y = np.asarray(labels)
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise ValueError(f"labels must be int [n], got {y.dtype} {list(y.shape)}")
    if not 1 <= check_integer("clients", clients) <= y.size:
        raise ValueError(f"clients={clients} must be in 1 to {y.size}, the number of samples")
    if check_integer("seed", seed) < 0:
        raise ValueError(f"seed={seed} must be 0 or more")
    _, y, counts = np.unique(y, return_inverse=True, return_counts=True)
    return y.astype(np.int64), counts.astype(np.int64), np.random.default_rng(seed)


def check_multiple(clients: int, classes: int) -> None:
    """Check that the clients make as many equal groups as there are classes.

    >>> check_multiple(25, 10)
    Traceback (most recent call last):
    ValueError: clients=25 must be a multiple of 10, the number of classes: use 20 or 30
    """
    if clients % classes:
        below = clients // classes * classes
        nearby = " or ".join(str(k) for k in (below, below + classes) if k)
        raise ValueError(
            f"clients={clients} must be a multiple of {classes}, the number of classes: "
            f"use {nearby}"
        )


def deal(
    y: NDArray[np.int64], table: NDArray[np.int64], rng: np.random.Generator, name: str
) -> Partition:
    """Give every client its number of random samples of each class.

    Args:
        y: Class of every sample, int64 [n].
        table: Samples of class y for client k, int64 [K, M]; columns sum to the class sizes.
        rng: Chooses which samples.
        name: The partition's name.

    Returns:
        A partition with that label table; every sample is used once.

    >>> y = np.array([0, 0, 1, 1, 1])
    >>> deal(y, np.array([[2, 1], [0, 2]]), np.random.default_rng(0), "example").sizes.tolist()
    [3, 2]
    """
    clients, classes = table.shape
    owner = np.empty(y.size, np.int64)
    for label in range(classes):
        members = rng.permutation(np.flatnonzero(y == label))
        owner[members] = np.repeat(np.arange(clients), table[:, label])
    start = np.concatenate([[0], np.cumsum(table.sum(axis=1))])
    # A stable sort by owner leaves the positions of each client in ascending order.
    index = np.argsort(owner, kind="stable")
    return Partition(index.astype(np.int32), start.astype(np.int32), name)


def fill_empty(table: NDArray[np.int64]) -> None:
    """Move a sample of the largest client to each that has none, in place.

    With as many samples as clients or more, the largest has two whenever another has none.

    Args:
        table: Samples per client and class, int64 [K, M].

    >>> table = np.array([[2, 3], [0, 0]])
    >>> fill_empty(table)
    >>> table.tolist()
    [[2, 2], [0, 1]]
    """
    for empty in np.flatnonzero(~table.any(axis=1)):
        giver = table.sum(axis=1).argmax()
        label = table[giver].argmax()
        table[giver, label] -= 1
        table[empty, label] += 1


def even_sizes(samples: int, clients: int) -> NDArray[np.int64]:
    """Split a number into parts that differ by at most 1, int64 [clients].

    >>> even_sizes(7, 3).tolist()
    [3, 2, 2]
    """
    return (samples + clients - 1 - np.arange(clients, dtype=np.int64)) // clients
