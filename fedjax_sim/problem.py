"""What trains and what is scored: a data set, its partitions and a way to split them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import ClientData
from fedjax_sim.commands import deal_seeds
from fedjax_sim.config import Config, Split, Standardise
from fedjax_sim.data import (
    Dataset,
    EvalSet,
    client_data,
    client_folds,
    client_holdout,
    eval_set,
    pooled,
    shift_rows,
    standardise_global,
    standardise_local,
    take_clients,
)
from fedjax_sim.partition import (
    Partition,
    load_partition,
    parse_sampler,
    validate_partition,
)


class Problem(NamedTuple):
    """Clients and evaluation sets of R runs.

    Attributes:
        data: the training clients.
        test: what is reported.
        validation: what chooses the round; None without one.
        runs: of each run, in order, what sets it apart: its seed, and its fold if there are folds.
        scaled: whether x is standardised already, so that the model must not scale it.
        scored: on what the score is, in words.
    """

    data: ClientData
    test: EvalSet
    validation: EvalSet | None
    runs: list[dict[str, int]]
    scaled: bool
    scored: str


def make_partitions(config: Config, dataset: Dataset) -> list[Partition]:
    """One partition of the training samples for each seed, or the one of a file.

    Raises:
        ValueError: if the settings and the data allow none; names the flag.
    """
    text = config.partition
    try:
        if text.endswith(".npz"):
            partition = load_partition(text)
            validate_partition(partition, len(dataset.train_y))
            return [partition]
        _, sample = parse_sampler(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"--partition: {error}") from error
    return deal_seeds(
        sample,
        dataset,
        config.clients,
        config.seeds,
        origin=f"--partition {text}",
        flags=["clients", "emd"],
    )


def population(dataset: Dataset, split: Split) -> Dataset:
    """The data that is dealt to clients: all of it, unless the official test set is scored.

    Images keep the scale of their official training images: it is a constant of the data set like
    the range of a pixel, not a statistic of some clients.
    """
    if split == "official":
        return dataset
    everyone = pooled(dataset)
    if _is_table(dataset):
        return everyone
    return everyone._replace(mean=dataset.mean, std=dataset.std)


def make_problem(config: Config, dataset: Dataset, partitions: Sequence[Partition]) -> Problem:
    """Splits a :func:`population` as the settings say.

    Args:
        config: split, seeds and what belongs to the split.
        dataset: the population.
        partitions: of its training samples; one for all seeds or one for each.

    Raises:
        ValueError: if the data do not allow that split.
    """
    if config.folds is not None:
        return by_clients(dataset, partitions, config.seeds, config.folds, config.standardise)
    if config.test_fraction is not None:
        return by_holdout(
            dataset, partitions, config.seeds, config.test_fraction, config.standardise
        )
    return official(dataset, partitions, config.seeds)


def official(dataset: Dataset, partitions: Sequence[Partition], seeds: Sequence[int]) -> Problem:
    """Every client trains; the data set's own test set is scored, pooled."""
    one = partitions[0] if len(partitions) == 1 else partitions
    return Problem(
        data=client_data(dataset.train_x, dataset.train_y, one),
        test=eval_set(dataset.test_x, dataset.test_y),
        validation=None,
        runs=[{"seed": seed} for seed in seeds],
        scaled=False,
        scored="on the official test set",
    )


def by_clients(
    dataset: Dataset,
    partitions: Sequence[Partition],
    seeds: Sequence[int],
    folds: int,
    standardise: Standardise = "global",
) -> Problem:
    """Cross-validation by client, see :func:`fedjax_sim.data.client_folds`; R is seeds × folds.

    Raises:
        ValueError: if there are too few clients for the folds.
    """
    runs, whole, parts = [], [], []
    for seed, partition in _by_seed(partitions, seeds):
        for f, fold in enumerate(client_folds(len(partition.sizes), folds, seed=seed)):
            runs.append({"seed": seed, "fold": f})
            whole.append(partition)
            parts.append([take_clients(partition, clients) for clients in fold])
    train, validation, test = (list(role) for role in zip(*parts, strict=True))
    sizes = [len(role[0].sizes) for role in (train, validation, test)]
    x, y, scaled = _inputs(dataset, standardise, train=train, whole=whole, fit=whole)
    if scaled:
        train, validation, test = (
            shift_rows(role, len(dataset.train_y)) for role in (train, validation, test)
        )
    return Problem(
        data=client_data(x, y, train),
        test=eval_set(x, y, test),
        validation=eval_set(x, y, validation),
        runs=runs,
        scaled=scaled,
        scored="mean over test clients; {} train, {} validate, {} test in each of {} folds".format(
            *sizes, folds
        ),
    )


def by_holdout(
    dataset: Dataset,
    partitions: Sequence[Partition],
    seeds: Sequence[int],
    fraction: float,
    standardise: Standardise = "global",
) -> Problem:
    """Every client trains and keeps a share of its samples as its own test set.

    See :func:`fedjax_sim.data.client_holdout`. The share is random but for sequences of tokens,
    whose neighbours overlap: of those it is the last.
    """
    tokens = np.issubdtype(dataset.train_x.dtype, np.integer) and dataset.mean is None
    whole, train, test = [], [], []
    for seed, partition in _by_seed(partitions, seeds):
        kept, held = client_holdout(partition, fraction, seed=None if tokens else seed)
        whole.append(partition)
        train.append(kept)
        test.append(held)
    x, y, scaled = _inputs(dataset, standardise, train=train, whole=whole, fit=train)
    if scaled:
        train, test = (shift_rows(role, len(dataset.train_y)) for role in (train, test))
    return Problem(
        data=client_data(x, y, train),
        test=eval_set(x, y, test),
        validation=None,
        runs=[{"seed": seed} for seed in seeds],
        scaled=scaled,
        scored=f"mean over clients, each on {100 * fraction:g} % of its own samples",
    )


def _by_seed(partitions: Sequence[Partition], seeds: Sequence[int]) -> list[tuple[int, Partition]]:
    same = len(partitions) == 1
    return [(seed, partitions[0 if same else i]) for i, seed in enumerate(seeds)]


def _is_table(dataset: Dataset) -> bool:
    return dataset.train_x.ndim == 2 and dataset.mean is not None


def _inputs(
    dataset: Dataset,
    standardise: Standardise,
    *,
    train: Sequence[Partition],
    whole: Sequence[Partition],
    fit: Sequence[Partition],
) -> tuple[NDArray[Any], NDArray[np.int32], bool]:
    """Samples as they are, or of a table R standardised copies, one behind the other.

    A copy for each run costs R · n · F · 4 bytes: for Covertype (495,141 x 54) 107 MB a run.
    """
    x, y, columns = dataset.train_x, dataset.train_y, dataset.numeric
    if not _is_table(dataset):
        if standardise == "local":
            raise ValueError(f"standardise='local' is for tables of numbers, not {dataset.name}")
        return x, y, False
    copies = np.empty((len(train), *x.shape), np.float32)
    for copy, clients, trained, fitted in zip(copies, whole, train, fit, strict=True):
        if standardise == "global":
            copy[:] = standardise_global(x, trained, numeric=columns)
        else:
            copy[:] = standardise_local(x, clients, fit=fitted, numeric=columns)
    return copies.reshape(-1, x.shape[1]), np.tile(y, len(copies)), True
