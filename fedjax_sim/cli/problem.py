"""Training and test samples: a data set, its partitions and a way to split them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import ClientData
from fedjax_sim.cli.config import Config
from fedjax_sim.cli.preparing import Prepare, inputs, is_table, preparation
from fedjax_sim.cli.scoring import Split, Standardise
from fedjax_sim.cli.validating import (
    as_one_client,
    describe_adaptation,
    describe_validation,
    held_out,
    named_clients,
    scored_clients,
    take_adaptation,
    take_validation,
    with_clients,
)
from fedjax_sim.data import (
    Dataset,
    EvalSet,
    client_data,
    client_folds,
    eval_set,
    own_test,
    pooled,
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
        scored: description of the scored samples.
        names: the names of the clients that are scored, for each run; empty if they have none.
        validation: samples whose scores select the round; None without them.
        scaled: whether x is standardised already, and the model must not scale it.
        own: whether client k of the test set is client k of the data, scored on its own samples.
        held_out: the share of each client's samples in the test set; None without one.
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

    @property
    def scores_own(self) -> bool:
        """Whether personal models are scored, of clients that train or of others that adapt."""
        return self.own or self.test.adapt is not None

    @property
    def validates_own(self) -> bool:
        """Whether personal models have validation scores."""
        held = self.validation
        return held is not None and (self.own or held.adapt is not None)


def population(
    dataset: Dataset, split: Split, *, natural: bool = False, test_fraction: float | None = None
) -> Dataset:
    """Returns the data to partition: all of it, unless its own test set is scored.

    Natural clients that have test samples are scored on these, unless a share of all their samples
    is requested; test samples without owners are then omitted. Images keep the scale of their
    official training images: it is a constant of the data set like the range of a pixel, not a
    statistic of some clients.
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
    if is_table(dataset):
        return everyone
    return everyone._replace(mean=dataset.mean, std=dataset.std)


