"""Samples that are held out from training, for testing or validation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base.spelling import hint
from fedjax_sim.data import Dataset, client_holdout
from fedjax_sim.partition import Partition, partition_from_lists


def held_out(
    dataset: Dataset, by_seed: Sequence[tuple[int, Partition]], fraction: float
) -> tuple[list[Partition], list[Partition]]:
    """Splits each client's samples, see :func:`fedjax_sim.data.client_holdout`.

    The share is random, except for sequences of tokens, whose neighbours overlap: there it is the
    last samples.
    """
    tokens = np.issubdtype(dataset.train_x.dtype, np.integer) and dataset.mean is None
    split = [client_holdout(p, fraction, seed=None if tokens else seed) for seed, p in by_seed]
    return [kept for kept, _ in split], [held for _, held in split]


def take_validation(
    dataset: Dataset, by_seed: Sequence[tuple[int, Partition]], share: float | None
) -> tuple[list[Partition], list[Partition]]:
    """Splits each client's samples into training samples and a share for validation, if any."""
    if share is None:
        return [partition for _, partition in by_seed], []
    train, held = held_out(dataset, by_seed, share)
    if not all(len(one.index) for one in held):
        raise ValueError(f"--validation {share:g} needs a client with two training samples")
    return train, held


def take_adaptation(
    dataset: Dataset, by_seed: Sequence[tuple[int, Partition]], share: float | None
) -> tuple[list[Partition], list[Partition]]:
    """Splits each client's samples into a share for adaptation, if any, and scored samples."""
    if share is None:
        return [], [partition for _, partition in by_seed]
    adapt, scored = held_out(dataset, by_seed, 1 - share)
    if not all(len(one.index) for one in scored):
        raise ValueError(f"--adapt {share:g} needs a client with two samples")
    return adapt, scored


def with_clients(partition: Partition, other: Partition, clients: NDArray[np.int64]) -> Partition:
    """Returns the partition with some clients' samples taken from another one.

    >>> one, other = partition_from_lists([[0], [1]]), partition_from_lists([[2], [3]])
    >>> with_clients(one, other, np.array([1])).index.tolist()
    [0, 3]
    """
    pairs = enumerate(zip(partition.lists, other.lists, strict=True))
    return partition_from_lists([theirs if k in clients else ours for k, (ours, theirs) in pairs])


def as_one_client(held: Sequence[Partition]) -> list[Partition]:
    """Returns the samples of all clients as one client."""
    ends = (np.array([0, len(one.index)], np.int32) for one in held)
    return [dataclasses.replace(one, start=start) for one, start in zip(held, ends, strict=True)]


def named_clients(names: Sequence[str], chosen: Sequence[str]) -> NDArray[np.int64]:
    """Returns the numbers of the clients of ``--test-clients``, given the names of all.

    >>> named_clients(["art", "photo", "sketch"], ["sketch"]).tolist()
    [2]
    """
    if not names:
        raise ValueError(
            "--test-clients is for natural clients with names: data that name the client of each "
            "sample, without --emd or another --partition"
        )
    for name in chosen:
        if name not in names:
            known = ", ".join([*names[:8], "..."] if len(names) > 8 else names)
            raise ValueError(
                f"--test-clients must be names of clients, got {name!r}{hint(name, names)}; "
                f"clients: {known}"
            )
    numbers = np.unique([names.index(name) for name in chosen])
    if len(numbers) == len(names):
        raise ValueError(f"--test-clients must leave a client to train, got all {len(names)}")
    return numbers


def describe_validation(share: float | None) -> str:
    """Describes the share of clients' samples held out for validation, if any.

    >>> describe_validation(0.25)
    '; validated on 25 % of their training samples'
    """
    return "" if share is None else f"; validated on {100 * share:g} % of their training samples"


def describe_adaptation(share: float | None) -> str:
    """Describes the share of test clients' samples for adaptation, if any.

    >>> describe_adaptation(0.25)
    '; test clients adapt personal models on 25 % of their samples'
    """
    words = "; test clients adapt personal models on {:g} % of their samples"
    return "" if share is None else words.format(100 * share)


def scored_clients(tests: Sequence[Partition]) -> str:
    """Describes how many clients have samples to score.

    >>> scored_clients([partition_from_lists([[0], []]), partition_from_lists([[0], [1]])])
    '1 to 2 of 2 clients'
    """
    clients = len(tests[0].sizes)
    counts = sorted({int(np.sum(test.sizes > 0)) for test in tests})
    scored = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
    return f"{scored}{f' of {clients}' if counts[0] < clients else ''} clients"
