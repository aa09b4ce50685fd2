"""Runs an algorithm: a few XLA programs for the whole experiment, all seeds at once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import ClientData, LossFn, Metrics, Model
from fedjax_sim.client.losses import cross_entropy
from fedjax_sim.data import EvalSet
from fedjax_sim.engine.execution import Execution, make_execution
from fedjax_sim.round import Algorithm
from fedjax_sim.run.checks import as_set, check_finite, check_model, check_sets, checked_seeds
from fedjax_sim.run.experiment import Experiment, Scored, Stage
from fedjax_sim.run.metrics import set_scores
from fedjax_sim.run.result import Evaluation, Result


def simulate(
    algorithm: Algorithm,
    model: Model,
    data: ClientData,
    test: tuple[Any, Any] | EvalSet,
    *,
    rounds: int,
    classes: int,
    seeds: Sequence[int] | NDArray[np.integer[Any]] = (0,),
    eval_every: int = 1,
    validation: tuple[Any, Any] | EvalSet | None = None,
    auc: bool | None = None,
    personal: bool = False,
    loss: LossFn = cross_entropy,
    execution: Execution | None = None,
    on_evaluation: Callable[[Evaluation], None] | None = None,
) -> Result:
    """Runs ``rounds`` rounds for every seed, and evaluates the models on the way.

    Rounds between two evaluations are one XLA program, and runs are one more leading axis of it.

    Args:
        algorithm: e.g. :func:`fedjax_sim.fedavg`.
        model: the model that its local update trains.
        data: the clients; ``start`` may be ``[R, N + 1]``, a partition for each run.
        test: (x, y), or samples by client: :func:`fedjax_sim.data.eval_set`, one list for all runs
          or one for each.
        rounds: local rounds.
        classes: M.
        seeds: one of the R runs for each; they decide initial weights, cohorts, shuffles and
          dropout. Runs that differ in their clients (folds) may share a seed.
        eval_every: rounds between evaluations; the last round is always evaluated.
        validation: like ``test``, scored at the same rounds: :meth:`Result.validated` then needs no
          weights kept.
        auc: whether to compute the area under the ROC curve, which sorts the sets; None: of two
          classes, for which it takes one sort and not M.
        personal: whether client k of the test set is client k of ``data``: an algorithm with
          personal models is then scored by these too.
        loss: for the loss on the sets.
        execution: devices; the one that the algorithm was composed with (None: the default).
        on_evaluation: called as soon as each evaluation is known.

    Returns:
        The run.

    Raises:
        ValueError: if a setting is out of range, or the model does not fit the data.
        DivergedError: if a loss is not finite; says the round and the seed.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> digits = fs.load_dataset("digits")
        >>> model = fs.models.logistic((8, 8, 1), 10)
        >>> model = fs.models.with_scaling(model, digits.mean, digits.std)
        >>> data = fs.client_data(digits.train_x, digits.train_y,
        ...                       fs.partition.iid(digits.train_y, 10, seed=0))
        >>> local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), epochs=3)
        >>> result = fs.simulate(fs.fedavg(local, clients_per_round=5), model, data,
        ...                      (digits.test_x, digits.test_y), rounds=3, classes=10)
        >>> bool(result.accuracy[-1, 0] > 0.8)
        True
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if eval_every < 1:
        raise ValueError(f"eval_every must be at least 1, got {eval_every}")
    seeds = checked_seeds(seeds)
    check_model(model, data.x, classes)
    given = {"test": test} if validation is None else {"test": test, "validation": validation}
    sets = {name: as_set(name, s) for name, s in given.items()}
    ranked = classes == 2 if auc is None else auc
    check_sets(data, sets, len(seeds), ranked=ranked, personal=personal)
    began = time.perf_counter()
    with _count_programs() as counter:
        programs = Experiment(
            algorithm,
            model,
            loss,
            execution or make_execution(),
            data,
            tuple(sets.values()),
            len(seeds),
            eval_every,
            ranked=ranked,
            personal=personal,
        )
        ledger = _Ledger(programs, setup_bytes(algorithm, model, data, len(seeds)))
        evaluations: list[Evaluation] = []
        for done, stage in programs.stages(seeds, rounds):
            check_finite(stage.metrics.loss, done - stage.rounds, seeds)
            evaluation = ledger.evaluation(done, stage)
            check_finite(evaluation.test_loss[:, None], done - 1, seeds)
            if evaluation.personal is not None:
                check_finite(evaluation.personal.pooled.loss[:, None], done - 1, seeds)
            evaluations.append(evaluation)
            if on_evaluation is not None:
                on_evaluation(evaluation)
    totals = ledger.totals
    return Result(
        evaluations=evaluations,
        variables=stage.variables,
        samples=int(totals.samples.sum()),
        steps=int(totals.steps.sum()),
        executed=int(totals.executed.sum()),
        model_bytes=programs.model_bytes,
        compile_seconds=programs.compile_seconds,
        run_seconds=time.perf_counter() - began - programs.compile_seconds,
        xla_programs=counter.programs,
    )


