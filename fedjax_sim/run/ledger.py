"""Running totals of a run: bytes, steps, visits and the metrics of its rounds."""

from __future__ import annotations

import time
from typing import NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import ClientData, Fragment, Metrics, Model, Traffic
from fedjax_sim.round import Algorithm
from fedjax_sim.run.evaluation import Evaluation
from fedjax_sim.run.layout import client_axes, one_run, readable
from fedjax_sim.run.metrics import set_scores
from fedjax_sim.run.provenance import Provenance
from fedjax_sim.run.records import Evaluations, Interval, SetCounts, TreeBuffer, work_of
from fedjax_sim.run.result import Result
from fedjax_sim.run.runner import Runner
from fedjax_sim.run.stop import Stop


def setup_bytes(
    algorithm: Algorithm, model: Model, data: ClientData, runs: int
) -> NDArray[np.int64]:
    """Returns the bytes up and down before the first round, ``[2, R]``."""
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    axes = client_axes(data)
    each = [algorithm.setup_traffic(variables, one_run(data, axes, r)) for r in range(runs)]
    return np.array(each, np.int64).T


def sent_bytes(traffic: Traffic, rows: Metrics, done: int) -> NDArray[np.int64]:
    """Returns the bytes up and down, ``[2, R]``, of ``rows [R, rounds]`` that end at ``done``."""
    names = ("uploads", "downloads", "fragments", "visits")
    uploads, downloads, parts, visits = (getattr(rows, n).astype(np.int64) for n in names)
    # Each round sends whole models, or one fragment; the last round's fragment comes down.
    pieces = traffic.fragments or (Fragment(traffic.upload, 0),)
    turn = np.arange(done - uploads.shape[1], done)
    piece_up, piece_down = np.array(pieces, np.int64).T
    reporting = visits if rows.time is None else visits - rows.time.silent
    up, down = uploads * piece_up[turn % len(pieces)], downloads * traffic.download
    if rows.bytes is not None:
        up = rows.bytes.up.sum(axis=2, dtype=np.int64)
        if rows.bytes.down is not None:
            down = rows.bytes.down.sum(axis=2, dtype=np.int64)
    up = up + reporting * traffic.message
    if rows.answers is not None:
        up += rows.answers.astype(np.int64) * traffic.answer
    down = down + parts * piece_down[(turn - 1) % len(pieces)]
    return np.array([up.sum(axis=1), (down + visits * traffic.shared_state).sum(axis=1)])


class Totals(NamedTuple):
    """Sums over the rounds so far, ``int64[R]``, by the names of :class:`Metrics`."""

    samples: NDArray[np.int64]
    uploads: NDArray[np.int64]
    downloads: NDArray[np.int64]
    visits: NDArray[np.int64]
    skipped: NDArray[np.int64]

    def plus(self, rows: Metrics) -> Totals:
        """Adds the rounds ``rows [R, rounds]``."""
        new = (getattr(rows, name).astype(np.int64).sum(axis=1) for name in self._fields)
        return Totals(*(a + b for a, b in zip(self, new, strict=True)))


