"""What trains and what is scored: a data set, its partitions and a way to split them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import ClientData
from fedjax_sim.cli.commands import deal_seeds
from fedjax_sim.cli.config import Config, Experiment, Preparation, Split, Standardise
from fedjax_sim.cli.flags import flag
from fedjax_sim.data import (
    Dataset,
    EvalSet,
    client_data,
    client_folds,
    client_holdout,
    eval_set,
    fedaug,
    pooled,
    rebalance,
    share,
    shift_rows,
    standardise_global,
    standardise_local,
    take_clients,
    take_root,
)
from fedjax_sim.data.targets import strata
from fedjax_sim.partition import (
    SAMPLERS,
    Partition,
    load_partition,
    parse_sampler,
    validate_partition,
)


class Prepared(NamedTuple):
    """Training samples: the clients', and the rows of the server's own, if it has any."""

    partition: Partition
    root: NDArray[np.int64] | None


Prepare = Callable[[NDArray[Any], Partition, int], Prepared]
"""``(y, partition, seed)``: what becomes of the clients' training samples."""


class Problem(NamedTuple):
    """Clients and evaluation sets of R runs.

    Attributes:
        data: the training clients.
        trained: their samples, one partition for each run or one for all.
        test: what is reported.
        validation: what chooses the round; None without one.
        runs: of each run, in order, what sets it apart: its seed, and its fold if there are folds.
        scaled: whether x is standardised already, so that the model must not scale it.
        scored: on what the score is, in words.
    """

    data: ClientData
    trained: list[Partition]
    test: EvalSet
    validation: EvalSet | None
    runs: list[dict[str, int]]
    scaled: bool
    scored: str


def make_partitions(experiment: Experiment, split: Split, dataset: Dataset) -> list[Partition]:
    """One partition of the training samples for each seed, or the one of a file.

    Raises:
        ValueError: if the settings and the data allow none, or a user's sampler fails; names the
          flag.
    """
    text, clients = dealt_by(experiment, dataset)
    try:
        if text.endswith(".npz"):
            name = f"{dataset.name} in --split {split}"
            partition = load_partition(text, dataset.train_y, name)
            validate_partition(partition, len(dataset.train_y))
            _check_clients(clients, partition)
            return [partition]
        name, sample = parse_sampler(text)
    except (OSError, ValueError) as error:
        raise ValueError(f"--partition: {error}") from error
    return deal_seeds(
        sample,
        dataset,
        clients,
        experiment.seeds,
        origin=f"--partition {text}",
        flags=["clients", "emd"],
        foreign=SAMPLERS.is_foreign(name),
    )


def dealt_by(experiment: Experiment, dataset: Dataset) -> tuple[str, int | None]:
    """The sampler or the file that deals the samples, and N; None for as many as it has.

    Classes are skewed unless told otherwise. Other targets have no such skew: their owners are the
    clients, if the data have any and no other number of clients is asked for.
    """
    text, clients = experiment.partition, experiment.clients
    if text is None:
        owned = dataset.train_client is not None and clients is None
        text = "emd(1.4)" if dataset.task.classes is not None else "natural" if owned else "iid"
    counted = text.startswith("natural") or text.endswith(".npz")
    return text, 40 if clients is None and not counted else clients


def _check_clients(asked: int | None, partition: Partition) -> None:
    if asked not in (None, found := len(partition.sizes)):
        raise ValueError(f"the file has {found} clients, --clients is {asked}: leave it out")


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
    prepare = preparation(config.preparation, dataset)
    seeds, scores = config.experiment.seeds, config.scores
    if scores.standardise is not None and not _is_table(dataset):
        raise ValueError(
            f"standardise={scores.standardise!r} is for tables of numbers, not {dataset.name}"
        )
    standardise = scores.standardise or "global"
    if scores.folds is not None:
        return by_clients(dataset, partitions, seeds, scores.folds, standardise, prepare)
    if scores.test_fraction is not None:
        return by_holdout(dataset, partitions, seeds, scores.test_fraction, standardise, prepare)
    return official(dataset, partitions, seeds, prepare)


