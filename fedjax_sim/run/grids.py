"""A grid of settings: points that differ only in numbers are runs of one program."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import ClientData, LossFn, Model, Task, Variables
from fedjax_sim.base.brief import Text, brief, brief_text, over_runs
from fedjax_sim.base.words import counted
from fedjax_sim.data import EvalSet
from fedjax_sim.engine.execution import Execution
from fedjax_sim.engine.memory import trim
from fedjax_sim.round import Algorithm
from fedjax_sim.run.candidates import (
    Candidates,
    Settings,
    divergence,
    group_candidates,
    run_candidates,
)
from fedjax_sim.run.checkpoints import Checkpoints
from fedjax_sim.run.checks import check_kinds, checked_seeds, whole_number
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.result import Result, Set
from fedjax_sim.tasks.sums import mean_known


class Plan(NamedTuple):
    """The runs of a sweep.

    Attributes:
        groups: points that share programs.
        seeds: number of runs of each point.
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
        settings: settings by name.
        seeds: seeds of its runs.
        result: result of its runs. Seconds, programs and memory are totals of its group.
        diverged: round and seed of the first loss that is not finite; None if all are finite.
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
        """The task's leading score after the last round, over runs, or "diverged"."""
        if self.diverged or not self.result.evaluations:
            return Text("diverged" if self.diverged else "unknown")
        return over_runs(self.result.evaluations[-1].test.reported[self.result.task.score])


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The points of a grid with their results.

    Attributes:
        points: points in the grid's order; the last setting changes fastest.
        plan: which points shared programs.
    """

    points: tuple[Point, ...]
    plan: Plan

    def table(self) -> list[dict[str, Any]]:
        """Returns a row for each point, seed and evaluation, for ``pandas.DataFrame``.

        Returns:
            Settings, seed, round, bytes, and scores on the test set by their names; the others are
            called ``validation_NAME``, ``personal_NAME`` and ``personal_validation_NAME``. The
            scores of a diverged point are None.
        """
        rows = []
        for point in self.points:
            for evaluation in point.result.evaluations:
                scores = evaluation.reported()
                for i, seed in enumerate(point.seeds):
                    row = {**point.settings, "seed": seed, "round": evaluation.round}
                    for name, values in scores.items():
                        row[name] = None if point.diverged else float(values[i])
                    row["bytes_up"] = int(evaluation.bytes_up[i])
                    row["bytes_down"] = int(evaluation.bytes_down[i])
                    rows.append(row)
        return rows

    def __repr__(self) -> str:
        entries: dict[str, Any] = {"plan": Text(self.plan)}
        for name in dict.fromkeys(name for point in self.points for name in point.settings):
            tried = dict.fromkeys(brief_text(point.settings.get(name)) for point in self.points)
            entries[name] = Text(f"[{', '.join(tried)}]")
        return brief(self, entries)

    def best(self, metric: str | None = None) -> Point:
        """Returns the point with the best mean validation score, each run at its best round.

        If clients' personal models are scored on the validation set, their scores are compared.

        Args:
            metric: a score of the task, or "loss"; None: the task's leading score. If the
                validation set has clients, the unweighted mean over them.

        Returns:
            The point, the first in case of ties. Its ``result.validated(...)`` is the test score,
            or with ``personal=True`` the test score of the personal models.

        Raises:
            ValueError: if the sweep has no validation set or no such score, all points diverged, or
                none has this score, such as the AUC on samples of one class.
        """
        task = self.points[0].result.task
        metric = task.score if metric is None else metric
        found: list[tuple[float, Point]] = []
        for point in self.points:
            first = point.result.evaluations[0]
            own = first.personal_validation is not None
            sets = first.personal_validation if own else first.validation
            by_client = sets is not None and sets.by_client is not None
            part: Set = "personal_validation" if own else "validation"
            values = point.result.series(metric, by_client=by_client, part=part)
            if not point.diverged:
                sign = -1 if point.result.lowest(metric) else 1
                found.append((float(mean_known(np.fmax.reduce(sign * values))), point))
        if not found:
            raise ValueError(f"all {len(self.points)} points have diverged")
        found = [(score, point) for score, point in found if not np.isnan(score)]
        if not found:
            raise ValueError(f"no point has the score {metric} on the validation set")
        return max(found, key=lambda pair: pair[0])[1]


def sweep(
    make: Callable[..., Algorithm],
    grid: Mapping[str, Sequence[Any]],
    model: Model,
    data: ClientData,
    test: tuple[Any, Any] | EvalSet,
    *,
    rounds: int,
    classes: int | None = None,
    task: Task | None = None,
    seeds: Sequence[int] | NDArray[np.integer[Any]] = (0,),
    eval_every: int = 1,
    validation: tuple[Any, Any] | EvalSet | None = None,
    auc: bool | None = None,
    personal: bool = False,
    loss: LossFn | None = None,
    execution: Execution | None = None,
    initial: Variables | None = None,
    checkpoints: Checkpoints | str | Path | None = None,
    on_plan: Callable[[Plan], None] | None = None,
) -> Sweep:
    """Runs every point of a grid for every seed; points that differ only in numbers run together.

    Settings that only enter arithmetic, such as rates, μ, α and τ, are one more axis of the same
    XLA programs, which compile once for all points. A round is traced to find whether a float is
    such a setting. Settings that change shapes or parts (epochs, clients, names) run in turn.

    Args:
        make: function that makes an algorithm from the grid's settings: ``make(mu=0.1, lr=0.05)``.
            It is called with the numbers of every point, which checks them, and with traced
            scalars.
        grid: values by setting; the points are all combinations.
        model: as in :func:`fedjax_sim.simulate`, like all that follow except ``on_plan``.
        data: the clients.
        test: the test set.
        rounds: number of local rounds.
        classes: M, short for a task.
        task: the task.
        seeds: each point has a run for each seed.
        eval_every: rounds between evaluations.
        validation: the set by which :meth:`Sweep.best` selects.
        auc: whether to score the AUC.
        personal: whether to score clients' personal models.
        loss: loss on the sets.
        execution: where and how to run.
        initial: initial weights of all runs, of one model.
        checkpoints: a folder, or :class:`fedjax_sim.Checkpoints`: each group of points is saved in
            a folder of its own in it, and resumes from there.
        on_plan: called before the first round with the :class:`Plan`; ``print`` prints it.

    Returns:
        The sweep. A point that diverges does not end the others; ``diverged`` names its round.

    Raises:
        ValueError: if the grid is empty, or a point is rejected; the message has its settings.
        TooLargeError: if the runs of a group do not fit in a device's memory together.
        CheckpointError: if the folder has checkpoints of another sweep.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> digits = fs.load_dataset("digits")
        >>> model = fs.models.logistic((8, 8, 1), 10)
        >>> model = fs.models.with_scaling(model, digits.mean, digits.std)
        >>> clients = fs.partition.iid(digits.train_y, 10, seed=0)
        >>> train, held_out = fs.data.client_holdout(clients, 0.1, seed=0)
        >>> data = fs.client_data(digits.train_x, digits.train_y, train)
        >>> validation = fs.data.eval_set(digits.train_x, digits.train_y, held_out)
        >>> test = digits.test_x, digits.test_y
        >>> def fedprox(mu, lr):
        ...     local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(lr))
        ...     return fs.algorithms.fedprox(local, clients_per_round=5, mu=mu)
        >>> grid = {"mu": [0.01, 1.0], "lr": [0.01, 0.1]}
        >>> tuned = fs.sweep(fedprox, grid, model, data, test, validation=validation,
        ...                  rounds=2, classes=10, seeds=[0, 1], on_plan=print)
        4 points x 2 seeds = 8 runs, in 1 group of programs
        >>> tuned.best().settings["lr"]
        0.1
    """
    rounds, seeds = whole_number("rounds", rounds), checked_seeds(seeds)
    points = _points(grid)
    algorithms = [_algorithm(make, point) for point in points]
    for algorithm in algorithms:
        check_kinds(algorithm, model, data)
    candidates = Candidates(make, points, algorithms)
    groups = group_candidates(candidates, model, data)
    plan = Plan(tuple(tuple(points[i] for i in group) for group in groups), len(seeds))
    if on_plan is not None:
        on_plan(plan)
    experiment = Experiment(
        algorithms[0],
        model,
        data,
        test,
        classes=classes,
        task=task,
        seeds=seeds,
        eval_every=eval_every,
        validation=validation,
        auc=auc,
        personal=personal,
        loss=loss,
        execution=execution,
    )
    results: dict[int, Result] = {}
    for number, group in enumerate(groups):
        found = run_candidates(
            candidates.subset(group),
            experiment,
            rounds,
            initial=initial,
            checkpoints=_group_checkpoints(checkpoints, number),
        )
        results |= dict(zip(group, found, strict=True))
        trim()
    return Sweep(
        tuple(
            Point(point, tuple(seeds), results[i], divergence(results[i], seeds))
            for i, point in enumerate(points)
        ),
        plan,
    )


def _group_checkpoints(
    checkpoints: Checkpoints | str | Path | None, number: int
) -> Checkpoints | None:
    if checkpoints is None:
        return None
    given = checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)
    return given._replace(folder=Path(given.folder) / f"group{number}")


def _points(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Returns all combinations of a grid."""
    if not isinstance(grid, Mapping) or not grid:
        raise ValueError(f"grid must have values by setting, as {{'mu': [0.1, 1]}}, got {grid!r}")
    for name, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
            raise ValueError(f"grid must have a list of values for {name}, got {values!r}")
        if not len(values) or len({*map(repr, values)}) < len(values):
            raise ValueError(f"grid must have values for {name}, each once, got {values!r}")
    plain = (
        [v.item() if isinstance(v, np.generic) else v for v in values] for values in grid.values()
    )
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*plain)]


def _algorithm(make: Callable[..., Algorithm], point: Settings) -> Algorithm:
    try:
        return make(**point)
    except ValueError as error:
        settings = ", ".join(f"{name}={value}" for name, value in point.items())
        raise ValueError(f"at {settings}: {error}") from error
