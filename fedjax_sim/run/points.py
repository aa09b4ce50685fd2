"""Runs of one program that differ in numbers of their algorithm: a result for each point."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Array, ClientData, FedState, Model, Variables
from fedjax_sim.data import EvalSet
from fedjax_sim.round import Algorithm
from fedjax_sim.run.axes import client_axes, first_run, repeated, set_axes
from fedjax_sim.run.checkpoints import Checkpoints
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.result import DivergedError, Evaluation, Result, of_runs
from fedjax_sim.run.rounds import check_losses, run_rounds
from fedjax_sim.run.simulation import experiment
from fedjax_sim.run.varied import Varied

Settings = Mapping[str, Any]
Make = Callable[..., Algorithm]

_KEY = jax.eval_shape(lambda: jax.random.key(0))


class Points(NamedTuple):
    """Algorithms that can be runs of one program.

    Attributes:
        make: an algorithm of settings by name, which may be traced.
        settings: of each, by the same names.
        algorithms: of each, checked.
    """

    make: Make
    settings: Sequence[Settings]
    algorithms: Sequence[Algorithm]

    def some(self, places: Sequence[int]) -> Points:
        """Those at some places."""
        return Points(
            self.make,
            [self.settings[i] for i in places],
            [self.algorithms[i] for i in places],
        )

    def varied(self, runs: int) -> Varied | None:
        """What makes the algorithm of each run, if every point has so many."""
        size = len(self.settings)
        if size == 1:
            return None
        names = [n for n, v in self.settings[0].items() if any(p[n] != v for p in self.settings)]
        own = [{n: point[n] for n in names} for point in self.settings]
        fixed = {n: v for n, v in self.settings[0].items() if n not in names}
        of_run = np.repeat(np.arange(size, dtype=np.int32), runs)
        return Varied(functools.partial(self.make, **fixed), own, of_run)


def run_points(
    points: Points,
    model: Model,
    data: ClientData,
    sets: Mapping[str, EvalSet],
    *,
    rounds: int,
    seeds: Sequence[int] | NDArray[np.integer[Any]],
    initial: Variables | None = None,
    record: Callable[[FedState], Any] | None = None,
    on_compiled: Callable[[int], None] | None = None,
    on_evaluation: Callable[[int, Evaluation], None] | None = None,
    on_rounds: Callable[[int], None] | None = None,
    checkpoints: Checkpoints | str | Path | None = None,
    **how: Any,
) -> list[Result]:
    """Runs all points for every seed at once; a loss that is not finite does not end the others.

    Args:
        points: what can be one program.
        model: what is trained.
        data: the clients; their axis of runs is that of the seeds.
        sets: ``test``, and ``validation`` if there is one, with the same axis.
        rounds: local rounds.
        seeds: each point has a run for each.
        initial: as for :func:`fedjax_sim.simulate`.
        record: as there.
        on_compiled: as there.
        on_evaluation: called for each point with its number.
        on_rounds: as there.
        checkpoints: as there, of all points together.
        **how: settings of :func:`fedjax_sim.run.simulation.experiment`.

    Returns:
        Of each point; seconds, programs and memory are those of all.
    """
    size, runs = len(points.settings), len(seeds)
    ours = {name: repeated(given, set_axes(given), size) for name, given in sets.items()}
    slices = [slice(place * runs, (place + 1) * runs) for place in range(size)]
    everyone = [*map(int, seeds)] * size

    def make() -> Experiment:
        return experiment(
            points.algorithms[0],
            model,
            repeated(data, client_axes(data), size),
            **ours,
            seeds=everyone,
            varied=points.varied(runs),
            **how,
        )

    def told(evaluation: Evaluation) -> None:
        for place, mine in enumerate(slices):
            if on_evaluation is not None:
                on_evaluation(place, of_runs(evaluation, mine))

    result = run_rounds(
        make,
        rounds,
        everyone,
        initial=initial,
        record=record,
        on_compiled=on_compiled,
        on_evaluation=told,
        on_rounds=on_rounds,
        checkpoints=checkpoints,
        diverging=True,
    )
    return [result.of_runs(mine) for mine in slices]


def groups(points: Points, model: Model, data: ClientData) -> list[list[int]]:
    """The points by their programs: those that differ in what can be traced alone.

    Args:
        points: what may be one program, or several.
        model: what is trained.
        data: the clients.

    Returns:
        Places among the points, each once.
    """
    make, settings = points.make, points.settings
    candidates = [
        name
        for name in settings[0]
        if len({repr(p[name]) for p in settings}) > 1
        and all(isinstance(p[name], float) for p in settings)
    ]
    if not traces(make, settings[0], candidates, model, data):
        candidates = [n for n in candidates if traces(make, settings[0], [n], model, data)]
        if not traces(make, settings[0], candidates, model, data):
            candidates = []
    found: dict[Any, list[int]] = {}
    for i, (point, algorithm) in enumerate(zip(settings, points.algorithms, strict=True)):
        fixed = [repr(value) for name, value in point.items() if name not in candidates]
        # What is counted on the host is counted by one algorithm of the group.
        found.setdefault((*fixed, _facts(algorithm, model, data)), []).append(i)
    return [*found.values()]


def traces(
    make: Make, point: Settings, names: Sequence[str], model: Model, data: ClientData
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


def diverged(result: Result, seeds: Sequence[int]) -> str | None:
    """The round and the seed of the first loss that is not finite; None if all are."""
    before = 0
    for evaluation in result.evaluations:
        try:
            check_losses(result.metrics.loss[:, before : evaluation.round], evaluation, seeds)
        except DivergedError as error:
            return str(error)
        before = evaluation.round
    return None


def _facts(algorithm: Algorithm, model: Model, data: ClientData) -> tuple[Any, ...]:
    shapes = jax.eval_shape(model.init, _KEY)
    one = first_run(data, client_axes(data))
    sizes = algorithm.traffic(shapes, one), algorithm.setup_traffic(shapes, one)
    kinds = algorithm.personal is None, algorithm.parts.finish is None, algorithm.round_factor
    return algorithm.slots, algorithm.ends, *kinds, *sizes
