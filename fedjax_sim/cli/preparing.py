"""Changes of the clients' training samples: shared, rebalanced, augmented, or the server's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import ClientData, Task, Transform
from fedjax_sim.cli.config import Preparation
from fedjax_sim.cli.flags import flag, naming
from fedjax_sim.client.augment import fedaug_augmentations
from fedjax_sim.data import Dataset, fedaug, hide_labels, rebalance, share, take_root
from fedjax_sim.data.targets import strata
from fedjax_sim.partition import Partition
from fedjax_sim.tasks import classification


class Prepared(NamedTuple):
    """Training samples: the clients', and the rows of the server's own, if it has any."""

    partition: Partition
    root: NDArray[np.int64] | None


Prepare = Callable[[NDArray[Any], Partition, int], Prepared]
"""``(y, partition, seed)``: returns the training samples of clients and server."""


def preparation(settings: Preparation, dataset: Dataset) -> Prepare:
    """Returns what takes the server's samples, shares, rebalances and augments as the settings say.

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
        return Prepared(partition, root)

    return prepare


def without_labels(
    settings: Preparation, task: Task, data: ClientData
) -> tuple[Task, ClientData, str]:
    """Returns the task and the clients, few of whom have labels if so set, and this in words.

    Raises:
        ValueError: if the task has no classes; names the flag.
    """
    if settings.labelled is None:
        return task, data, ""
    if not isinstance(task, classification):
        raise ValueError(f"--labelled is for classes, the task is {task!r}")
    clients = data.clients
    order = np.random.default_rng(1).permutation(clients)  # 0 draws who attacks
    known = order < round(settings.labelled * clients)
    words = f"; {known.sum()} of {clients} have labels"
    return task.replace(unlabelled=True), hide_labels(data, ~known, task.classes), words


def unchanged(y: NDArray[Any], partition: Partition, seed: int) -> Prepared:
    """Returns the samples as they are dealt."""
    del y, seed
    return Prepared(partition, None)


def augmentations(preparation: Preparation, dataset: Dataset) -> tuple[Transform, ...]:
    """Returns what alters the copies of FedAug and rebalancing.

    Raises:
        ValueError: if the data are no images; names the flag.
    """
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
