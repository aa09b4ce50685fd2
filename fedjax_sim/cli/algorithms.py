"""Makes the algorithms of a command from its settings."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.base import (
    Clock,
    LocalUpdate,
    MissingRootError,
    Model,
    Objective,
    Task,
    Transform,
)
from fedjax_sim.base.registry import error_text
from fedjax_sim.base.signatures import keywords
from fedjax_sim.cli import adapting, attacking, ending, parts, timing
from fedjax_sim.cli.config import Config
from fedjax_sim.cli.flags import flagged, naming
from fedjax_sim.cli.machine import ON_HOST
from fedjax_sim.cli.making import Common, make
from fedjax_sim.cli.methods import name_of
from fedjax_sim.cli.problem import Problem
from fedjax_sim.cli.training import Training, check_steps, make_local, rounds_of, scheduled
from fedjax_sim.cli.written import parse_label
from fedjax_sim.client.objective import empirical_risk
from fedjax_sim.engine.execution import Execution
from fedjax_sim.round import Algorithm
from fedjax_sim.run.candidates import Candidates, group_candidates
from fedjax_sim.run.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class Methods:
    """Makes algorithms of the same data and model, each with its own settings."""

    config: Config
    model: Model
    task: Task
    problem: Problem
    transforms: tuple[Transform, ...]
    clients_per_round: int
    execution: Execution

    @functools.cached_property
    def objective(self) -> Objective:
        """The empirical risk of the model on the task."""
        return empirical_risk(self.model, self.task.loss, self.config.training.l2)

    @functools.cached_property
    def clock(self) -> Clock | None:
        """The clock of ``--clock``; None without one."""
        return timing.make_clock(self.config.timing)

    @functools.cached_property
    def common_local(self) -> LocalUpdate:
        """The local update of all methods without training settings of their own."""
        return self.local(self.config.training)

    def local(self, training: Training, *, check: bool = True) -> LocalUpdate:
        """Returns the local update of training settings."""
        made = make_local(training, self.objective, self.transforms)
        made = adapting.local_of(made, self.config.weights)
        if check:
            check_steps(training, made, self.problem.data)
        return made

    def algorithm(self, name: str, config: Config, *, check: bool = True) -> Algorithm:
        """Makes an algorithm; ``check`` also checks that it fits the data."""
        training, local = self.config.training, self.common_local
        if config.trained[name]:
            training = config.training_of(name)
            with naming(name):
                local = self.local(training, check=check)

        def made_of(local: LocalUpdate) -> Algorithm:
            common = Common(
                local, self.model, self.objective, self.task.classes, self.clients_per_round,
                training.lr, training.momentum or 0.0, self.clock, self.execution,
            )  # fmt: skip
            return self._make(name, config, common, check=check)

        return scheduled(training, local, config.experiment.rounds, made_of)

    def varied(self, name: str, **own: Any) -> Algorithm:
        """Makes an algorithm with other values of its own options."""
        return self.algorithm(name, self.config.with_own(name, own), check=False)

    def experiment(self, algorithm: Algorithm) -> Experiment:
        """Returns the experiment of an algorithm."""
        problem, settings = self.problem, self.config.experiment
        return Experiment(
            algorithm,
            self.model,
            problem.data,
            problem.test,
            task=self.task,
            seeds=[run["seed"] for run in problem.runs],
            eval_every=min(settings.eval_every, rounds_of(algorithm, settings.rounds)),
            validation=problem.validation,
            personal=problem.own,
            execution=self.execution,
        )

    def candidates(self, names: Sequence[str], algorithms: Mapping[str, Algorithm]) -> Candidates:
        """Returns the algorithms of one method with their settings."""
        return Candidates(
            functools.partial(self.varied, names[0]),
            [self.config.own(name) for name in names],
            [algorithms[name] for name in names],
        )

    def programs(self, algorithms: Mapping[str, Algorithm]) -> list[list[str]]:
        """Returns the names grouped by program, in the order of their first members.

        With a stopping rule, which would end all runs of a program, each has its own program.
        """
        alike: dict[Any, list[str]] = {}
        for name in algorithms:
            own = name if ending.ends_early(self.config.ending) else ""
            alike.setdefault((name_of(name), tuple(self.config.own(name)), own), []).append(name)
        found: list[list[str]] = []
        for names in alike.values():
            several = self.candidates(names, algorithms)
            grouped = (
                group_candidates(several, self.model, self.problem.data)
                if len(names) > 1
                else [[0]]
            )
            found += [[names[i] for i in group] for group in grouped]
        order = [*algorithms]
        return sorted(found, key=lambda group: order.index(group[0]))

    def _make(self, name: str, config: Config, common: Common, *, check: bool) -> Algorithm:
        plain = name_of(name)
        method, foreign = ALGORITHMS.resolve(plain)[1], ALGORITHMS.is_foreign(plain)
        own, given = keywords(method), config.options[name]
        try:
            clock = {"clock": common.clock} if "clock" in own else {}
            made = make(method, common, **given, **clock)
            made = parts.replaced(made, config.parts.texts | parse_label(name).parts, common)
            made = adapting.exchanged(made, config.weights)
            made = attacking.attacked(made, config.attack, self.problem.data.clients)
            made = ending.screened(made, config.ending)
            if "clock" not in own:
                made = timing.timed(made, config.timing)
            if check:
                self.experiment(made).runner().programs.check()
        except MissingRootError as error:
            raise ValueError(
                f"{name}: --server-fraction must be given: it needs samples of the server's own"
            ) from error
        except ValueError as error:
            raise ValueError(f"{name}: {flagged(error, [*own, *ON_HOST])}") from error
        except Exception as error:  # a user's function may raise anything
            if not foreign:
                raise
            raise ValueError(f"{name}: {error_text(error)}") from error
        return made
