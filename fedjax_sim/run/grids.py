"""A grid of settings: points that differ in numbers alone are runs of one program."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Array, ClientData, LossFn, Model, Task, Variables
from fedjax_sim.data import EvalSet
from fedjax_sim.engine.execution import Execution
from fedjax_sim.round import Algorithm
from fedjax_sim.run.axes import client_axes, first_run, repeated, set_axes
from fedjax_sim.run.checks import as_set, checked_seeds
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.result import DivergedError, Result
from fedjax_sim.run.rounds import check_losses, run_rounds
from fedjax_sim.run.simulation import check_kinds, experiment, whole
from fedjax_sim.run.swept import Plan, Point, Settings, Sweep
from fedjax_sim.run.varied import Varied

_KEY = jax.eval_shape(lambda: jax.random.key(0))


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
        execution: devices.
        initial: the weights that all runs start from, of one model.
        on_plan: called before the first round, with the :class:`Plan`; ``print`` prints it.

    Returns:
        The sweep. A point whose loss is not finite does not end the others: it says when.

    Raises:
        ValueError: if the grid is empty, or a point is refused; names its settings.
        TooLargeError: if the runs of a group do not fit in a device's memory together.

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
    groups = _groups(make, points, made, model, data)
    plan = Plan(tuple(tuple(points[i] for i in group) for group in groups), len(seeds))
    if on_plan is not None:
        on_plan(plan)
    sets = {"test": test} if validation is None else {"test": test, "validation": validation}
    results: dict[int, Result] = {}
    for group in groups:
        size = len(group)
        varied = None
        if size > 1:
            names = [n for n in grid if len({points[i][n] for i in group}) > 1]
            settings = [{n: points[i][n] for n in names} for i in group]
            fixed = {n: v for n, v in points[group[0]].items() if n not in names}
            of_run = np.repeat(np.arange(size, dtype=np.int32), len(seeds))
            varied = Varied(functools.partial(make, **fixed), settings, of_run)
        ours = {name: _repeated(as_set(name, given), size) for name, given in sets.items()}

        def programs(group: Any = group, ours: Any = ours, varied: Any = varied) -> Experiment:
            return experiment(
                made[group[0]],
                model,
                repeated(data, client_axes(data), len(group)),
                **ours,
                classes=classes,
                task=task,
                seeds=seeds * len(group),
                eval_every=eval_every,
                auc=auc,
                personal=personal,
                loss=loss,
                execution=execution,
                varied=varied,
            )

        result = run_rounds(programs, rounds, seeds * size, initial=initial, diverging=True)
        for place, i in enumerate(group):
            results[i] = result.of_runs(slice(place * len(seeds), (place + 1) * len(seeds)))
    found = (
        Point(point, tuple(seeds), results[i], _diverged(results[i], seeds))
        for i, point in enumerate(points)
    )
    return Sweep(tuple(found), plan)


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


def _repeated(examples: EvalSet, times: int) -> EvalSet:
    again: EvalSet = repeated(examples, set_axes(examples), times)
    return again


def _groups(
    make: Callable[..., Algorithm],
    points: Sequence[Settings],
    made: Sequence[Algorithm],
    model: Model,
    data: ClientData,
) -> list[list[int]]:
    """The points by their programs: those that differ in what can be traced alone."""
    candidates = [
        name
        for name, value in points[0].items()
        if len({repr(p[name]) for p in points}) > 1
        and all(isinstance(p[name], float) for p in points)
    ]
    if not traces(make, points[0], candidates, model, data):
        candidates = [n for n in candidates if traces(make, points[0], [n], model, data)]
        if not traces(make, points[0], candidates, model, data):
            candidates = []
    groups: dict[Any, list[int]] = {}
    for i, (point, algorithm) in enumerate(zip(points, made, strict=True)):
        fixed = [repr(value) for name, value in point.items() if name not in candidates]
        # What is counted on the host is counted by one algorithm of the group.
        facts = _facts(algorithm, model, data)
        groups.setdefault((*fixed, facts), []).append(i)
    return [*groups.values()]


def traces(
    make: Callable[..., Algorithm],
    point: Settings,
    names: Sequence[str],
    model: Model,
    data: ClientData,
) -> bool:
    """Whether runs that differ in these settings alone can be one program: a round is traced."""
    if not names:
        return True
    mine = {name: point[name] for name in names}
    fixed = {name: value for name, value in point.items() if name not in mine}
    varied = Varied(functools.partial(make, **fixed), [mine, mine], np.arange(2, dtype=np.int32))

    def one(point: Array, key: Array, data: ClientData) -> Any:
        algorithm = varied.at(point)
        return algorithm.step(key, algorithm.init(key, model.init(key), data), data)

    first = first_run(data, client_axes(data))
    rounds = jax.vmap(one, in_axes=(0, None, None))
    try:
        jax.eval_shape(rounds, varied.point, _KEY, first)
    except Exception:  # any that a part raises which needs the number itself, to branch by it say
        return False
    return True


def _facts(algorithm: Algorithm, model: Model, data: ClientData) -> tuple[Any, ...]:
    shapes = jax.eval_shape(model.init, _KEY)
    one = first_run(data, client_axes(data))
    sizes = algorithm.traffic(shapes, one), algorithm.setup_traffic(shapes, one)
    kinds = algorithm.personal is None, algorithm.parts.finish is None
    return algorithm.slots, algorithm.ends, *kinds, *sizes


def _diverged(result: Result, seeds: Sequence[int]) -> str | None:
    before = 0
    for evaluation in result.evaluations:
        try:
            check_losses(result.metrics.loss[:, before : evaluation.round], evaluation, seeds)
        except DivergedError as error:
            return str(error)
        before = evaluation.round
    return None
