"""Scores and totals after some rounds."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Sums
from fedjax_sim.base.brief import Text, brief, over_runs
from fedjax_sim.run.metrics import SetScores


class Evaluation(NamedTuple):
    """Scores and totals after some rounds; the leading axis R is runs (seeds, or seeds and folds).

    Attributes:
        round: number of rounds done.
        sums: sums that the scores on the test set are computed from, ``[R, ...]``.
        test: scores on the test set.
        validation: scores on the validation set; None without one.
        personal: scores of the clients' personal models on the test set; None without them. Clients
            that never trained have models that they adapted, see :func:`fedjax_sim.data.eval_set`.
        personal_validation: the same on the validation set; None if it is not of these clients.
        train_loss: ``f64[R]``, mean local training loss of the last round.
        uploads: ``int64[R]``, models or fragments sent by clients so far.
        downloads: ``int64[R]``, models sent to clients so far.
        samples: ``int64[R]``, training samples visited so far.
        bytes_up: ``int64[R]``, bytes sent by clients so far: models, compressed or not, and what
            a method sends in addition, including before the first round. Not counted: the number
            of samples of each client, and shared samples, which are part of the data.
        bytes_down: ``int64[R]``, bytes received by clients so far.
        skipped: ``int64[R]``, visits so far whose update was rejected, see
            :func:`fedjax_sim.sending.finite_only`.
        diagnostics: diagnostics of the last round, ``f64[R]`` by name.
        uncollected: the task's leading score ``f64[R]`` before models in flight were collected and
            the algorithm finished, at the end of a run that does either; else None.
        seconds: ``f64[R]``, simulated seconds so far; None without a clock. Transfers before the
            first round and after the last take no time.
        wall_seconds: seconds on this machine so far, including compilation; for a resumed run,
            also those before the checkpoint.
        recorded: what ``record`` of :func:`fedjax_sim.simulate` kept, NumPy; None without it.
        before: the evaluation before models were collected; None if ``uncollected`` is None.
    """

    round: int
    sums: Sums
    test: SetScores
    validation: SetScores | None
    personal: SetScores | None
    personal_validation: SetScores | None
    train_loss: NDArray[np.float64]
    uploads: NDArray[np.int64]
    downloads: NDArray[np.int64]
    samples: NDArray[np.int64]
    bytes_up: NDArray[np.int64]
    bytes_down: NDArray[np.int64]
    skipped: NDArray[np.int64]
    diagnostics: dict[str, NDArray[np.float64]]
    uncollected: NDArray[np.float64] | None = None
    seconds: NDArray[np.float64] | None = None
    wall_seconds: float = float("nan")
    recorded: Any = None
    before: Evaluation | None = None

    @property
    def correct(self) -> NDArray[np.int32]:
        """``int32[R, M]``, right answers on the test set by class; classification only."""
        return self.sums.own.correct

    @property
    def total(self) -> NDArray[np.int32]:
        """``int32[R, M]``, test samples by class; classification only."""
        return self.sums.own.total

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """``f64[R]``, fraction of right answers on the test set, if the task has that score."""
        return self.test.pooled.accuracy

    @property
    def test_loss(self) -> NDArray[np.float64]:
        """``f64[R]``, mean loss on the test set."""
        return self.test.pooled.loss

    def __repr__(self) -> str:
        return brief(self, self.entries())

    def reported(self) -> dict[str, NDArray[np.float64]]:
        """Returns the scores of each set by name, ``f64[R]``; all but the test set have a prefix.

        For a set of several clients, a score is the unweighted mean over them.
        """
        sets: dict[str, SetScores | None] = {"": self.test}
        for part in ("validation", "personal", "personal_validation"):
            sets[f"{part}_"] = getattr(self, part)
        return {
            prefix + name: values
            for prefix, found in sets.items()
            for name, values in ({} if found is None else found.reported).items()
        }

    def entries(self) -> dict[str, Any]:
        """Returns the entries that ``repr`` shows: means over runs."""
        scores = {name: over_runs(values) for name, values in self.reported().items()}
        known = {"round": self.round, "runs": len(self.uploads), **scores}
        if self.seconds is not None:
            known["seconds"] = over_runs(self.seconds)
        return known | {"bytes": Text(f"{total_bytes(self).mean():,.0f}")}


def total_bytes(evaluation: Evaluation) -> NDArray[np.int64]:
    """Returns the bytes sent so far, up and down together, ``int64[R]``."""
    return evaluation.bytes_up + evaluation.bytes_down
