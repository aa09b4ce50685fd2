"""Rules that end a run at an evaluation before its last round.

The runs (seeds, folds) of a simulation are one program, which continues until all are done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Task
from fedjax_sim.run.checks import whole_number
from fedjax_sim.run.evaluation import Evaluation, total_bytes
from fedjax_sim.run.records import column
from fedjax_sim.run.result import Set, lower_is_better, reaches

__all__ = ["Stop", "any_of", "budget", "patience", "seconds", "target"]

Validation = Literal["validation", "personal_validation"]
"""The models that are scored on the validation set: the server's, or the clients' personal ones."""


class Stop(NamedTuple):
    """A rule that ends a run; write your own with a ``done`` function.

    Attributes:
        done: maps all evaluations so far and the task to ``bool[R]``, which runs are done; a run
            that is done must stay done.
        check: called before the first round with the task and the names of the sets and models that
            are scored, see ``on`` of :func:`target`; rejects a simulation in which the rule could
            never apply.
    """

    done: Callable[[Sequence[Evaluation], Task], NDArray[np.bool_]]
    check: Callable[[Task, Collection[str]], None] = lambda task, sets: None


def target(score: str, value: float, *, on: Set | None = None) -> Stop:
    """Stops when a score reaches a value.

    Args:
        score: a score of the task, or "loss".
        value: value to reach: from below, or from above if the lowest is the best. For a set of
            several clients, the score is their unweighted mean.
        on: set or models that are scored: "validation", "test", or the clients' personal models
            on these sets: "personal_validation", "personal". None: the validation set; without one
            the test set, which then decides the length of the run.

    Returns:
        A rule for ``simulate(stop=...)``.

    Raises:
        ValueError: if the value is not finite; in ``simulate``, if it is not scored.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> toy = fs.toy()
        >>> algorithm = fs.fedavg(fs.local_sgd(toy.objective, optax.sgd(0.1)), clients_per_round=5)
        >>> result = fs.simulate(algorithm, toy.model, toy.data, toy.test, rounds=30, classes=10,
        ...                      stop=target("accuracy", 0.5))
        >>> result.evaluations[-1].round < 30, bool(result.accuracy[-1, 0] >= 0.5)
        (True, True)
    """
    if not np.isfinite(value):
        raise ValueError(f"value must be finite, got {value}")

    def done(evaluations: Sequence[Evaluation], task: Task) -> NDArray[np.bool_]:
        part = on or ("test" if evaluations[0].validation is None else "validation")
        found = column(evaluations, lambda e: reaches(e, task, score, value, part))
        return np.any(found, axis=0)

    def check(task: Task, sets: Collection[str]) -> None:
        _check_score(score, task)
        if on is not None:
            _check_set(on, sets)

    return Stop(done, check)


def patience(
    evaluations: int,
    score: str | None = None,
    *,
    on: Validation = "validation",
    window: int = 1,
    threshold: float = 0.0,
) -> Stop:
    """Stops when the best score on the validation set has not improved for some evaluations.

    Args:
        evaluations: number of consecutive evaluations without improvement.
        score: a score of the task, or "loss"; None: the task's leading score.
        on: the model that is scored: the server's, or the clients' personal models.
        window: evaluations over which the best score must improve.
        threshold: the largest relative improvement that does not count. RADFed's authors use 0.001,
          a window of 100 epochs, and stop after 100 epochs.

    Returns:
        A rule for ``simulate(stop=...)``.

    Raises:
        ValueError: if evaluations or window is not a whole number at least 1, or threshold is
            negative; in ``simulate``, without these scores.

    Source: Xue et al. 2021 <https://github.com/yxsub/RADFed>, the authors' code, for window and
    threshold.

    Example:
        >>> from fedjax_sim import tasks
        >>> patience(5).check(tasks.classification(3), {"test"})
        Traceback (most recent call last):
        ValueError: stop: patience needs simulate(validation=...): by the test set it would be tuned
    """
    whole_number("evaluations", evaluations)
    whole_number("window", window)
    if not threshold >= 0:
        raise ValueError(f"threshold must be at least 0, got {threshold}")

    def done(so_far: Sequence[Evaluation], task: Task) -> NDArray[np.bool_]:
        name = score or task.score
        sign = -1 if lower_is_better(task, name) else 1
        values = sign * column(so_far, lambda e: getattr(e, on).reported[name])
        best = np.fmax.accumulate(np.concatenate([np.full_like(values[:1], -np.inf), values]))[1:]
        needed = np.full_like(best, -np.inf)
        needed[window:] = best[:-window]
        known = np.isfinite(needed)
        needed[known] += threshold * np.abs(needed[known])
        place = np.arange(len(best))[:, None]
        since = place - np.maximum.accumulate(np.where(best > needed, place, -1))
        return np.any(since >= evaluations, axis=0)

    def check(task: Task, sets: Collection[str]) -> None:
        _check_score(score or task.score, task)
        if "validation" not in sets:
            raise ValueError(
                "stop: patience needs simulate(validation=...): by the test set it would be tuned"
            )
        _check_set(on, [name for name in sets if "validation" in name])

    return Stop(done, check)


def budget(bytes: float) -> Stop:
    """Stops when a number of bytes has been sent, up and down together.

    Args:
        bytes: bytes of one run. It ends at the first evaluation after they have been sent; models
          in flight are still collected.

    Returns:
        A rule for ``simulate(stop=...)``.

    Raises:
        ValueError: if bytes is not positive.

    Example:
        >>> budget(0)
        Traceback (most recent call last):
        ValueError: bytes must be positive, got 0
    """
    if not bytes > 0:
        raise ValueError(f"bytes must be positive, got {bytes}")
    return Stop(lambda evaluations, task: total_bytes(evaluations[-1]) >= bytes)


def seconds(limit: float) -> Stop:
    """Stops when a simulated time has passed.

    Args:
        limit: limit in seconds. A run ends at the first evaluation at or after it.

    Returns:
        A rule for ``simulate(stop=...)``.

    Raises:
        ValueError: if limit is not positive; in ``simulate``, at the first evaluation, if the
            algorithm has no clock.

    Example:
        >>> seconds(0)
        Traceback (most recent call last):
        ValueError: limit must be positive, got 0
    """
    if not limit > 0:
        raise ValueError(f"limit must be positive, got {limit}")

    def done(evaluations: Sequence[Evaluation], task: Task) -> NDArray[np.bool_]:
        now = evaluations[-1].seconds
        if now is None:
            raise ValueError("stop: seconds needs an algorithm with a clock, see fs.clock")
        return now >= limit

    return Stop(done)


def any_of(*rules: Stop) -> Stop:
    """Stops each run when any of the rules applies to it.

    Args:
        rules: at least one rule.

    Returns:
        A rule for ``simulate(stop=...)``.

    Raises:
        ValueError: if there are no rules, or an argument is not a rule.

    Example:
        >>> rule = any_of(target("accuracy", 0.9), budget(1e6))
    """
    if not rules:
        raise ValueError("any_of needs at least one rule")
    for rule in rules:
        _check_rule(rule)

    def done(evaluations: Sequence[Evaluation], task: Task) -> NDArray[np.bool_]:
        return np.any([rule.done(evaluations, task) for rule in rules], axis=0)

    def check(task: Task, sets: Collection[str]) -> None:
        for rule in rules:
            rule.check(task, sets)

    return Stop(done, check)


def check_stop(stop: Stop, task: Task, sets: Collection[str]) -> None:
    """Rejects anything that is not a rule, and a rule that could never apply."""
    _check_rule(stop)
    stop.check(task, sets)


def _check_rule(rule: Any) -> None:
    if not isinstance(rule, Stop):
        raise ValueError(f"stop must be a rule, such as fs.stop.budget(1e9), got {rule!r}")


def _check_score(score: str, task: Task) -> None:
    if score not in (known := (*task.metrics, "loss")):
        raise ValueError(f"stop: score must be one of {', '.join(known)}, got {score!r}")


def _check_set(on: str, sets: Collection[str]) -> None:
    if on not in sets:
        raise ValueError(f"stop: on must be one of {', '.join(sets)}, which are scored, got {on!r}")
