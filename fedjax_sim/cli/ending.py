"""The settings of the end of a run, and of its target score."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from fedjax_sim import run
from fedjax_sim.base import Task
from fedjax_sim.cli.flags import naming
from fedjax_sim.cli.settings import Group, setting
from fedjax_sim.client.sending import finite_only
from fedjax_sim.engine.memory import MB
from fedjax_sim.round import Algorithm
from fedjax_sim.run.result import Set
from fedjax_sim.run.stop import Validation

Policy = Literal["stop", "skip-client"]


@dataclasses.dataclass(frozen=True)
class Ending(Group):
    """The conditions under which an algorithm ends before its last round."""

    title: ClassVar[str] = "end of a run; a method ends when all its seeds do"

    target: float | None = setting(
        None,
        "value of --score; the table reports after how many rounds and MB each seed reaches "
        "it; write shares as 0.9",
        shown="none",
    )
    stop_at_target: bool = setting(
        False,
        "end when the target is reached, measured on the validation set with --validation or "
        "--split clients, else on the test set",
    )
    patience: int | None = setting(
        None,
        "end after N evaluations without a better validation score; requires --validation or "
        "--split clients",
        shown="never",
        at_least=1,
    )
    budget_mb: float | None = setting(
        None, "end after X MB of traffic, up and down", shown="never", above=0
    )
    budget_seconds: float | None = setting(
        None, "end after X seconds of simulated time; requires --clock", shown="never", above=0
    )
    on_nan: Policy = setting(
        "stop",
        "what to do when a client's update contains NaN or inf: stop the algorithm, or skip "
        "the client for that round and count it",
    )

    def __post_init__(self) -> None:
        """Rejects ``--stop-at-target`` without a target."""
        if self.stop_at_target and self.target is None:
            raise ValueError("--stop-at-target is for --target")


def check_target(
    ending: Ending, task: Task, score: str, algorithms: Mapping[str, Algorithm], *, own: bool
) -> None:
    """Rejects a target that is not a value of the score, or whose score is not computed."""
    value = ending.target
    if value is None:
        return
    if not math.isfinite(value) or (task.metrics[score].percent and not 0 < value <= 1):
        share = f" above 0 and at most 1, as {score} is a share" if math.isfinite(value) else ""
        raise ValueError(f"--target must be a number{share}, got {value:g}")
    for name, algorithm in algorithms.items():
        if scored_set(algorithm) == "personal" and not own:
            raise ValueError(
                f"--target of {name} is for --split holdout, or --adapt 0.5 with --split clients: "
                "some leaves stay with the clients, so only their own models are scored"
            )


def ends_early(ending: Ending) -> bool:
    """Returns whether a rule may end a run before its last round."""
    budgets = ending.patience, ending.budget_mb, ending.budget_seconds
    return ending.stop_at_target or any(budget is not None for budget in budgets)


def scored_set(algorithm: Algorithm) -> Set:
    """Returns the set of a target: a server's copy of leaves that clients own is not trained."""
    return "test" if algorithm.parts.exchange.own is None else "personal"


def rule(
    ending: Ending, score: str, algorithm: Algorithm, *, validated: bool
) -> run.stop.Stop | None:
    """Returns the rule that ends a run early; None without one.

    ``validated`` is whether the clients' own models have validation scores.
    """
    rules = []
    own = scored_set(algorithm) == "personal"
    if ending.stop_at_target and ending.target is not None:
        personal: Set = "personal_validation" if validated else "personal"
        rules.append(run.stop.target(score, ending.target, on=personal if own else None))
    if ending.patience is not None:
        on: Validation = "personal_validation" if own and validated else "validation"
        rules.append(run.stop.patience(ending.patience, score, on=on))
    if ending.budget_mb is not None:
        rules.append(run.stop.budget(ending.budget_mb * MB))
    if ending.budget_seconds is not None:
        rules.append(run.stop.seconds(ending.budget_seconds))
    return run.stop.any_of(*rules) if rules else None


def screened(algorithm: Algorithm, ending: Ending) -> Algorithm:
    """Returns the algorithm, whose clients skip updates that are not finite if so requested."""
    if ending.on_nan == "stop":
        return algorithm
    with naming(f"--on-nan {ending.on_nan}"):
        return algorithm.replace(sending=(finite_only(), *algorithm.parts.sending))


def target_entries(
    ending: Ending, result: run.Result, score: str, algorithm: Algorithm
) -> dict[str, Any]:
    """Returns the entries of ``summary.json`` about the target, by run; null for "never"."""
    if ending.target is None:
        return {}
    found = result.reached(score, ending.target, part=scored_set(algorithm))
    entries = {
        "target": ending.target,
        "target_rounds_per_run": found.rounds,
        "target_bytes_per_run": found.bytes,
    }
    return entries if found.seconds is None else entries | {"target_seconds_per_run": found.seconds}
