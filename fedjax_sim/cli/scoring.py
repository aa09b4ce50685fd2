"""The settings of the scored samples and of the score."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

from fedjax_sim.cli.defaults import by_dataset
from fedjax_sim.cli.flags import flag
from fedjax_sim.cli.settings import Group, setting

Split = Literal["official", "clients", "holdout"]
Standardise = Literal["global", "local"]


@dataclasses.dataclass(frozen=True)
class Scores(Group):
    """The scored samples and the score."""

    title: ClassVar[str] = "scores"

    split: Split = setting(
        "official",
        "what is scored. official: the data set's own test set; natural clients are scored on "
        "their own test samples, with their own models too. clients: folds of clients; each "
        "fold in turn is scored, another one selects the best round, and the others train. "
        "holdout: each client is scored on its own test samples, or on a share of all its "
        "samples, with its own model too",
        shown="official; holdout if a method has personal models and the partition is not a file",
        metavar="NAME",
    )
    folds: int | None = setting(
        None,
        "number of folds of --split clients; all folds run at once, with every seed",
        shown="5",
        at_least=3,
    )
    test_clients: tuple[str, ...] | None = setting(
        None,
        "names of natural clients, joined by commas, that --split clients scores and never trains "
        "on, instead of folds: leave one domain out",
        shown="folds",
        metavar="NAME,NAME",
        convert=lambda text: tuple(text.split(",")),
    )
    adapt: float | None = setting(
        None,
        "share of its samples on which each test and validation client of --split clients adapts "
        "the server's model, by the personal training of the method; that model and the server's "
        "are scored on its other samples",
        shown="none",
        above=0,
        below=1,
    )
    test_fraction: float | None = setting(
        None,
        "share of each client's samples that --split holdout scores",
        shown="the test samples of natural clients if the data have them, else 0.2",
        above=0,
        below=1,
    )
    validation: float | None = setting(
        None,
        "share of each client's training samples that is held out for validation; settings and "
        "rounds are selected by its scores, never on the test set; the folds of --split clients "
        "have validation clients instead",
        shown="none",
        above=0,
        below=1,
    )
    standardise: Standardise | None = setting(
        None,
        "standardise the numeric columns of tables: global, by the statistics of all training "
        "clients; or local, each client by its own",
        shown="global",
        metavar="NAME",
    )
    score: str | None = by_dataset(
        "score",
        "score in tables and pictures, and for the best round. Classification: accuracy, f1 "
        "(weighted by class) or auc; regression: mse, mae or r2; multi-label: f1_micro, f1_macro, "
        "label_accuracy or subset_accuracy; tokens: perplexity or accuracy. By client it is the "
        "unweighted mean over test clients",
        shown="the first one; f1 for covertype, auc for eicu",
        metavar="NAME",
    )
    delta: float | None = setting(
        None,
        "δ of the (ε, δ) that dp_fedavg, dp_ftrl and dp_sgd spend, below 1/N; of dp_sgd, which "
        "protects single samples, below 1/n_k",
        shown="N^-1.1; n_k^-1.1 of the largest client",
        above=0,
        below=1,
    )

    def __post_init__(self) -> None:
        """Rejects flags of another split."""
        if self.folds is not None and self.test_clients is not None:
            raise ValueError("--test-clients replaces --folds: leave one of them out")
        if self.split == "clients" and self.test_clients is None:
            self._default("folds", 5)
        owners = dict.fromkeys(("folds", "test_clients", "adapt"), "clients")
        for name, of in (owners | {"test_fraction": "holdout"}).items():
            if self.split != of and getattr(self, name) is not None:
                raise ValueError(f"{flag(name)} is for --split {of}, not {self.split}")
        if self.folds is not None and self.validation is not None:
            raise ValueError(
                "--validation is for --split official and holdout, or --test-clients: the folds of "
                "--split clients have validation clients"
            )
        if self.split == "official" and self.standardise is not None:
            raise ValueError(
                f"--standardise {self.standardise} is for --split clients or holdout: with "
                "its own test set a data set keeps its scale"
            )

    @property
    def validates(self) -> bool:
        """Returns whether settings can be selected without the test set."""
        return self.folds is not None or self.validation is not None
