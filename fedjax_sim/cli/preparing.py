"""Changes of the samples: shared, rebalanced, augmented, standardised, or the server's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import ClientData, Task, Transform
from fedjax_sim.cli.config import Preparation
from fedjax_sim.cli.flags import flag, naming
from fedjax_sim.cli.scoring import Standardise
from fedjax_sim.client.augment import fedaug_augmentations
from fedjax_sim.data import (
    Dataset,
    fedaug,
    hide_labels,
    rebalance,
    share,
    shift_rows,
    standardise_global,
    standardise_local,
    take_root,
)
from fedjax_sim.data.targets import strata
from fedjax_sim.partition import Partition
from fedjax_sim.tasks import classification

Prepare = Callable[[NDArray[Any], Partition, int], tuple[Partition, NDArray[np.int64] | None]]
"""``(y, partition, seed)``: returns the clients' training samples, and the server's own if any."""


def preparation(settings: Preparation, dataset: Dataset) -> Prepare:
    """Returns a function that takes the server's samples, and shares, rebalances and augments."""
    for name in ("share_beta", "rebalance", "fedaug"):
        if dataset.task.classes is None and getattr(settings, name) is not None:
            raise ValueError(f"{flag(name)} is for classes, {dataset.name} is {dataset.task!r}")

    def prepare(y: NDArray[Any], partition: Partition, seed: int) -> Any:
        labels, root = strata(y, dataset.task), None
        if settings.server_fraction is not None:
            size = max(1, round(settings.server_fraction * len(partition.index)))
            with naming("--server-fraction"):
                partition, root = take_root(labels, partition, size, seed=seed)
        if settings.share_beta is not None:
            with naming("--share-beta"):
                beta, alpha = settings.share_beta, settings.share_alpha
                partition = share(labels, partition, beta, alpha or 1.0, seed=seed)
        if settings.rebalance is not None:
            partition = rebalance(labels, partition, settings.rebalance)
        if settings.fedaug is not None:
            partition = fedaug(labels, partition, settings.fedaug).partition
        return partition, root

    return prepare


def without_labels(
    settings: Preparation, task: Task, data: ClientData
) -> tuple[Task, ClientData, str]:
    """Returns the task, the clients, some of them without labels if so set, and a description."""
    if settings.labelled is None:
        return task, data, ""
    if not isinstance(task, classification):
        raise ValueError(f"--labelled is for classes, the task is {task!r}")
    clients = data.clients
    order = np.random.default_rng(1).permutation(clients)  # 0 draws who attacks
    known = order < round(settings.labelled * clients)
    words = f"; {known.sum()} of {clients} have labels"
    return task.replace(unlabelled=True), hide_labels(data, ~known, task.classes), words


def augmentations(preparation: Preparation, dataset: Dataset) -> tuple[Transform, ...]:
    """Returns the transforms of copies of FedAug and rebalancing."""
    asked = [name for name in ("fedaug", "rebalance") if getattr(preparation, name) is not None]
    if not asked:
        return ()
    x = dataset.train_x
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[-1] not in (1, 3):
        raise ValueError(
            f"{flag(asked[0])} is for images, uint8 [n, H, W, 1 or 3]; {dataset.name} has "
            f"{x.dtype} {list(x.shape)}"
        )
    white = float(x.max())
    return (fedaug_augmentations(x.shape[1:], white=white, mirror=preparation.mirror),)


def is_table(dataset: Dataset) -> bool:
    """Returns whether the samples are rows of unscaled numbers."""
    return dataset.train_x.ndim == 2 and dataset.mean is not None


def inputs(
    dataset: Dataset,
    standardise: Standardise,
    roles: Sequence[list[Partition]],
    *,
    whole: Sequence[Partition],
    fit: Sequence[Partition],
) -> tuple[NDArray[Any], NDArray[Any], list[list[Partition]]]:
    """Returns the samples; for a table, R standardised copies of them, concatenated.

    A copy for each run costs R · n · F · 4 bytes: for Covertype (495,141 x 54) 107 MB a run. The
    partitions of each role (the first one trains) have the rows of their run's copy.
    """
    x, y, columns = dataset.train_x, dataset.train_y, dataset.numeric
    if not is_table(dataset):
        if standardise == "local":
            raise ValueError(f"standardise='local' is for tables of numbers, not {dataset.name}")
        return x, y, [*roles]
    copies = np.empty((len(roles[0]), *x.shape), np.float32)
    for copy, clients, trained, fitted in zip(copies, whole, roles[0], fit, strict=True):
        if standardise == "global":
            copy[:] = standardise_global(x, trained, numeric=columns)
        else:
            copy[:] = standardise_local(x, clients, fit=fitted, numeric=columns)
    shifted = [shift_rows(role, len(y)) for role in roles]
    return copies.reshape(-1, x.shape[1]), np.concatenate([y] * len(copies)), shifted
