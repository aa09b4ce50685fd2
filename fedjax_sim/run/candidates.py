"""Candidate settings of an algorithm that run in one program, with a result for each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_sim.base import Array, ClientData, Model
from fedjax_sim.round import Algorithm
from fedjax_sim.run.checks import check_losses
from fedjax_sim.run.evaluation import Evaluation
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.functions import PerRunSettings
from fedjax_sim.run.layout import client_axes, one_run, repeat_runs, set_axes
from fedjax_sim.run.result import DivergedError, Result, select_runs

Settings = Mapping[str, Any]
Make = Callable[..., Algorithm]

_KEY = jax.eval_shape(lambda: jax.random.key(0))


class Candidates(NamedTuple):
    """Algorithms that differ in their settings."""

    make: Make  # makes an algorithm from settings, which may be traced
    settings: Sequence[Settings]  # settings of each algorithm, by the same names
    algorithms: Sequence[Algorithm]  # of the settings, checked

    def subset(self, places: Sequence[int]) -> Candidates:
        """Returns the candidates with these indices."""
        settings = [self.settings[i] for i in places]
        return Candidates(self.make, settings, [self.algorithms[i] for i in places])

    def per_run(self, runs: int) -> PerRunSettings | None:
        """Returns the algorithms of ``runs`` runs of each candidate; None for one candidate."""
        size = len(self.settings)
        if size == 1:
            return None
        first = self.settings[0]
        names = [n for n, v in first.items() if any(s[n] != v for s in self.settings)]
        varying = [{n: settings[n] for n in names} for settings in self.settings]
        fixed = {n: v for n, v in first.items() if n not in names}
        index = np.repeat(np.arange(size, dtype=np.int32), runs)
        return PerRunSettings(functools.partial(self.make, **fixed), varying, index)


def run_candidates(
    candidates: Candidates,
    experiment: Experiment,
    rounds: int,
    *,
    on_evaluation: Callable[[int, Evaluation], None] | None = None,
    **options: Any,
) -> list[Result]:
    """Runs all candidates for every seed at once; one that diverges does not end the others.

    The experiment has one of them; the options of :meth:`Experiment.run` apply to all together.
    ``on_evaluation`` is called for each candidate with its number.

    Returns:
        A result for each candidate; seconds, programs and memory are totals.
    """
    size, runs, data = len(candidates.settings), len(experiment.seeds), experiment.data
    sets: dict[str, Any] = {
        name: repeat_runs(examples, set_axes(examples), size)
        for name, examples in experiment.sets().items()
    }
    together = dataclasses.replace(
        experiment,
        algorithm=candidates.algorithms[0],
        data=repeat_runs(data, client_axes(data), size),
        seeds=[*map(int, experiment.seeds)] * size,
        per_run=candidates.per_run(runs),
        **sets,
    )
    slices = [slice(place * runs, (place + 1) * runs) for place in range(size)]

    def report(evaluation: Evaluation) -> None:
        for place, runs_of_it in enumerate(slices):
            if on_evaluation is not None:
                on_evaluation(place, select_runs(evaluation, runs_of_it))

    result = together.run(rounds, on_evaluation=report, may_diverge=True, **options)
    results = []
    for algorithm, runs_of_it in zip(candidates.algorithms, slices, strict=True):
        own = result.of_runs(runs_of_it)
        provenance = own.provenance.with_algorithm(algorithm, data)
        results.append(dataclasses.replace(own, provenance=provenance))
    return results


def group_candidates(candidates: Candidates, model: Model, data: ClientData) -> list[list[int]]:
    """Groups the candidates that can share a program: they differ only in traceable settings."""
    make, settings = candidates.make, candidates.settings
    names = [
        name
        for name in settings[0]
        if len({repr(s[name]) for s in settings}) > 1
        and all(isinstance(s[name], float) for s in settings)
    ]
    if not traceable(make, settings[0], names, model, data):
        names = [n for n in names if traceable(make, settings[0], [n], model, data)]
        if not traceable(make, settings[0], names, model, data):
            names = []
    groups: dict[Any, list[int]] = {}
    for i, (mine, algorithm) in enumerate(zip(settings, candidates.algorithms, strict=True)):
        fixed = [repr(value) for name, value in mine.items() if name not in names]
        # The host counts with one algorithm of the group.
        groups.setdefault((*fixed, _host_facts(algorithm, model, data)), []).append(i)
    return [*groups.values()]


def traceable(
    make: Make, settings: Settings, names: Sequence[str], model: Model, data: ClientData
) -> bool:
    """Returns whether runs that differ only in these settings can share a program.

    A round is traced to find out.
    """
    if not names:
        return True
    varying = {name: settings[name] for name in names}
    fixed = {name: value for name, value in settings.items() if name not in varying}
    make = functools.partial(make, **fixed)
    per_run = PerRunSettings(make, [varying, varying], np.arange(2, dtype=np.int32))

    def step(index: Array, key: Array, data: ClientData) -> Any:
        algorithm = per_run.algorithm(index)
        return algorithm.step(key, algorithm.init(key, model.init(key), data), data)

    first = one_run(data, client_axes(data))
    steps = jax.vmap(step, in_axes=(0, None, None))
    try:
        jax.eval_shape(steps, per_run.index, _KEY, first)
    except Exception:  # whatever a part raises that needs the number, to branch on it say
        return False
    return True


def divergence(result: Result, seeds: Sequence[int]) -> str | None:
    """Describes the first loss that is not finite, by round and seed; None if all are finite."""
    before = 0
    for evaluation in result.evaluations:
        try:
            check_losses(result.metrics.loss[:, before : evaluation.round], evaluation, seeds)
        except DivergedError as error:
            return str(error)
        before = evaluation.round
    return None


def _host_facts(algorithm: Algorithm, model: Model, data: ClientData) -> tuple[Any, ...]:
    """Returns the settings of an algorithm that the host reads during a run."""
    shapes = jax.eval_shape(model.init, _KEY)
    one = one_run(data, client_axes(data))
    sizes = algorithm.traffic(shapes, one), algorithm.setup_traffic(shapes, one)
    kinds = algorithm.personal is None, algorithm.parts.finish is None, algorithm.round_factor
    return algorithm.slots, algorithm.ends, *kinds, *sizes
