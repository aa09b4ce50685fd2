"""What a sweep gives: its points, a table of them, and the best."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim.base.brief import Text, brief, brief_text, html_table, over_runs
from fedjax_sim.base.words import counted
from fedjax_sim.run.result import Result

Settings = Mapping[str, Any]


class Plan(NamedTuple):
    """What a sweep will run.

    Attributes:
        groups: points that are runs of the same programs.
        seeds: runs of each point.
    """

    groups: tuple[tuple[Settings, ...], ...]
    seeds: int

    def __repr__(self) -> str:
        return f"Plan({self})"

    def __str__(self) -> str:
        points, groups = sum(map(len, self.groups)), len(self.groups)
        return (
            f"{counted(points, 'point')} x {counted(self.seeds, 'seed')} = "
            f"{counted(points * self.seeds, 'run')}, in {counted(groups, 'group')} of programs"
            f"{', in turn' * (groups > 1)}"
        )


@dataclasses.dataclass(frozen=True)
class Point:
    """One point of the grid.

    Attributes:
        settings: by name.
        seeds: of its runs.
        result: of these. Seconds, programs and memory are those of its group.
        diverged: the round and the seed of the first loss that is not finite; None if all are.
    """

    settings: Settings
    seeds: tuple[int, ...]
    result: Result
    diverged: str | None

    def __repr__(self) -> str:
        return brief(
            self, {**self.settings, "seeds": self.seeds, self.result.task.score: self.last}
        )

    @property
    def last(self) -> Text:
        """The task's leading score after the last round, over runs, or that they diverged."""
        if self.diverged or not self.result.evaluations:
            return Text("diverged" if self.diverged else "unknown")
        return over_runs(self.result.evaluations[-1].test.reported[self.result.task.score])


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The points of a grid, in its order, and what ran for them.

    Attributes:
        points: the last setting changes fastest.
        plan: which were runs of the same programs.
    """

    points: tuple[Point, ...]
    plan: Plan

    def table(self) -> list[dict[str, Any]]:
        """A row for each point, seed and evaluation, as ``pandas.DataFrame`` takes them.

        Returns:
            Settings, seed, round, bytes, and scores on the test set by their names; on the
            validation set they are called ``validation_NAME``. Of a point that has diverged the
            scores are None.
        """
        rows = []
        for point in self.points:
            for evaluation in point.result.evaluations:
                sets = {"": evaluation.test, "validation_": evaluation.validation}
                for i, seed in enumerate(point.seeds):
                    row = {**point.settings, "seed": seed, "round": evaluation.round}
                    for prefix, scored in sets.items():
                        for name, values in ({} if scored is None else scored.reported).items():
                            row[prefix + name] = None if point.diverged else float(values[i])
                    row["bytes_up"] = int(evaluation.bytes_up[i])
                    row["bytes_down"] = int(evaluation.bytes_down[i])
                    rows.append(row)
        return rows

    @property
    def _names(self) -> list[str]:
        return [*dict.fromkeys(name for point in self.points for name in point.settings)]

    def __repr__(self) -> str:
        entries: dict[str, Any] = {"plan": Text(self.plan)}
        for name in self._names:
            tried = dict.fromkeys(brief_text(point.settings.get(name)) for point in self.points)
            entries[name] = Text(f"[{', '.join(tried)}]")
        return brief(self, entries)

    def _repr_html_(self) -> str:
        names, rows = self._names, []
        for point in self.points:
            rows.append([*(brief_text(point.settings.get(name)) for name in names), point.last])
        return html_table(f"Sweep: {self.plan}", rows, [*names, self.points[0].result.task.score])

    def best(self, metric: str | None = None) -> Point:
        """The point with the best mean score on the validation set, each run at its best round.

        Args:
            metric: a score of the task, or "loss"; None: the task's leading one. With clients in
              the validation set it is the unweighted mean over them.

        Returns:
            The point, the first of equals; its ``result.validated(...)`` is the test score.

        Raises:
            ValueError: if the sweep has no validation set, no such score, or if all have diverged.
        """
        task = self.points[0].result.task
        metric = task.score if metric is None else metric
        found: list[tuple[float, Point]] = []
        for point in self.points:
            sets = point.result.evaluations[0].validation
            by_client = sets is not None and sets.by_client is not None
            values = point.result.series(metric, by_client=by_client, part="validation")
            if not point.diverged:
                lowest = point.result.lowest(metric)
                best = np.nanmin(values, axis=0) if lowest else np.nanmax(values, axis=0)
                found.append((float(np.mean(-best if lowest else best)), point))
        if not found:
            raise ValueError(f"all {len(self.points)} points have diverged")
        return max(found, key=lambda pair: pair[0])[1]
