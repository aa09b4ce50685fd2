"""The partition of a run: the requested sampler, or one that fits the data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from fedjax_sim.base.registry import error_text
from fedjax_sim.cli.commands import plain
from fedjax_sim.cli.config import Experiment
from fedjax_sim.cli.flags import flagged, flagging, naming
from fedjax_sim.cli.scoring import Split
from fedjax_sim.data import Dataset
from fedjax_sim.partition import (
    Partition,
    load_partition,
    parse_sampler,
    reachable_emd,
    validate_partition,
)

CLIENTS = 40
"""N, unless it is given; of fewer than 80 samples one client for every two."""

EMD = 1.4
SHARE = 7 / 9
"""Of the largest EMD: what 1.4 is of ten balanced classes."""


class Deal(NamedTuple):
    """A sampler and its number of clients.

    Attributes:
        text: the text form of a sampler, or the name of a .npz file.
        clients: N; None: as many as the natural clients, or as in the file.
        why: the reason for the default; "" if it was requested.
    """

    text: str
    clients: int | None
    why: str = ""

    def origin(self, flag: str) -> str:
        """Returns the start of messages about the sampler, with the flag that selects it."""
        return f"{'the default ' if self.why else ''}{flag} {self.text}"


def takes_owners(text: str | None, dataset: Dataset) -> bool:
    """Returns whether the natural clients of the data become clients."""
    if text is None:
        return dataset.train_client is not None
    return text.partition("(")[0].strip() == "natural"


def choose(
    text: str | None, clients: int | None, dataset: Dataset, seeds: Sequence[int], *, flag: str
) -> Deal:
    """Chooses the sampler; ``flag`` is the flag that requests another one.

    Natural clients are kept if the data have them. Otherwise the EMD is 1.4. If the labels do not
    reach it, the EMD is 7/9 of the largest reachable one, rounded down to a tenth: the ratio of 1.4
    with ten balanced classes. If the labels allow no skew, the sampler is ``iid``.
    """
    some = max(1, min(CLIENTS, len(dataset.train_y) // 2))
    several = some if clients is None else clients
    if text is not None:
        counted = takes_owners(text, dataset) or text.endswith(".npz")
        return Deal(text, clients if counted else several)
    if dataset.train_client is not None:
        found = np.unique(dataset.train_client).size
        if clients not in (None, found):
            raise ValueError(
                f"--clients must be {found}, the number of natural clients, got {clients}: leave "
                f"it out, or partition the samples by {flag}, such as {flag} iid"
            )
        return Deal("natural", None, "the default for data that name their clients")
    if dataset.task.classes is None:
        return Deal("iid", several, "the default without classes")
    with flagging("clients"):
        ranges = [reachable_emd(dataset.train_y, several, seed=seed) for seed in seeds]
    least, most = max(low for low, _ in ranges), min(high for _, high in ranges)
    emd = EMD if most >= EMD - 1e-9 else math.floor(10 * SHARE * most + 1e-9) / 10
    if not 0 < emd >= least:
        return Deal("iid", several, "the default where labels allow no skew")
    why = "the default" if emd == EMD else f"the default, as labels reach EMD {most:.2f} at most"
    return Deal(f"emd({emd:g})", several, why)


def make_partitions(
    experiment: Experiment, deal: Deal, split: Split, dataset: Dataset
) -> list[Partition]:
    """Partitions the training samples: one partition per seed, or the one in a file."""
    if deal.text.endswith(".npz"):
        with naming("--partition"):
            name = f"{dataset.name} in --split {split}"
            try:
                partition = load_partition(deal.text, dataset.train_y, name)
            except OSError as error:
                raise ValueError(plain(error)) from error
            validate_partition(partition, len(dataset.train_y))
            if deal.clients not in (None, found := len(partition.sizes)):
                raise ValueError(
                    f"the file has {found} clients, --clients is {deal.clients}: leave it out"
                )
            return [partition]
    origin = deal.origin("--partition")
    return deal_seeds(deal.text, dataset, deal.clients, experiment.seeds, origin=origin)


def deal_seeds(
    text: str, dataset: Dataset, clients: int | None, seeds: Iterable[int], *, origin: str
) -> list[Partition]:
    """Draws a partition of the training samples for each seed.

    >>> from fedjax_sim.data import load_dataset
    >>> deal_seeds("q(0.5)", load_dataset("digits"), 15, [0], origin="--partition q(0.5)")
    Traceback (most recent call last):
    ValueError: --clients must be a multiple of 10, the number of classes, got 15: use 10 or 20
    """
    _, sample = parse_sampler(text)
    partitions = []
    for seed in seeds:
        try:
            partition = sample(
                dataset.train_y,
                clients,
                seed,
                groups=dataset.train_client,
                features=dataset.features,
            )
            validate_partition(partition, len(dataset.train_y))
        except Exception as error:  # a user's sampler may raise anything
            message = str(flagged(ValueError(error_text(error)), ["clients", "emd"]))
            where = "" if message.startswith("--") else f"{origin}: "
            raise ValueError(where + message) from error
        partitions.append(partition)
    return partitions


def describe(deal: Deal, dataset: Dataset, partition: Partition) -> str:
    """Describes the training clients, for the summary of the data."""
    clients, natural = len(partition.sizes), takes_owners(deal.text, dataset)
    line = f"{clients} {'natural ones' if natural else f'by {deal.text}'}"
    line += f", {deal.why}" if deal.why else ""
    if natural or dataset.train_client is None or partition.name.startswith("natural"):
        return line
    return f"{line}; the {np.unique(dataset.train_client).size} that the data name are not used"
