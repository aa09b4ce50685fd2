"""A grid of settings: points that differ in numbers alone are runs of one program."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import ClientData, LossFn, Model, Task, Variables
from fedjax_sim.data import EvalSet
from fedjax_sim.engine.execution import Execution
from fedjax_sim.engine.memory import trim
from fedjax_sim.round import Algorithm
from fedjax_sim.run.checkpoints import Checkpoints
from fedjax_sim.run.checks import as_set, checked_seeds
from fedjax_sim.run.points import Points, diverged, groups, run_points
from fedjax_sim.run.result import Result
from fedjax_sim.run.simulation import check_kinds, whole
from fedjax_sim.run.swept import Plan, Point, Settings, Sweep


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
    """Runs every point of a grid for every seed; points that differ in numbers alone at once.

    Settings that only enter arithmetic, such as rates, μ, α and τ, are one more axis of the same
    XLA programs: they compile once for all. Whether a float does is found by tracing a round with
    it. Settings that change shapes or parts (epochs, clients, names) are run in turn.

    Args:
        make: an algorithm of the grid's settings: ``make(mu=0.1, lr=0.05)``. It is called with the
            numbers for every point, which checks them, and with traced scalars.
        grid: values by setting; the points are all combinations.
        model: as for :func:`fedjax_sim.simulate`, and so are all that follow but ``on_plan``.
        data: the clients.
        test: the test set.
        rounds: local rounds.
        classes: M, short for a task.
        task: what is learnt.
        seeds: each point has a run for each.
        eval_every: rounds between evaluations.
        validation: what :meth:`Sweep.best` selects by.
        auc: see there.
        personal: whether clients' own models are scored.
        loss: for the loss on the sets.
        execution: as there.
        initial: the weights that all runs start from, of one model.
        checkpoints: a folder, or :class:`fedjax_sim.Checkpoints`: each group of points saves itself
            in a folder of its own there, and goes on from it.
        on_plan: called before the first round, with the :class:`Plan`; ``print`` prints it.

    Returns:
        The sweep. A point whose loss is not finite does not end the others: it says when.

    Raises:
        ValueError: if the grid is empty, or a point is refused; names its settings.
        TooLargeError: if the runs of a group do not fit in a device's memory together.
        CheckpointError: if the folder has checkpoints of another sweep.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> digits = fs.load_dataset("digits")
        >>> model = fs.models.logistic((8, 8, 1), 10)
        >>> model = fs.models.with_scaling(model, digits.mean, digits.std)
        >>> data = fs.client_data(digits.train_x, digits.train_y,
        ...                       fs.partition.iid(digits.train_y, 10, seed=0))
        >>> def fedprox(mu, lr):
        ...     local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(lr))
        ...     return fs.algorithms.fedprox(local, clients_per_round=5, mu=mu)
        >>> held_out = digits.test_x[:200], digits.test_y[:200]
        >>> rest = digits.test_x[200:], digits.test_y[200:]
        >>> grid = {"mu": [0.01, 1.0], "lr": [0.01, 0.1]}
        >>> tuned = fs.sweep(fedprox, grid, model, data, rest, validation=held_out,
        ...                  rounds=2, classes=10, seeds=[0, 1], on_plan=print)
        4 points x 2 seeds = 8 runs, in 1 group of programs
        >>> tuned.best().settings["lr"]
        0.1
    """
    rounds, seeds = whole("rounds", rounds), checked_seeds(seeds)
    points = _points(grid)
    made = [_made(make, point) for point in points]
    for algorithm in made:
        check_kinds(algorithm, model, data)
    every = Points(make, points, made)
    grouped = groups(every, model, data)
    plan = Plan(tuple(tuple(points[i] for i in group) for group in grouped), len(seeds))
    if on_plan is not None:
        on_plan(plan)
    given = {"test": test} if validation is None else {"test": test, "validation": validation}
    sets = {name: as_set(name, one) for name, one in given.items()}
    results: dict[int, Result] = {}
    for number, group in enumerate(grouped):
        found = run_points(
            every.some(group),
            model,
            data,
            sets,
            rounds=rounds,
            seeds=seeds,
            initial=initial,
            checkpoints=_of_group(checkpoints, number),
            classes=classes,
            task=task,
            eval_every=eval_every,
            auc=auc,
            personal=personal,
            loss=loss,
            execution=execution,
        )
        results |= dict(zip(group, found, strict=True))
        trim()
    return Sweep(
        tuple(
            Point(point, tuple(seeds), results[i], diverged(results[i], seeds))
            for i, point in enumerate(points)
        ),
        plan,
    )


def _of_group(checkpoints: Checkpoints | str | Path | None, number: int) -> Checkpoints | None:
    if checkpoints is None:
        return None
    given = checkpoints if isinstance(checkpoints, Checkpoints) else Checkpoints(checkpoints)
    return given._replace(folder=Path(given.folder) / f"group{number}")


def _points(grid: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations of a grid."""
    if not isinstance(grid, Mapping) or not grid:
        raise ValueError(f"grid must have values by setting, as {{'mu': [0.1, 1]}}, got {grid!r}")
    for name, values in grid.items():
        if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
            raise ValueError(f"grid must have a list of values for {name}, got {values!r}")
        if not len(values) or len({*map(repr, values)}) < len(values):
            raise ValueError(f"grid must have values for {name}, each once, got {values!r}")
    plain = ([_plain(v) for v in values] for values in grid.values())
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*plain)]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _made(make: Callable[..., Algorithm], point: Settings) -> Algorithm:
    try:
        return make(**point)
    except ValueError as error:
        told = ", ".join(f"{name}={value}" for name, value in point.items())
        raise ValueError(f"at {told}: {error}") from error