def setup_bytes(
    algorithm: Algorithm, model: Model, data: ClientData, runs: int
) -> NDArray[np.int64]:
    """Bytes up and down before the first round, ``[2, R]``."""
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    starts = np.broadcast_to(np.asarray(data.start), (runs, data.start.shape[-1]))
    each = [algorithm.setup_traffic(variables, dataclasses.replace(data, start=s)) for s in starts]
    return np.array(each, np.int64).T


class _Totals(NamedTuple):
    """Sums over the rounds so far, ``int64[R]``; the names are those of :class:`Metrics`."""

    samples: NDArray[np.int64]
    steps: NDArray[np.int64]
    executed: NDArray[np.int64]
    uploads: NDArray[np.int64]
    downloads: NDArray[np.int64]
    visits: NDArray[np.int64]

    def plus(self, rows: Metrics) -> _Totals:
        """With the rounds ``rows [R, rounds]``."""
        new = (getattr(rows, name).astype(np.int64).sum(axis=1) for name in self._fields)
        return _Totals(*(a + b for a, b in zip(self, new, strict=True)))


class _Ledger:
    """Adds up what a run does, stage by stage."""

    def __init__(self, programs: Experiment, setup: NDArray[np.int64]) -> None:
        self.totals = _Totals(*np.zeros((len(_Totals._fields), setup.shape[1]), np.int64))
        self._programs, self._setup = programs, setup

    def evaluation(self, done: int, stage: Stage) -> Evaluation:
        """What is known after ``done`` rounds, of which the stage ran the last."""
        self.totals = self.totals.plus(stage.metrics)
        if stage.collected is None:
            return self._evaluation(done, stage.scored, stage.metrics)
        before = set_scores(stage.scored.sets[0])
        uploads = self.totals.uploads + np.asarray(stage.collected.uploads)
        self.totals = self.totals._replace(uploads=uploads)
        after = self._evaluation(done, stage.collected.counts, stage.metrics)
        return after._replace(uncollected=before.pooled.accuracy)

    def _evaluation(self, done: int, scored: Scored, rows: Metrics) -> Evaluation:
        counts, personal = jax.tree.map(np.asarray, scored)
        test, *validation = map(set_scores, counts)
        totals, traffic, (up, down) = self.totals, self._programs.traffic, self._setup
        return Evaluation(
            round=done,
            correct=counts[0].pooled.correct,
            total=counts[0].pooled.total,
            test=test,
            validation=validation[0] if validation else None,
            personal=None if personal is None else set_scores(personal),
            train_loss=np.asarray(rows.loss[:, -1], np.float64),
            uploads=totals.uploads,
            downloads=totals.downloads,
            bytes_up=up + totals.uploads * traffic.upload + totals.visits * traffic.message,
            bytes_down=down
            + totals.downloads * traffic.download
            + totals.visits * traffic.shared_state,
            diagnostics={n: np.asarray(a[:, -1], np.float64) for n, a in rows.diagnostics.items()},
        )


class _Counter:
    programs = 0


@contextmanager
def _count_programs() -> Iterator[_Counter]:
    """Counts the programs that XLA is asked for, those that our own code did not mean included."""
    counter = _Counter()

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        counter.programs += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counter
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
