"""Evaluations as rows: the records of run folders and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Task
from fedjax_sim.run.evaluation import Evaluation
from fedjax_sim.run.metrics import SetScores, client_accuracy, spread
from fedjax_sim.tasks.sums import Tally

Row = dict[str, Any]


def row_of(
    evaluation: Evaluation,
    i: int,
    place: Mapping[str, Any],
    table: NDArray[np.int64],
    task: Task,
    names: Sequence[str] = (),
) -> tuple[Row, Row]:
    """Returns run i of an evaluation as a row, and the scores of its clients.

    ``place`` are the entries that identify the run, ``table int64[N, M]`` the clients' samples by
    class, ``names`` the names of the scored clients, if any.

    Returns:
        A line of ``metrics.jsonl``, and the line of ``clients.jsonl`` (empty without scores by
        client); missing scores are NaN.
    """
    place = {**place, "round": evaluation.round}
    clients = _client_scores(evaluation, i, table, task, len(names))
    row: Row = {
        **place,
        **_pooled(evaluation.test, i),
        **_spreads(clients),
        "test_loss": evaluation.test_loss[i],
        "train_loss": evaluation.train_loss[i],
        "bytes_up": int(evaluation.bytes_up[i]),
        "bytes_down": int(evaluation.bytes_down[i]),
        "samples": int(evaluation.samples[i]),
        "skipped": int(evaluation.skipped[i]),
    }
    if evaluation.seconds is not None:
        row["seconds"] = float(evaluation.seconds[i])
    for part in ("validation", "personal", "personal_validation"):
        scores: SetScores | None = getattr(evaluation, part)
        if scores is not None:
            row[part] = _pooled(scores, i) | _spreads(_by_client(scores, i))
    row |= {name: values[i] for name, values in evaluation.diagnostics.items()}
    if evaluation.uncollected is not None:
        row[f"{task.score}_uncollected"] = evaluation.uncollected[i]
    own = {} if evaluation.personal is None else _by_client(evaluation.personal, i)
    if not (clients or own):
        return row, {}
    named = {"names": list(names)} if names else {}
    return row, place | named | clients | ({"personal": own} if own else {})


def _client_scores(
    evaluation: Evaluation, run: int, table: NDArray[np.int64], task: Task, named: int
) -> dict[str, NDArray[np.float64]]:
    """Returns the server model's scores at each client in one run, ``f64[K]`` by name."""
    if named == 1:  # a fold's only client, whose samples are the whole set
        return {f"client_{m}": np.atleast_1d(v) for m, v in _pooled(evaluation.test, run).items()}
    if evaluation.test.by_client is not None or task.classes is None:
        return _by_client(evaluation.test, run)
    if not isinstance(evaluation.sums.own, Tally):  # a user's task with classes
        return {}
    # Clients have no test samples of their own: the score that their labels let expect.
    correct, count = evaluation.correct[run], evaluation.total[run]
    return {"client_accuracy": client_accuracy(correct, count, table)}


def _pooled(scores: SetScores, run: int) -> dict[str, float]:
    """Returns one run's scores of all samples of an evaluation set."""
    return {m: scores.pooled[m][run] for m in scores.metrics}


def _by_client(scores: SetScores, run: int) -> dict[str, NDArray[np.float64]]:
    """Returns one run's score of each client, ``f64[K]`` by name; empty without clients."""
    if scores.by_client is None:
        return {}
    return {f"client_{m}": scores.by_client[m][run] for m in scores.metrics}


def _spreads(by_client: Mapping[str, NDArray[np.float64]]) -> dict[str, dict[str, float]]:
    return {name: spread(values) for name, values in by_client.items()}
