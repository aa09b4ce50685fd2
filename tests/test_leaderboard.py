"""The leaderboard: a row of the committed results, made again, and the numbers of its tables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import leaderboard


@pytest.mark.slow
def test_a_row_of_the_page_can_be_made_again() -> None:
    path = leaderboard.FILE.parent / "results" / "leaderboard" / "digits.jsonl"
    wanted, found = leaderboard.read(path)["FedAvg"], leaderboard.compute("FedAvg")
    for kind in ("server", "server, half of the bytes"):
        for name in leaderboard.NAMES:
            old, new = (np.mean(row[kind][name]["scores"]) for row in (wanted, found))
            assert abs(old - new) < 0.02, (kind, name)  # other machines round differently


def test_settings_are_selected_on_validation_samples() -> None:
    def result(validation: float, test: float) -> Any:
        parts = {"validation": validation, "test": test}
        return SimpleNamespace(
            provenance=SimpleNamespace(own_leaves=False),
            of_runs=lambda runs: result(validation, test),
            series=lambda metric, *, by_client, part: np.full((3, 5), parts[part]),
            validated=lambda metric, *, by_client, personal: np.full(5, test),
        )

    found = leaderboard.chosen({"good": result(0.9, 0.5), "lucky": result(0.8, 0.6)})
    assert found is not None
    assert [*found] == list(leaderboard.NAMES)
    assert found["IID"] == {"setting": "good", "scores": [0.5] * 5}


def test_ranks_and_intervals() -> None:
    base = np.full((5, 5), 0.5)
    better = base + 0.01 * np.array([1, 2, 3, 4, 5])
    board = leaderboard.Board("server", {"FedAvg": base, "other": better, "worse": base - 0.1})
    assert [*board.averages.items()] == [("other", 1.0), ("FedAvg", 2.0), ("worse", 3.0)]
    middle, half = board.gain("other", 0)
    assert middle == pytest.approx(3)
    assert half == pytest.approx(2.776 * np.sqrt(2.5 / 5), rel=1e-3)  # Student's t, 4 degrees
