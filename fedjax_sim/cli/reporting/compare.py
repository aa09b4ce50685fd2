"""Statistics of runs: scores over runs, paired differences, the worst tenth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from fedjax_sim.cli.reporting.problems import Problem
from fedjax_sim.cli.reporting.read import Floats, Key, Trial
from fedjax_sim.cli.reporting.statistics import Difference, paired
from fedjax_sim.tasks.sums import mean_known

Moment = Literal["final", "validated", "validation"]
NAMES = ("algorithm", "method", "plain")
"""Attributes of a trial by which a baseline may be named, the most exact one first."""


class Over(NamedTuple):
    """A number over runs.

    Attributes:
        values: ``f64[R]``, the number of each run; NaN if unknown.
        diverged: description of a divergence; then there is no mean.
    """

    values: Floats
    diverged: str = ""

    @property
    def mean(self) -> float:
        """The mean over the runs with a known number; NaN without any, or if one diverged."""
        return math.nan if self.diverged else float(mean_known(self.values))

    @property
    def std(self) -> float:
        """The population standard deviation."""
        return float(np.sqrt(mean_known((self.values - self.mean) ** 2)))


class Group(NamedTuple):
    """The trials of one problem, with their labels; the baseline is None if the group lacks it."""

    problem: Problem
    labels: tuple[str, ...]
    trials: tuple[Trial, ...]
    baseline: Trial | None

    def label(self, trial: Trial) -> str:
        """Returns the label of a trial."""
        return self.labels[self.trials.index(trial)]


def over_runs(trial: Trial, moment: Moment) -> Over | None:
    """Returns a method's score over its R runs; None without a validation set.

    The moment is after the last round ("final"), after each run's round that is best on the
    validation set ("validated"), or there on that set ("validation").
    """
    if trial.diverged:
        return Over(np.full(trial.runs, math.nan), _diverged(trial))
    if moment == "final":
        return Over(trial.scores[-1])
    if trial.validation is None:
        return None
    sign = -1 if trial.metric.best == "lowest" else 1
    # The first of equals, as the command has it.
    best = np.nan_to_num(sign * trial.validation, nan=-math.inf).argmax(axis=0)
    series = trial.scores if moment == "validated" else trial.validation
    return Over(np.take_along_axis(series, best[None], axis=0)[0])


def _diverged(trial: Trial) -> str:
    """Describes when a trial diverged.

    A method whose loss is not finite in one run ends in all of them.
    """
    rounds = sorted({*trial.diverged.values()})
    if rounds == [0]:
        return "diverged"
    later = f" to {rounds[-1]}" if len(rounds) > 1 else ""
    some = "diverged" not in trial.summary and len(trial.diverged) < trial.runs
    count = f" ({len(trial.diverged)} of {trial.runs} runs)" if some else ""
    return f"diverged at round {rounds[0]}{later}{count}"


def decisive(trials: Iterable[Trial]) -> Moment:
    """Returns the moment at which methods are compared: never the best on the test set."""
    scored = [trial for trial in trials if len(trial.rounds)]
    return "validated" if all(t.validation is not None for t in scored) else "final"


def worst_tenth(trial: Trial) -> Over | None:
    """Returns the mean over the worst tenth of the clients, rounded up."""
    if trial.diverged or not trial.by_client:
        return None
    found = []
    for values in trial.by_client:
        known = np.sort(values[~np.isnan(values)])
        if trial.metric.best == "lowest":
            known = known[::-1]
        found.append(known[: math.ceil(len(known) / 10)].mean() if len(known) else math.nan)
    return Over(np.array(found))


def difference(trial: Trial, baseline: Trial, moment: Moment) -> Difference:
    """Compares a method with the baseline by :func:`paired`."""
    ours, theirs = (_by_key(t, moment) for t in (trial, baseline))
    pairs = np.array([(ours[k], theirs[k]) for k in ours if k in theirs]).reshape(-1, 2)
    folds = {key.fold for key in ours} - {None}
    return paired(pairs[:, 0], pairs[:, 1], len(folds) or None)


def grouped(
    trials: Sequence[Trial], baseline: str | None, implied: str | None = None
) -> list[Group]:
    """Groups the trials by problem, in order, and gives each a unique label.

    The baseline is the name of a method or a trial; of several trials, the one that is best on the
    validation set. By default it is the study's, or the first of the group.

    Raises:
        ValueError: if no group has the baseline, or one has several and no validation set.
    """
    groups = []
    for problem in dict.fromkeys(trial.problem for trial in trials):
        of = tuple(trial for trial in trials if trial.problem == problem)
        plain = [t.label for t in of]
        labels = tuple(
            f"{label} [{t.run}]" if plain.count(label) > 1 else label
            for t, label in zip(of, plain, strict=True)
        )
        # An exact name first: that of a method may be the name of several trials.
        wanted = implied if baseline is None else baseline
        namings = (labels, plain, *([getattr(t, name) for t in of] for name in NAMES))
        matches = ([i for i, name in enumerate(names) if name == wanted] for names in namings)
        named = next(filter(None, matches), [0] if baseline is None else [])
        if len(named) > 1:
            best = best_of([of[i] for i in named]) if decisive(of) == "validated" else None
            if best is None and baseline is None:
                best = of[named[0]]
            if best is None:
                several = ", ".join(repr(labels[i]) for i in named)
                raise ValueError(f"--baseline {baseline} is several here: name one of {several}")
            named = [of.index(best)]
        groups.append(Group(problem, labels, of, of[named[0]] if named else None))
    if all(group.baseline is None for group in groups):
        known = ", ".join(dict.fromkeys(label for group in groups for label in group.labels))
        raise ValueError(f"--baseline must be one of {known}, got {baseline!r}")
    return groups


def best_settings(group: Group) -> Group | None:
    """Returns each method's best trial on the validation set; None if no method has several.

    If every trial of a method diverged, it is the first one. The baseline is the trial of the
    baseline's method.
    """
    methods = by_series(group.trials)
    if decisive(group.trials) != "validated" or all(len(of) == 1 for of in methods.values()):
        return None
    best = {of: best_of(trials) for of, trials in methods.items()}
    if not any(best.values()):
        return None
    found = {of: best[of] or trials[0] for of, trials in methods.items()}
    baseline = None if group.baseline is None else found.get(group.baseline.series)
    chosen = tuple(found.values())
    return Group(group.problem, tuple(map(group.label, chosen)), chosen, baseline)


def by_series(trials: Iterable[Trial]) -> dict[str, list[Trial]]:
    """Returns the trials by method; the clients' own models count as another method."""
    methods: dict[str, list[Trial]] = {}
    for trial in trials:
        methods.setdefault(trial.series, []).append(trial)
    return methods


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """Returns the trial that is best on the validation set, the first in case of ties."""
    overs = {trial: over_runs(trial, "validation") for trial in trials}
    means = {t: o.mean for t, o in overs.items() if o is not None and not math.isnan(o.mean)}
    best = min if trials[0].metric.best == "lowest" else max
    return best(means, key=means.__getitem__) if means else None


def differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names of the settings that differ.

    >>> differing([{"lr": 0.1, "epochs": 2, "mu": 1}, {"lr": 0.2, "epochs": 2}])
    ['lr', 'mu']
    """
    names = dict.fromkeys(name for one in settings for name in one)
    return [name for name in names if len({repr(one.get(name)) for one in settings}) > 1]


def _by_key(trial: Trial, moment: Moment) -> dict[Key, float]:
    over = over_runs(trial, moment)
    return {} if over is None else dict(zip(trial.keys, over.values.tolist(), strict=False))
