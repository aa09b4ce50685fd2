"""Samples that clients hold out from training, to test or to validate."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from fedjax_sim.data import Dataset, client_holdout
from fedjax_sim.partition import Partition


def held_out(
    dataset: Dataset, by_seed: Sequence[tuple[int, Partition]], fraction: float
) -> tuple[list[Partition], list[Partition]]:
    """Splits each client's samples, see :func:`fedjax_sim.data.client_holdout`.

    The share is random but for sequences of tokens, whose neighbours overlap: of those it is the
    last.
    """
    tokens = np.issubdtype(dataset.train_x.dtype, np.integer) and dataset.mean is None
    split = [client_holdout(p, fraction, seed=None if tokens else seed) for seed, p in by_seed]
    return [kept for kept, _ in split], [held for _, held in split]


def take_validation(
    dataset: Dataset, by_seed: Sequence[tuple[int, Partition]], share: float
) -> tuple[list[Partition], list[Partition]]:
    """Splits each client's samples into those that train and those that validate.

    Raises:
        ValueError: if no client has two samples.
    """
    train, held = held_out(dataset, by_seed, share)
    if not all(len(one.index) for one in held):
        raise ValueError(f"--validation {share:g} needs a client with two training samples")
    return train, held


def as_one_client(held: Sequence[Partition]) -> list[Partition]:
    """Returns the samples of all clients as those of one."""
    ends = (np.array([0, len(one.index)], np.int32) for one in held)
    return [dataclasses.replace(one, start=start) for one, start in zip(held, ends, strict=True)]


def describe_validation(train: Sequence[Partition], held: Sequence[Partition] | None) -> str:
    """Writes how many samples validate, if any.

    >>> from fedjax_sim.partition import partition_from_lists
    >>> train, held = partition_from_lists([[0, 1], [2]]), partition_from_lists([[3], []])
    >>> describe_validation([train], [held])
    '; validated on 1 of 4 training samples, of 1 of 2 clients'
    """
    if held is None:
        return ""
    counts = sorted({len(one.index) for one in held})
    some = " to ".join(f"{n:,}" for n in dict.fromkeys([counts[0], counts[-1]]))
    total = len(train[0].index) + len(held[0].index)
    return f"; validated on {some} of {total:,} training samples, of {scored_clients(held)}"


def scored_clients(tests: Sequence[Partition]) -> str:
    """Returns how many clients have samples to be scored on, in words.

    >>> from fedjax_sim.partition import partition_from_lists
    >>> scored_clients([partition_from_lists([[0], []]), partition_from_lists([[0], [1]])])
    '1 to 2 of 2 clients'
    """
    clients = len(tests[0].sizes)
    counts = sorted({int(np.sum(test.sizes > 0)) for test in tests})
    scored = " to ".join(map(str, dict.fromkeys([counts[0], counts[-1]])))
    return f"{scored}{f' of {clients}' if counts[0] < clients else ''} clients"
