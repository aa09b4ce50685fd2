"""What becomes of the clients' training samples: shared, rebalanced, augmented, or the server's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.cli.config import Preparation
from fedjax_sim.cli.flags import flag
from fedjax_sim.data import Dataset, fedaug, rebalance, share, take_root
from fedjax_sim.data.targets import strata
from fedjax_sim.partition import Partition


class Prepared(NamedTuple):
    """Training samples: the clients', and the rows of the server's own, if it has any."""

    partition: Partition
    root: NDArray[np.int64] | None


Prepare = Callable[[NDArray[Any], Partition, int], Prepared]
"""``(y, partition, seed)``: what becomes of the clients' training samples."""


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
