"""The learning problem of a run; scores of different problems are not compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Problem(NamedTuple):
    """A learning problem; scores of different problems are never compared.

    The attributes are settings of ``config.json``, and the key of the score.
    """

    dataset: str
    partition: str
    clients: int
    split: str
    folds: int | None
    test_clients: tuple[str, ...] | None
    adapt: float | None
    test_fraction: float | None
    validation: float | None
    standardise: str | None
    score: str

    def title(self, *, scored: bool) -> str:
        """Writes the data set, the partition and the split; with the score if ``scored``."""
        text = f"{self.dataset}, {self.partition}, {self.clients:,} clients"
        if self.folds is not None:
            text += f", {self.folds} folds of clients"
        elif self.test_clients is not None:
            text += f", tested on {', '.join(self.test_clients)}"
        elif self.test_fraction is not None:
            text += f", {100 * self.test_fraction:g} % held out by each"
        if self.adapt is not None:
            text += f", {100 * self.adapt:g} % to adapt"
        if self.validation is not None:
            text += f", {100 * self.validation:g} % to validate"
        if self.standardise == "local":
            text += ", standardised by each client"
        return f"{text}; {score_text(self.score)}" if scored else text


def score_text(key: str) -> str:
    """Describes a score, given its key.

    >>> score_text("accuracy"), score_text("client_auc")
    ('accuracy on the test set', 'mean auc over test clients')
    """
    plain = key.removeprefix("client_")
    return f"{plain} on the test set" if plain == key else f"mean {plain} over test clients"


def problem_of(settings: Mapping[str, Any], score: str) -> Problem:
    """Returns the problem of a run, by its ``config.json`` and the key of its score."""
    asked, tested = settings["partition"], settings["test_clients"]
    own = {
        "partition": settings["partitions"][0] or asked if asked.endswith(".npz") else asked,
        "score": score,
        "test_clients": None if tested is None else tuple(tested),
    }
    return Problem(**{name: settings[name] for name in Problem._fields if name not in own}, **own)
