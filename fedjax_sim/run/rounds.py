"""The loop over the rounds of an experiment, from one evaluation to the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import FedState, Variables
from fedjax_sim.run.archive import CheckpointError
from fedjax_sim.run.checkpoints import Checkpoints
from fedjax_sim.run.checks import check_cohorts, check_finite, checked_seeds
from fedjax_sim.run.counting import count_programs
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.ledger import Ledger
from fedjax_sim.run.result import Evaluation, Result
from fedjax_sim.run.stages import Stage
from fedjax_sim.run.stop import Stop


def run_rounds(
    made: Callable[[], Experiment],
    rounds: int,
    seeds: Sequence[int] | NDArray[np.integer[Any]],
    *,
    initial: Variables | None = None,
    record: Callable[[FedState], Any] | None = None,
    on_compiled: Callable[[int], None] | None = None,
    on_evaluation: Callable[[Evaluation], None] | None = None,
    on_rounds: Callable[[int], None] | None = None,
    checkpoints: Checkpoints | str | Path | None = None,
    stop: Stop | None = None,
    diverging: bool = False,
) -> Result:
    """Runs all rounds; see :func:`fedjax_sim.simulate`.

    Args:
        made: gives the programs.
        rounds: local rounds.
        seeds: of the R runs.
        initial: as there, and so are the others.
        record: what to keep of the state.
        on_compiled: called before the first round.
        on_evaluation: called after each evaluation.
        on_rounds: called after each program.
        checkpoints: where the run is saved.
        stop: what ends it before the last round.
        diverging: whether runs go on whose loss is not finite.

    Raises:
        DivergedError: if a loss is not finite; says the round and the seed.
        CheckpointError: if ``stop`` would have ended the saved run before.
    """
    began = time.perf_counter()
    with count_programs() as counter:
        experiment = made()
        seeds = checked_seeds(seeds)
        ledger, clients = Ledger(experiment), experiment.programs.data.clients
        saver = None
        if checkpoints is not None:
            saver = experiment.saver(checkpoints, rounds, seeds, initial)
        saved = None if saver is None else saver.saved
        ledger.began = began - (0.0 if saved is None else saved.seconds)
        stages = experiment.stages(seeds, rounds, initial, record, on_compiled, saved)
        try:
            for done, stage in stages:
                before = done - stage.rounds
                check_cohorts(np.asarray(stage.metrics.client), before, clients)
                over, evaluation = False, None
                if stage.scored is not None:
                    evaluation = ledger.evaluation(done, stage)
                    over = stop is not None and done < rounds and ledger.stops(stop, evaluation)
                    if over:
                        stage = ended(experiment, stage)
                        if stage.collected is not None:
                            evaluation = ledger.ended(evaluation, stage)
                    if not diverging:
                        check_losses(stage.metrics.loss, evaluation, seeds)
                    ledger.evaluations.append(evaluation)
                if saver is not None:
                    saver.offer(done, stage, ledger.history)
                if on_evaluation is not None and evaluation is not None:
                    on_evaluation(evaluation)
                if on_rounds is not None:
                    on_rounds(done)
                if over:
                    break
        except BaseException as error:  # an interrupt too: what is known is not lost
            if ledger.evaluations:
                error.result = ledger.result(counter.programs)  # type: ignore[attr-defined]
                rounds_done = ledger.evaluations[-1].round
                error.add_note(f"the run up to round {rounds_done} is this exception's .result")
            raise
        finally:
            if saver is not None:
                saver.close()
    return ledger.result(counter.programs)


def check_losses(local: Any, evaluation: Evaluation, seeds: Sequence[int]) -> None:
    """Refuses losses that are not finite.

    Args:
        local: ``[R, rounds]``, those of the clients' training since the last evaluation.
        evaluation: after these rounds.
        seeds: of the runs.

    Raises:
        DivergedError: says the round and the seed.
    """
    last = evaluation.round
    check_finite(local, last - local.shape[1], seeds)
    check_finite(evaluation.test_loss[:, None], last - 1, seeds)
    if evaluation.personal is not None:
        check_finite(evaluation.personal.pooled.loss[:, None], last - 1, seeds)


def ended(experiment: Experiment, stage: Stage) -> Stage:
    """A stage as the last one: its models in flight are collected.

    Raises:
        CheckpointError: if the run was saved after this stage and went on.
    """
    if stage.run is None:
        raise CheckpointError("stop: the run was saved after more rounds than this rule allows")
    collected = experiment.finish(stage.run)
    if collected is None:
        return stage
    return stage._replace(collected=collected, variables=collected.variables)