def make_problem(config: Config, dataset: Dataset, partitions: Sequence[Partition]) -> Problem:
    """Splits a :func:`population` by the settings; partitions are one, or one for each seed."""
    prepare = preparation(config.preparation, dataset)
    seeds, scores = config.experiment.seeds, config.scores
    if scores.standardise is not None and not is_table(dataset):
        raise ValueError(
            f"standardise={scores.standardise!r} is for tables of numbers, not {dataset.name}"
        )
    standardise = scores.standardise or "global"
    if scores.folds is not None:
        folds, adapt = scores.folds, scores.adapt
        return by_clients(dataset, partitions, seeds, folds, standardise, prepare, adapt)
    how = standardise, prepare, scores.validation
    if scores.test_clients is not None:
        return by_names(dataset, partitions, seeds, scores.test_clients, *how, scores.adapt)
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
    prepare: Prepare | None = None,
    validation: float | None = None,
) -> Problem:
    """Trains every client and scores the data set's own test set.

    Natural clients are each scored on their own test samples, others on the whole test set. The
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
        scored=scored + describe_validation(validation),
        names=[names_of(dataset, partition) for _, partition in _by_seed(partitions, seeds)],
        own=own,
    )


def by_clients(
    dataset: Dataset,
    partitions: Sequence[Partition],
    seeds: Sequence[int],
    folds: int,
    standardise: Standardise = "global",
    prepare: Prepare | None = None,
    adapt: float | None = None,
) -> Problem:
    """Cross-validates by client, see :func:`fedjax_sim.data.client_folds`; R is seeds × folds.

    Validation and test clients adapt on the share ``adapt`` of their samples.
    """
    runs, whole, fit, parts, names = [], [], [], [], []
    by_seed = _by_seed(partitions, seeds)
    mine, scored = take_adaptation(dataset, by_seed, adapt)
    for place, (seed, partition) in enumerate(by_seed):
        own = mine[place] if mine else partition
        for f, fold in enumerate(client_folds(len(partition.sizes), folds, seed=seed)):
            runs.append({"seed": seed, "fold": f})
            whole.append(partition)
            fit.append(with_clients(own, partition, fold.train) if mine else partition)
            pools = partition, scored[place], scored[place], own, own
            clients = *fold, fold.validation, fold.test
            parts.append([*map(take_clients, pools, clients)])
            names.append(names_of(dataset, take_clients(partition, fold.test)))
    roles = [list(role) for role in zip(*parts, strict=True)]
    sizes = [len(role[0].sizes) for role in roles[:3]]
    x, y, roles = inputs(dataset, standardise, roles, whole=whole, fit=fit)
    train, validation, test, *adapting = roles
    to_validate, to_test = adapting if mine else (None, None)
    data, trained = _training(x, y, train, [run["seed"] for run in runs], prepare)
    return Problem(
        data=data,
        trained=trained,
        test=eval_set(x, y, test, adapt=to_test),
        validation=eval_set(x, y, validation, adapt=to_validate),
        runs=runs,
        scaled=is_table(dataset),
        scored="mean over test clients; {} train, {} validate, {} test in each of {} folds".format(
            *sizes, folds
        )
        + describe_adaptation(adapt),
        names=names,
    )


def by_names(
    dataset: Dataset,
    partitions: Sequence[Partition],
    seeds: Sequence[int],
    clients: Sequence[str],
    standardise: Standardise = "global",
    prepare: Prepare | None = None,
    validation: float | None = None,
    adapt: float | None = None,
) -> Problem:
    """Scores the clients of these names on all their samples, and trains the others.

    The share ``validation`` of the others' samples validates. The clients of these names adapt on
    the share ``adapt`` of their samples and are scored on the rest; validation samples are scored
    after adaptation on their client's training samples, as if it had not trained.
    """
    whole = [partition for _, partition in _by_seed(partitions, seeds)]
    kept, held = take_validation(dataset, _by_seed(whole, seeds), validation)
    mine, scored = take_adaptation(dataset, _by_seed(whole, seeds), adapt)
    names = [names_of(dataset, partition) for partition in whole]
    tested = [named_clients(known, clients) for known in names]
    others = [np.delete(np.arange(len(p.sizes)), k) for p, k in zip(whole, tested, strict=True)]
    test_names = [names_of(dataset, p) for p in map(take_clients, whole, tested)]
    kept = [*map(with_clients, kept, mine, tested)] or kept
    test, train = [*map(take_clients, scored, tested)], [*map(take_clients, kept, others)]
    held, mine = [*map(take_clients, held, others)], [*map(take_clients, mine, tested)]
    several = len(tested[0]) > 1
    roles = train, test, held, mine
    x, y, (train, test, held, mine) = inputs(dataset, standardise, roles, whole=whole, fit=kept)
    validates = None
    if held:
        to_validate = train if mine and several else None
        validated = held if several else as_one_client(held)
        validates = eval_set(x, y, validated, adapt=to_validate)
    data, trained = _training(x, y, train, seeds, prepare)
    return Problem(
        data=data,
        trained=trained,
        test=eval_set(x, y, test, adapt=mine or None),
        validation=validates,
        runs=[{"seed": seed} for seed in seeds],
        scaled=is_table(dataset),
        scored=f"{'mean over clients' if several else 'on client'} {', '.join(clients)}; "
        f"{data.clients} train{describe_validation(validation)}{describe_adaptation(adapt)}",
        names=test_names if several else names,
    )


def by_holdout(
    dataset: Dataset,
    partitions: Sequence[Partition],
    seeds: Sequence[int],
    fraction: float,
    standardise: Standardise = "global",
    prepare: Prepare | None = None,
    validation: float | None = None,
) -> Problem:
    """Trains all clients and keeps a share of each client's samples as its own test set.

    The share ``validation`` of its other samples validates.
    """
    whole = [partition for _, partition in _by_seed(partitions, seeds)]
    train, test = held_out(dataset, _by_seed(whole, seeds), fraction)
    train, held = take_validation(dataset, _by_seed(train, seeds), validation)
    roles = train, test, held
    x, y, (train, test, held) = inputs(dataset, standardise, roles, whole=whole, fit=train)
    data, trained = _training(x, y, train, seeds, prepare)
    return Problem(
        data=data,
        trained=trained,
        test=eval_set(x, y, test),
        validation=eval_set(x, y, held) if held else None,
        runs=[{"seed": seed} for seed in seeds],
        scaled=is_table(dataset),
        scored=f"mean over {scored_clients(test)}, each on {100 * fraction:g} % of its own samples"
        + describe_validation(validation),
        names=[names_of(dataset, partition) for partition in whole],
        own=True,
        held_out=fraction,
    )


def _training(
    x: NDArray[Any],
    y: NDArray[Any],
    partitions: Sequence[Partition],
    seeds: Sequence[int],
    prepare: Prepare | None,
) -> tuple[ClientData, list[Partition]]:
    trained, roots = [*partitions], []
    if prepare is not None:  # one partition may serve all seeds
        done = [prepare(y, p, seed) for p, seed in zip(partitions, seeds, strict=False)]
        trained, roots = [p for p, _ in done], [root for _, root in done if root is not None]
    if len(trained) == 1:
        return client_data(x, y, trained[0], root=roots[0] if roots else None), trained
    return client_data(x, y, trained, root=roots or None), trained


def _by_seed(partitions: Sequence[Partition], seeds: Sequence[int]) -> list[tuple[int, Partition]]:
    same = len(partitions) == 1
    return [(seed, partitions[0 if same else i]) for i, seed in enumerate(seeds)]