class Ledger:
    """Adds up a run, interval by interval.

    ``began`` is ``time.perf_counter`` at the start; for a resumed run, as if it had not paused.

    Attributes:
        evaluations: evaluations so far.
        metrics: metrics of the rounds so far, ``[R, rounds, ...]``.
        totals: sums over the rounds so far.
    """

    def __init__(self, runner: Runner, provenance: Provenance, began: float) -> None:
        programs = runner.programs
        algorithm, data = programs.algorithm, programs.data
        setup = setup_bytes(algorithm, programs.model, data, programs.runs)
        self.evaluations, self.metrics = Evaluations(), TreeBuffer(axis=1)
        self._began = began
        self.totals = Totals(*np.zeros((len(Totals._fields), setup.shape[1]), np.int64))
        self._provenance = provenance
        self._runner, self._task, self._bytes = runner, programs.task, setup.copy()
        self._finishing = 0 if algorithm.parts.finish is None else data.clients
        self._seconds = np.zeros(setup.shape[1])

    def result(self, xla_programs: int) -> Result:
        """Returns the result of the run up to the last evaluation."""
        compiling, rounds = self._runner.compile_seconds, self.evaluations[-1].round
        metrics: Metrics = jax.tree.map(lambda a: a[:, :rounds], self.metrics.tree())
        run, end = self._last.run, self._last.collected
        variables = state = None
        # A run that is interrupted within a program has donated its arrays; one that diverged has
        # those of a later round.
        gone = len(self.metrics) > rounds or any(a.is_deleted() for a in jax.tree.leaves(run))
        if run is not None and not gone:
            server = run.state.server if end is None else end.variables
            variables = readable(server, self._runner.programs.execution)
            state = self._runner.exported(run).state
        return Result(
            task=self._task,
            evaluations=self.evaluations,
            metrics=metrics,
            variables=variables,
            state=state,
            **work_of(metrics),
            model_bytes=self._runner.model_bytes,
            device_bytes=self._runner.device_bytes,
            compile_seconds=compiling,
            run_seconds=time.perf_counter() - self._began - compiling,
            xla_programs=xla_programs,
            provenance=self._provenance,
        )

    def evaluate(self, done: int, interval: Interval) -> Evaluation:
        """Adds an interval; returns the evaluation at its end, after ``done`` rounds."""
        self._last = interval
        self.metrics.add(interval.metrics)
        self.totals = self.totals.plus(interval.metrics)
        self._bytes += sent_bytes(self._runner.traffic, interval.metrics, done)
        if interval.metrics.time is not None:
            self._seconds += interval.metrics.time.seconds.sum(axis=1, dtype=np.float64)
        assert interval.scored is not None
        evaluation = self._evaluation(done, interval.scored, interval)
        return self.evaluate_collected(evaluation, interval)

    def stops(self, stop: Stop, evaluation: Evaluation) -> bool:
        """Returns whether the rule stops all runs at this evaluation."""
        self.evaluations.append(evaluation)
        try:
            return bool(np.all(stop.done(self.evaluations, self._task)))
        finally:
            self.evaluations.pop()

    def evaluate_collected(self, before: Evaluation, interval: Interval) -> Evaluation:
        """Returns the evaluation after an interval's models in flight were collected, if any."""
        if interval.collected is None:
            return before
        self._last = interval
        last = np.asarray(interval.collected.uploads, np.int64)
        self.totals = self.totals._replace(uploads=self.totals.uploads + last)
        traffic, clients = self._runner.traffic, self._finishing
        self.totals = self.totals._replace(downloads=self.totals.downloads + clients)
        self._bytes[0] += last * traffic.upload + clients * traffic.finish
        self._bytes[1] += clients * traffic.download
        after = self._evaluation(before.round, interval.collected.counts, interval)
        uncollected = before.test.pooled[self._task.score]
        return after._replace(uncollected=uncollected, before=before)

    def _evaluation(self, done: int, scored: SetCounts, interval: Interval) -> Evaluation:
        rows = interval.metrics
        counts, *personal = jax.tree.map(np.asarray, scored)
        test, *validation = (set_scores(self._task, found) for found in counts)
        own = [None if found is None else set_scores(self._task, found) for found in personal]
        totals, (up, down) = self.totals, self._bytes.copy()
        now = time.perf_counter() - self._began
        return Evaluation(
            round=done,
            sums=counts[0].pooled,
            test=test,
            validation=validation[0] if validation else None,
            personal=own[0],
            personal_validation=own[1],
            train_loss=np.asarray(rows.loss[:, -1], np.float64),
            uploads=totals.uploads,
            downloads=totals.downloads,
            samples=totals.samples,
            bytes_up=up,
            bytes_down=down,
            skipped=totals.skipped,
            seconds=None if rows.time is None else self._seconds.copy(),
            wall_seconds=now if interval.wall is None else interval.wall,
            recorded=interval.recorded,
            diagnostics={n: np.asarray(a[:, -1], np.float64) for n, a in rows.diagnostics.items()},
        )
