"""Training and test samples: a data set, its partitions and a way to split them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import ClientData
from fedjax_sim.cli.config import Config
from fedjax_sim.cli.preparing import Prepare, preparation, unchanged
from fedjax_sim.cli.scoring import Split, Standardise
from fedjax_sim.cli.validating import (
    as_one_client,
    describe_validation,
    held_out,
    named_clients,
    scored_clients,
    take_validation,
)
from fedjax_sim.data import (
    Dataset,
    EvalSet,
    client_data,
    client_folds,
    eval_set,
    own_test,
    pooled,
    shift_rows,
    standardise_global,
    standardise_local,
    take_clients,
)
from fedjax_sim.data.splits import names_of
from fedjax_sim.partition import Partition

HELD_OUT = 0.2
"""The share of each client's samples that --split holdout scores, unless told otherwise."""


class Problem(NamedTuple):
    """Clients and evaluation sets of R runs.

    Attributes:
        data: the training clients.
        trained: their samples, one partition for each run or one for all.
        test: samples of the reported scores.
        runs: seed of each run, and its fold if there are folds.
        scored: the samples of the score, in words.
        names: the names of the clients that are scored, for each run; empty if they have none.
        validation: samples of the scores that choose the round; None without them.
        scaled: whether x is standardised already, so that the model must not scale it.
        own: whether client k of the test set is client k of the data, scored on its own samples.
        held_out: the share of each client's samples that is the test set; None if none is.
    """

    data: ClientData
    trained: list[Partition]
    test: EvalSet
    runs: list[dict[str, int]]
    scored: str
    names: list[Sequence[str]]
    validation: EvalSet | None = None
    scaled: bool = False
    own: bool = False
    held_out: float | None = None


def population(
    dataset: Dataset, split: Split, *, natural: bool = False, test_fraction: float | None = None
) -> Dataset:
    """Returns the data that is dealt to clients: all of it, unless its own test set is scored.

    Natural clients that have test samples are scored on these, unless a share of all their samples
    is asked for; if the test samples have no owners, they are left out. Images keep the scale of
    their official training images: it is a constant of the data set like the range of a pixel, not
    a statistic of some clients.

    Args:
        dataset: as it was loaded.
        split: the scored samples.
        natural: whether its natural clients are the clients.
        test_fraction: of ``holdout``, if it is asked for.
    """
    if split == "official":
        return dataset
    if natural and dataset.train_client is not None:
        if dataset.test_client is None:
            return dataset._replace(test_x=dataset.test_x[:0], test_y=dataset.test_y[:0])
        known = np.isin(dataset.test_client, dataset.train_client).any()
        if split == "holdout" and test_fraction is None and known:
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
    how = standardise, prepare, scores.validation
    if scores.test_clients is not None:
        return by_names(dataset, partitions, seeds, scores.test_clients, *how)
    if scores.split == "holdout":
        if not len(dataset.test_y):
            fraction = scores.test_fraction or HELD_OUT
            return by_holdout(dataset, partitions, seeds, fraction, *how)
        if scores.standardise is not None:
            raise ValueError(
                f"--standardise {standardise} must come with --test-fraction: clients are scored "
                "on the data set's own test samples, which have its own scale"
            )
    return official(dataset, partitions, seeds, prepare, scores.validation)


def official(
    dataset: Dataset,
    partitions: Sequence[Partition],
    seeds: Sequence[int],
    prepare: Prepare = unchanged,
    validation: float | None = None,
) -> Problem:
    """Trains every client and scores the data set's own test set.

    Natural clients are each scored on their own samples of it, others on all of it together. The
    share ``validation`` of each client's training samples is scored in the same way.
    """
    x, y, train, held = dataset.train_x, dataset.train_y, partitions, list[Partition]()
    if validation is not None:
        train, held = take_validation(dataset, _by_seed(partitions, seeds), validation)
    data, trained = _training(x, y, train, seeds, prepare)
    tests = [own_test(dataset, partition) for partition in partitions]
    mine = [test for test in tests if test is not None]
    own = len(mine) == len(tests)
    scored = f"on {dataset.test_set}"
    if own:
        where = scored.replace("on", "in", 1)
        scored = f"mean over {scored_clients(mine)}, each on its own samples {where}"
        if others := len(dataset.test_y) - len(mine[0].index):
            scored += f"; {others:,} test samples are of nobody who trains"
    parts = mine[0] if len(mine) == 1 else mine
    return Problem(
        data=data,
        trained=trained,
        test=eval_set(dataset.test_x, dataset.test_y, parts if own else None),
        validation=eval_set(x, y, held if own else as_one_client(held)) if held else None,
        runs=[{"seed": seed} for seed in seeds],
        scored=scored + describe_validation(train, held),
        names=[names_of(dataset, partition) for _, partition in _by_seed(partitions, seeds)],
        own=own,
    )


