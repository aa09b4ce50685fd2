"""What a run adds up: bytes, steps, visits, and what each round reported."""

from __future__ import annotations

import functools
import time
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import ClientData, Fragment, Metrics, Model, Traffic
from fedjax_sim.round import Algorithm
from fedjax_sim.run.axes import client_axes, one_run
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.history import Evaluations, History, Joined
from fedjax_sim.run.metrics import set_scores
from fedjax_sim.run.result import Evaluation, Result
from fedjax_sim.run.stages import Scored, Stage
from fedjax_sim.run.stop import Stop


def setup_bytes(
    algorithm: Algorithm, model: Model, data: ClientData, runs: int
) -> NDArray[np.int64]:
    """Bytes up and down before the first round, ``[2, R]``."""
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    axes = client_axes(data)
    each = [algorithm.setup_traffic(variables, one_run(data, axes, r)) for r in range(runs)]
    return np.array(each, np.int64).T


def sent_bytes(traffic: Traffic, rows: Metrics, done: int) -> NDArray[np.int64]:
    """Bytes up and down in the rounds ``rows [R, rounds]`` before round ``done``: ``[2, R]``."""
    names = ("uploads", "downloads", "fragments", "visits")
    uploads, downloads, parts, visits = (getattr(rows, n).astype(np.int64) for n in names)
    # By round: whole models, or the fragments whose turn it is, and was before.
    pieces = traffic.fragments or (Fragment(traffic.upload, 0),)
    turn = np.arange(done - uploads.shape[1], done)
    piece_up, piece_down = np.array(pieces, np.int64).T
    heard = visits if rows.time is None else visits - rows.time.silent
    up = uploads * piece_up[turn % len(pieces)] + heard * traffic.message
    if rows.answers is not None:
        up += rows.answers.astype(np.int64) * traffic.answer
    down = downloads * traffic.download + parts * piece_down[(turn - 1) % len(pieces)]
    return np.array([up.sum(axis=1), (down + visits * traffic.shared_state).sum(axis=1)])


class Totals(NamedTuple):
    """Sums over the rounds so far, ``int64[R]``; the names are those of :class:`Metrics`."""

    samples: NDArray[np.int64]
    steps: NDArray[np.int64]
    executed: NDArray[np.int64]
    uploads: NDArray[np.int64]
    downloads: NDArray[np.int64]
    visits: NDArray[np.int64]
    skipped: NDArray[np.int64]

    def plus(self, rows: Metrics) -> Totals:
        """With the rounds ``rows [R, rounds]``."""
        new = (getattr(rows, name).astype(np.int64).sum(axis=1) for name in self._fields)
        return Totals(*(a + b for a, b in zip(self, new, strict=True)))


class Ledger:
    """Adds up what a run does, stage by stage.

    Args:
        experiment: that runs.

    Attributes:
        history: what it has recorded.
        evaluations: of ``history``.
        began: when it did (``time.perf_counter``), of a run that was resumed as if without a break.
    """

    def __init__(self, experiment: Experiment) -> None:
        of = experiment.programs
        setup = setup_bytes(of.algorithm, of.model, of.data, of.runs)
        self.history = History(Evaluations(), Joined(axis=1))
        self.evaluations, self._metrics = self.history
        self.began = time.perf_counter()
        self.totals = Totals(*np.zeros((len(Totals._fields), setup.shape[1]), np.int64))
        self._experiment, self._task, self._bytes = experiment, of.task, setup.copy()
        self._finishing = 0 if of.algorithm.parts.finish is None else of.data.clients
        self._seconds = np.zeros(setup.shape[1])

    def result(self, xla_programs: int) -> Result:
        """What is known of the run."""
        compiling = self._experiment.compile_seconds
        # A run that is interrupted within a program has given its arrays away.
        run = self._last.run
        gone = run is None or any(a.is_deleted() for a in jax.tree.leaves(run))
        return Result(
            task=self._task,
            evaluations=self.evaluations,
            metrics=self._metrics.tree(),
            variables=None if gone else self._last.variables,
            state=None if run is None or gone else self._experiment.told(run).state,
            samples=int(self.totals.samples.sum()),
            steps=int(self.totals.steps.sum()),
            executed=int(self.totals.executed.sum()),
            model_bytes=self._experiment.model_bytes,
            device_bytes=self._experiment.device_bytes,
            compile_seconds=compiling,
            run_seconds=time.perf_counter() - self.began - compiling,
            xla_programs=xla_programs,
        )

    def evaluation(self, done: int, stage: Stage) -> Evaluation:
        """What is known after ``done`` rounds, of which the stage ran the last."""
        self._last = stage
        self._metrics.add(stage.metrics)
        self.totals = self.totals.plus(stage.metrics)
        self._bytes += sent_bytes(self._experiment.traffic, stage.metrics, done)
        if stage.metrics.time is not None:
            self._seconds += stage.metrics.time.seconds.sum(axis=1, dtype=np.float64)
        assert stage.scored is not None
        evaluation = self._evaluation(done, stage.scored, stage)
        return evaluation if stage.collected is None else self.ended(evaluation, stage)

    def stops(self, stop: Stop, evaluation: Evaluation) -> bool:
        """Whether all runs are done with this evaluation."""
        self.evaluations.append(evaluation)
        try:
            return bool(np.all(stop.done(self.evaluations, self._task)))
        finally:
            self.evaluations.pop()

    def ended(self, before: Evaluation, stage: Stage) -> Evaluation:
        """What is known of a stage once its models in flight were ``collected``."""
        assert stage.collected is not None
        self._last = stage
        last = np.asarray(stage.collected.uploads, np.int64)
        self.totals = self.totals._replace(uploads=self.totals.uploads + last)
        traffic, clients = self._experiment.traffic, self._finishing
        self.totals = self.totals._replace(downloads=self.totals.downloads + clients)
        self._bytes[0] += last * traffic.upload + clients * traffic.finish
        self._bytes[1] += clients * traffic.download
        after = self._evaluation(before.round, stage.collected.counts, stage)
        uncollected = before.test.pooled[self._task.score]
        return after._replace(uncollected=uncollected, before=before)

    def _evaluation(self, done: int, counted: Scored, stage: Stage) -> Evaluation:
        rows = stage.metrics
        counts, personal = jax.tree.map(np.asarray, counted)
        scored = functools.partial(set_scores, self._task)
        test, *validation = map(scored, counts)
        totals, (up, down) = self.totals, self._bytes.copy()
        return Evaluation(
            round=done,
            sums=counts[0].pooled,
            test=test,
            validation=validation[0] if validation else None,
            personal=None if personal is None else scored(personal),
            train_loss=np.asarray(rows.loss[:, -1], np.float64),
            uploads=totals.uploads,
            downloads=totals.downloads,
            samples=totals.samples,
            bytes_up=up,
            bytes_down=down,
            skipped=totals.skipped,
            seconds=None if rows.time is None else self._seconds.copy(),
            wall_seconds=time.perf_counter() - self.began if stage.wall is None else stage.wall,
            recorded=stage.recorded,
            diagnostics={n: np.asarray(a[:, -1], np.float64) for n, a in rows.diagnostics.items()},
        )
