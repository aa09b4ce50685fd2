"""The origin of a result: the algorithm, the seeds and the clients of its runs."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import ClientData, Task
from fedjax_sim.base.brief import brief
from fedjax_sim.data import EvalSet
from fedjax_sim.data.targets import strata
from fedjax_sim.partition import Partition, label_table
from fedjax_sim.privacy import ClientPrivacy, UnknownEpsilonError
from fedjax_sim.round import Algorithm
from fedjax_sim.round.private import accountant, client_privacy
from fedjax_sim.run.identity import digest

Privacy = Callable[..., float] | str | None
"""The function of ``rounds`` and ``delta`` that computes ε, why ε is unknown, or None."""


def privacy_of(algorithm: Algorithm, data: ClientData) -> Privacy:
    """Returns how ε of a private method is computed, or why it is unknown; None for others."""
    if all(part.epsilon is None for part in algorithm.parts.preaggregation):
        return None
    try:
        return accountant(algorithm.parts, data)
    except UnknownEpsilonError as error:
        return str(error)


def client_privacy_of(algorithm: Algorithm, data: ClientData) -> ClientPrivacy | str | None:
    """Returns the privacy of clients that add noise, or why it is unknown; None for others."""
    try:
        return client_privacy(algorithm.parts, data)
    except UnknownEpsilonError as error:
        return str(error)


def _facts(algorithm: Algorithm, data: ClientData) -> dict[str, Any]:
    """Returns the fields that differ between algorithms, without the model and samples."""
    return {
        "algorithm": repr(algorithm),
        "privacy": privacy_of(algorithm, data),
        "client_privacy": client_privacy_of(algorithm, data),
    }


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Provenance:
    """The origin of a result.

    Attributes:
        algorithm: text of the algorithm.
        rounds: rounds that were requested; a stopping rule may end the run earlier.
        round_factor: rounds for each round of FedAvg.
        clients_per_round: S, the number of models in flight.
        own_leaves: whether some leaves of the model stay with the clients.
        seeds: seeds of the R runs.
        y: targets of the pooled training samples.
        index: ``int32[nnz]``, training samples grouped by client.
        start: ``int32[N + 1]`` or ``[R, N + 1]``, where each client begins in ``index``.
        samples: fingerprint of the targets of the training and test samples.
        devices: names of the devices.
        privacy: see :func:`privacy_of`.
        client_privacy: see :func:`client_privacy_of`.
    """

    algorithm: str
    rounds: int
    round_factor: float
    clients_per_round: int
    own_leaves: bool
    seeds: tuple[int, ...]
    y: NDArray[Any]
    index: NDArray[np.int32]
    start: NDArray[np.int32]
    samples: str
    devices: tuple[str, ...]
    privacy: Privacy
    client_privacy: ClientPrivacy | str | None

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        data: ClientData,
        test: EvalSet,
        seeds: list[int],
        rounds: int,
        devices: Sequence[jax.Device],
    ) -> Provenance:
        """Returns the origin of a run of an algorithm."""
        y = np.asarray(data.y)
        return cls(
            **_facts(algorithm, data),
            rounds=rounds,
            round_factor=algorithm.round_factor,
            clients_per_round=algorithm.slots,
            own_leaves=algorithm.parts.exchange.own is not None,
            seeds=tuple(seeds),
            y=y,
            index=np.asarray(data.index),
            start=np.asarray(data.start),
            samples=digest((y, np.asarray(test.y))),
            devices=tuple(map(str, devices)),
        )

    def with_algorithm(self, algorithm: Algorithm, data: ClientData) -> Provenance:
        """Returns the origin of a run that differs in settings of its algorithm."""
        return dataclasses.replace(self, **_facts(algorithm, data))

    def of_runs(self, runs: slice) -> Provenance:
        """Returns the origin of some of the runs."""
        start = self.start if self.start.ndim == 1 else self.start[runs]
        return dataclasses.replace(self, seeds=self.seeds[runs], start=start)

    @property
    def runs(self) -> list[dict[str, int]]:
        """The seed of each run; and its fold, if several runs share a seed."""
        repeated, fold = max(Counter(self.seeds).values()) > 1, Counter[int]()
        runs = []
        for seed in self.seeds:
            runs.append({"seed": seed, "fold": fold[seed]} if repeated else {"seed": seed})
            fold[seed] += 1
        return runs

    @property
    def partitions(self) -> list[Partition]:
        """The samples of each client, in each of the R runs."""
        starts = np.broadcast_to(self.start, (len(self.seeds), self.start.shape[-1]))
        return [
            Partition(self.index[s[0] : s[-1]], s - s[0], repeats=True)  # it may have copies
            for s in starts
        ]

    def tables(self, task: Task) -> list[NDArray[np.int64]]:
        """Returns the samples per client and class in each run, ``int64[N, M]``."""
        labels, classes = strata(self.y, task), task.classes or 1
        return [label_table(labels, partition, classes) for partition in self.partitions]

    def __repr__(self) -> str:
        return brief(self, {"algorithm": self.algorithm, "seeds": self.seeds})
