"""The settings of ``python -m fedjax_sim.bench``, by subject."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, ClassVar

from fedjax_sim.cli.adapting import Weights
from fedjax_sim.cli.attacking import Attack
from fedjax_sim.cli.commands import BY_EMD, Source, sampler, sampler_forms
from fedjax_sim.cli.defaults import by_dataset
from fedjax_sim.cli.ending import Ending
from fedjax_sim.cli.flags import flag, naming, number
from fedjax_sim.cli.machine import Machine
from fedjax_sim.cli.parts import Parts
from fedjax_sim.cli.scoring import Scores
from fedjax_sim.cli.settings import Group, setting
from fedjax_sim.cli.timing import Timing
from fedjax_sim.cli.training import Training


@dataclasses.dataclass(frozen=True)
class Experiment(Source):
    """Data, clients and rounds."""

    title: ClassVar[str] = "experiment"

    clients: int | None = setting(
        None,
        "number of clients",
        shown="40; with natural clients or a partition file, all of them; with fewer than 80 "
        "samples, half as many as samples",
        at_least=1,
    )
    clients_per_round: int | None = setting(
        None,
        "clients that train in each round",
        shown="all; with phase_shift's two default phases, an even number",
        at_least=1,
    )
    rounds: int = by_dataset("rounds", "rounds of FedAvg", at_least=1)
    seeds: tuple[int, ...] = setting(
        (0, 1, 2, 3),
        "number of repetitions, with seeds 0 to N-1: partition, initial weights and shuffles; "
        "the ± in tables is the population standard deviation over them",
        shown="4",
        metavar="N",
        convert=lambda text: tuple(range(int(number(int, at_least=1, at_most=10_000)(text)))),
    )
    samples_per_round: int | None = setting(
        None,
        "samples that each client receives per round, in the order of the partition; a sample "
        "is used in that round only, so with --epochs 1 the training loss is the online "
        "loss",
        shown="all samples in every round",
        at_least=1,
    )
    eval_every: int = setting(1, "rounds between evaluations", at_least=1)
    partition: str | None = setting(
        None,
        lambda: (
            f"a sampler: {sampler_forms()}; or a .npz file of python -m fedjax_sim.partition, for "
            "all seeds"
        ),
        shown="natural if the data name their clients; else --emd, or iid without classes",
        metavar="TEXT",
        convert=lambda text: text if text.endswith(".npz") else sampler(text),
        instead=BY_EMD,
    )


@dataclasses.dataclass(frozen=True)
class Preparation(Group):
    """Changes of the clients' training samples, the same for all algorithms."""

    title: ClassVar[str] = "against skew, for all algorithms"

    server_fraction: float | None = setting(
        None,
        "share of the training samples, the same of each class, that moves from the clients to "
        "the server; required by feddf, fedmd, fltrust, hybrid_fl, ozdayi, semifl "
        "and zeno",
        shown="none",
        above=0,
        below=1,
    )
    labelled: float | None = setting(
        None,
        "share of the clients that have labels, drawn once for all seeds; 0: only the server's own "
        "samples have labels",
        shown="all",
        at_least=0,
        below=1,
    )
    fedaug: float | None = setting(
        None,
        "add augmented copies of each client's rare classes until its EMD falls to X; epochs "
        "count the original samples only",
        shown="no augmentation",
        at_least=0,
        below=2,
    )
    rebalance: float | None = setting(
        None,
        "add augmented copies of globally rare classes: a class with n samples, where the mean "
        "is n̄, grows by the factor (n̄/n)^X",
        shown="no augmentation",
        at_least=0,
    )
    mirror: bool = setting(True, "do not mirror augmented copies; use it for digits and letters")
    share_beta: float | None = setting(
        None,
        "share of all training samples that forms a common, balanced set",
        shown="none",
        above=0,
        below=1,
    )
    share_alpha: float | None = setting(
        None,
        "share of the common set that each client receives",
        shown="1",
        above=0,
        at_most=1,
    )

    def __post_init__(self) -> None:
        """Rejects settings without effect."""
        if self.share_alpha is not None and self.share_beta is None:
            raise ValueError("--share-alpha is for --share-beta")
        if not self.mirror and self.fedaug is None and self.rebalance is None:
            raise ValueError("--no-mirror is for --fedaug or --rebalance")


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment; all defaults are filled in except those that need the machine or the data.

    Attributes:
        algo: the method, a key of ``ALGORITHMS`` or an import path.
        compare: the methods to compare it with.
        options: the given keyword arguments of each method.
        trained: the settings of local training of single methods.
    """

    algo: str
    compare: tuple[str, ...]
    options: Mapping[str, Mapping[str, Any]]
    trained: Mapping[str, Mapping[str, Any]]
    experiment: Experiment
    preparation: Preparation
    scores: Scores
    training: Training
    ending: Ending
    timing: Timing
    parts: Parts
    weights: Weights
    attack: Attack
    machine: Machine

    def __post_init__(self) -> None:
        """Rejects settings that contradict each other."""
        trained = [self.training, *map(self.training_of, self.algorithms)]
        for name in ("l2", "weight_decay"):
            if self.weights.lora is not None and any(getattr(one, name) for one in trained):
                raise ValueError(
                    f"{flag(name)} is for models without --lora, whose frozen weights it would pull"
                )
        if self.ending.budget_seconds is not None and self.timing.clock is None:
            raise ValueError(
                "--budget-seconds is for --clock, which determines how long a round takes"
            )
        if self.ending.patience is not None and not self.scores.validates:
            raise ValueError(
                "--patience needs scores that are not the test set's: add --validation 0.1, or "
                "--split clients, which has validation clients"
            )

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Returns all methods that run, in order."""
        return (self.algo, *self.compare)

    def own(self, algorithm: str) -> dict[str, Any]:
        """Returns the settings that are an algorithm's own."""
        return {**self.options[algorithm], **self.trained[algorithm]}

    def training_of(self, algorithm: str) -> Training:
        """Returns the settings of local training that an algorithm has."""
        with naming(algorithm):
            return self.training.with_own(self.trained[algorithm])

    def with_own(self, algorithm: str, own: Mapping[str, Any]) -> Config:
        """Returns the settings with other, maybe traced, values of an algorithm's own ones."""
        options, trained = (
            {
                **given,
                algorithm: {key: own.get(key, value) for key, value in given[algorithm].items()},
            }
            for given in (self.options, self.trained)
        )
        return dataclasses.replace(self, options=options, trained=trained)

    def record(self) -> dict[str, Any]:
        """Returns the settings of all groups by name, without paths on this machine."""
        own = {name: self.own(name) for name in self.algorithms}
        record: dict[str, Any] = {"algo": self.algo, "compare": self.compare, "options": own}
        for name in GROUPS:
            record |= getattr(self, name).record()
        return record


GROUPS: Mapping[str, type[Group]] = {
    name: hint
    for name, hint in typing.get_type_hints(Config).items()
    if isinstance(hint, type) and issubclass(hint, Group)
}
"""The groups of :class:`Config`."""