def by_clients(
    dataset: Dataset,
    partitions: Sequence[Partition],
    seeds: Sequence[int],
    folds: int,
    standardise: Standardise = "global",
    prepare: Prepare = unchanged,
) -> Problem:
    """Cross-validates by client, see :func:`fedjax_sim.data.client_folds`; R is seeds × folds.

    Raises:
        ValueError: if there are too few clients for the folds.
    """
    runs, whole, parts, names = [], [], [], []
    for seed, partition in _by_seed(partitions, seeds):
        for f, fold in enumerate(client_folds(len(partition.sizes), folds, seed=seed)):
            runs.append({"seed": seed, "fold": f})
            whole.append(partition)
            parts.append([take_clients(partition, clients) for clients in fold])
            names.append(names_of(dataset, parts[-1][-1]))
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
        names=names,
    )


def by_names(
    dataset: Dataset,
    partitions: Sequence[Partition],
    seeds: Sequence[int],
    clients: Sequence[str],
    standardise: Standardise = "global",
    prepare: Prepare = unchanged,
    validation: float | None = None,
) -> Problem:
    """Scores the clients of these names on all their samples, and trains the others.

    The share ``validation`` of the others' samples validates.
    """
    whole = [partition for _, partition in _by_seed(partitions, seeds)]
    kept, held = take_validation(dataset, _by_seed(whole, seeds), validation)
    names = [names_of(dataset, partition) for partition in whole]
    tested = [named_clients(known, clients) for known in names]
    others = [np.delete(np.arange(len(p.sizes)), k) for p, k in zip(whole, tested, strict=True)]
    test, train = [*map(take_clients, whole, tested)], [*map(take_clients, kept, others)]
    held = [*map(take_clients, held, others)]
    test_names, several = [names_of(dataset, one) for one in test], len(tested[0]) > 1
    x, y, scaled = _inputs(dataset, standardise, train=train, whole=whole, fit=kept)
    if scaled:
        train, test, held = (shift_rows(role, len(dataset.train_y)) for role in (train, test, held))
    data, trained = _training(x, y, train, seeds, prepare)
    return Problem(
        data=data,
        trained=trained,
        test=eval_set(x, y, test),
        validation=eval_set(x, y, held if several else as_one_client(held)) if held else None,
        runs=[{"seed": seed} for seed in seeds],
        scaled=scaled,
        scored=f"{'mean over clients' if several else 'on client'} {', '.join(clients)}; "
        f"{data.clients} train{describe_validation(train, held)}",
        names=test_names if several else names,
    )


def by_holdout(
    dataset: Dataset,
    partitions: Sequence[Partition],
    seeds: Sequence[int],
    fraction: float,
    standardise: Standardise = "global",
    prepare: Prepare = unchanged,
    validation: float | None = None,
) -> Problem:
    """Trains every client and keeps a share of its samples as its own test set.

    The share ``validation`` of its other samples validates.
    """
    whole = [partition for _, partition in _by_seed(partitions, seeds)]
    train, test = held_out(dataset, _by_seed(whole, seeds), fraction)
    train, held = take_validation(dataset, _by_seed(train, seeds), validation)
    x, y, scaled = _inputs(dataset, standardise, train=train, whole=whole, fit=train)
    if scaled:
        train, test, held = (shift_rows(role, len(dataset.train_y)) for role in (train, test, held))
    data, trained = _training(x, y, train, seeds, prepare)
    return Problem(
        data=data,
        trained=trained,
        test=eval_set(x, y, test),
        validation=eval_set(x, y, held) if held else None,
        runs=[{"seed": seed} for seed in seeds],
        scaled=scaled,
        scored=f"mean over {scored_clients(test)}, each on {100 * fraction:g} % of its own samples"
        + describe_validation(train, held),
        names=[names_of(dataset, partition) for partition in whole],
        own=True,
        held_out=fraction,
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
    """Returns the samples, or of a table R standardised copies, one behind the other.

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
