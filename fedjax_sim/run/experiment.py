"""An experiment: an algorithm with its data and scores, and the loop over its rounds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import ClientData, FedState, LossFn, Model, Task, Variables, with_loss
from fedjax_sim.data import EvalSet
from fedjax_sim.engine.cores import warn_of_unused_cores
from fedjax_sim.engine.execution import Execution
from fedjax_sim.round import Algorithm
from fedjax_sim.round.own_models import check_adapts
from fedjax_sim.run.cache import count_programs
from fedjax_sim.run.checkpoints import Checkpoints
from fedjax_sim.run.checks import (
    as_set,
    check_cohorts,
    check_kinds,
    check_labels,
    check_losses,
    check_model,
    check_parts,
    check_sets,
    check_targets,
    check_trained,
    checked_seeds,
    task_of,
    whole_number,
)
from fedjax_sim.run.evaluation import Evaluation
from fedjax_sim.run.functions import PerRunSettings
from fedjax_sim.run.ledger import Ledger
from fedjax_sim.run.programs import Programs
from fedjax_sim.run.provenance import Provenance
from fedjax_sim.run.result import Result
from fedjax_sim.run.runner import Runner
from fedjax_sim.run.stop import Stop, check_stop


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Experiment:
    """An algorithm with its data and scores; :func:`fedjax_sim.simulate` runs it.

    Attributes are the arguments of :func:`fedjax_sim.simulate`, and ``per_run``, the algorithm of
    each run, if runs differ in more than their seeds.
    """

    algorithm: Algorithm = dataclasses.field(kw_only=False)
    model: Model = dataclasses.field(kw_only=False)
    data: ClientData = dataclasses.field(kw_only=False)
    test: tuple[Any, Any] | EvalSet = dataclasses.field(kw_only=False)
    classes: int | None = None
    task: Task | None = None
    seeds: Sequence[int] | NDArray[np.integer[Any]] = (0,)
    eval_every: int = 1
    validation: tuple[Any, Any] | EvalSet | None = None
    auc: bool | None = None
    personal: bool = False
    loss: LossFn | None = None
    execution: Execution | None = None
    per_run: PerRunSettings | None = None

    def sets(self) -> dict[str, EvalSet]:
        """Returns the test set, and the validation set if there is one."""
        sets = {"test": as_set("test", self.test)}
        if self.validation is not None:
            sets["validation"] = as_set("validation", self.validation)
        return sets

    def runner(self) -> Runner:
        """Checks the settings and returns the runner of the programs; computes nothing."""
        algorithm, model, data = self.algorithm, self.model, self.data
        check_kinds(algorithm, model, data)
        every = whole_number("eval_every", self.eval_every)
        task = task_of(self.task, self.classes, self.auc)
        runs = len(checked_seeds(self.seeds))
        if self.loss is not None:
            task = with_loss(task, self.loss)
        sets = self.sets()
        check_targets(data, sets, task)
        check_parts(algorithm, task)
        check_labels(algorithm, data, task)
        check_model(model, data.x, data.y, task)
        check_trained(algorithm, model)
        check_sets(data, sets, runs, personal=self.personal, most=task.most)
        if sets["test"].adapt is not None and algorithm.personal is not None:
            check_adapts(algorithm.parts)
        programs = Programs(
            algorithm,
            model,
            task,
            data,
            tuple(sets.values()),
            runs,
            every,
            execution=self.execution,
            personal=self.personal,
            per_run=self.per_run,
        )
        return Runner(programs)

    def run(
        self,
        rounds: int,
        *,
        initial: Variables | None = None,
        record: Callable[[FedState], Any] | None = None,
        on_compiled: Callable[[int], None] | None = None,
        on_evaluation: Callable[[Evaluation], None] | None = None,
        on_rounds: Callable[[int], None] | None = None,
        checkpoints: Checkpoints | str | Path | None = None,
        stop: Stop | None = None,
        may_diverge: bool = False,
    ) -> Result:
        """Runs all rounds; arguments and exceptions as in :func:`fedjax_sim.simulate`.

        With ``may_diverge``, runs continue if a loss is not finite.
        """
        rounds, began = whole_number("rounds", rounds), time.perf_counter()
        with count_programs() as counter:
            runner, seeds = self.runner(), checked_seeds(self.seeds)
            programs = runner.programs
            if programs.execution.by_default:
                warn_of_unused_cores(programs.execution.devices)
            if stop is not None:
                check_stop(stop, programs.task, programs.scored)
            test, devices = self.sets()["test"], programs.execution.devices
            provenance = Provenance.of(self.algorithm, self.data, test, seeds, rounds, devices)
            saver = None
            if checkpoints is not None:
                saver = runner.saver(checkpoints, rounds, seeds, initial)
            saved = None if saver is None else saver.saved
            before = 0.0 if saved is None else saved.seconds
            ledger = Ledger(runner, provenance, began - before)
            intervals = runner.intervals(seeds, rounds, initial, record, on_compiled, saved)
            try:
                for done, interval in intervals:
                    clients = np.asarray(interval.metrics.client)
                    repeats = self.algorithm.parts.selection.repeats
                    check_cohorts(clients, done - interval.rounds, programs.data.clients, repeats)
                    over, evaluation = False, None
                    if interval.scored is not None:
                        evaluation = ledger.evaluate(done, interval)
                        over = stop is not None and done < rounds and ledger.stops(stop, evaluation)
                        if over:
                            interval = runner.collected(interval)
                            evaluation = ledger.evaluate_collected(evaluation, interval)
                        if not may_diverge:
                            check_losses(interval.metrics.loss, evaluation, seeds)
                        ledger.evaluations.append(evaluation)
                    if saver is not None:
                        saver.offer(done, interval, ledger.evaluations, ledger.metrics)
                    if on_evaluation is not None and evaluation is not None:
                        on_evaluation(evaluation)
                    if on_rounds is not None:
                        on_rounds(done)
                    if over:
                        break
            except BaseException as error:  # an interrupt too: keep what is known
                if ledger.evaluations:
                    error.result = ledger.result(counter.programs)  # type: ignore[attr-defined]
                    rounds_done = ledger.evaluations[-1].round
                    error.add_note(f"the run up to round {rounds_done} is this exception's .result")
                raise
            finally:
                if saver is not None:
                    saver.close()
        return ledger.result(counter.programs)