def preparation(settings: Preparation, dataset: Dataset) -> Prepare:
    """The server's samples, data sharing, rebalancing, FedAug, as far as the settings ask for them.

    Raises:
        ValueError: here or by what it returns, if the data do not allow a setting; names the flag.
    """
    for name in ("share_beta", "rebalance", "fedaug"):
        if dataset.task.classes is None and getattr(settings, name) is not None:
            raise ValueError(f"{flag(name)} is for classes, {dataset.name} is {dataset.task!r}")

    def prepare(y: NDArray[Any], partition: Partition, seed: int) -> Prepared:
        labels, root = strata(y, dataset.task), None
        if settings.server_fraction is not None:
            size = max(1, round(settings.server_fraction * len(partition.index)))
            try:
                partition, root = take_root(labels, partition, size, seed=seed)
            except ValueError as error:
                raise ValueError(f"--server-fraction: {error}") from error
        if settings.share_beta is not None:
            alpha = 1.0 if settings.share_alpha is None else settings.share_alpha
            try:
                partition = share(labels, partition, settings.share_beta, alpha, seed=seed)
            except ValueError as error:
                raise ValueError(f"--share-beta: {error}") from error
        if settings.rebalance is not None:
            partition = rebalance(labels, partition, settings.rebalance)
        if settings.fedaug is not None:
            partition = fedaug(labels, partition, settings.fedaug).partition
        return Prepared(partition, root)

    return prepare


def unchanged(y: NDArray[Any], partition: Partition, seed: int) -> Prepared:
    """Clients train on what they are dealt."""
    del y, seed
    return Prepared(partition, None)


def official(
    dataset: Dataset,
    partitions: Sequence[Partition],
    seeds: Sequence[int],
    prepare: Prepare = unchanged,
) -> Problem:
    """Every client trains; the data set's own test set is scored, pooled."""
    data, trained = _training(dataset.train_x, dataset.train_y, partitions, seeds, prepare)
    return Problem(
        data=data,
        trained=trained,
        test=eval_set(dataset.test_x, dataset.test_y),
        validation=None,
        runs=[{"seed": seed} for seed in seeds],
        scaled=False,
        scored=f"on {dataset.test_set}",
    )


def by_clients(
    dataset: Dataset,
    partitions: Sequence[Partition],
    seeds: Sequence[int],
    folds: int,
    standardise: Standardise = "global",
    prepare: Prepare = unchanged,
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
    data, trained = _training(x, y, train, [run["seed"] for run in runs], prepare)
    return Problem(
        data=data,
        trained=trained,
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
    prepare: Prepare = unchanged,
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
    data, trained = _training(x, y, train, seeds, prepare)
    return Problem(
        data=data,
        trained=trained,
        test=eval_set(x, y, test),
        validation=None,
        runs=[{"seed": seed} for seed in seeds],
        scaled=scaled,
        scored=f"mean over clients, each on {100 * fraction:g} % of its own samples",
    )


def _training(
    x: NDArray[Any],
    y: NDArray[Any],
    partitions: Sequence[Partition],
    seeds: Sequence[int],
    prepare: Prepare,
) -> tuple[ClientData, list[Partition]]:
    # One partition may serve all seeds.
    done = [prepare(y, p, seed) for p, seed in zip(partitions, seeds, strict=False)]
    trained, roots = [d.partition for d in done], [d.root for d in done if d.root is not None]
    if len(done) == 1:
        return client_data(x, y, trained[0], root=roots[0] if roots else None), trained
    return client_data(x, y, trained, root=roots or None), trained


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
) -> tuple[NDArray[Any], NDArray[Any], bool]:
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
    return copies.reshape(-1, x.shape[1]), np.concatenate([y] * len(copies)), True
