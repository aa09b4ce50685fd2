"""One experiment: compiles its programs, and runs them from one evaluation to the next."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jax.stages import Compiled, Lowered

from fedjax_sim.base import ClientData, FedState, Metrics, Model, PyTree, Task, Traffic, Variables
from fedjax_sim.engine import tree
from fedjax_sim.engine.execution import Execution
from fedjax_sim.engine.memory import check_fits, compiled, needed
from fedjax_sim.engine.targets import options_for
from fedjax_sim.round import Algorithm
from fedjax_sim.round.placement import fitted
from fedjax_sim.run.axes import client_axes, first_run
from fedjax_sim.run.checkpoints import Checkpoints, Saved, Saver
from fedjax_sim.run.identity import digest
from fedjax_sim.run.inputs import placed, stacked
from fedjax_sim.run.programs import Programs, Sets
from fedjax_sim.run.stages import Collected, Run, Scored, Stage
from fedjax_sim.run.varied import Varied
from fedjax_sim.run.windows import Feed, Windows

ONCE = ("weights", "start")
"""The programs that run once, and not for long."""


class Experiment:
    """The programs; :func:`fedjax_sim.run.simulation` is a loop over them.

    At most four: weights, which all experiments of a model share, start, advance, and finish if
    models are in flight or the algorithm has a finish. All are compiled before the first round, and
    once: ``advance`` takes the number of rounds as data. If clients' samples are fetched, three in
    place of it: the cohorts, the rounds, an evaluation.

    Args:
        algorithm: what to run.
        model: the model that its local update trains.
        task: what the sets are scored by.
        execution: devices; the arrays of data and sets are placed on them, each once however many
          hold it.
        data: the clients.
        sets: evaluation sets, e.g. (test, validation).
        runs: R.
        eval_every: the most rounds that one ``advance`` may run.
        personal: whether the clients of the first set are those of ``data``: it is then scored with
          each client's own model too, if the algorithm has such.
        varied: what makes the algorithm of each run, if runs differ in more than their seeds;
          ``algorithm`` is then one of them.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        model: Model,
        task: Task,
        execution: Execution,
        data: ClientData,
        sets: Sets,
        runs: int,
        eval_every: int,
        *,
        personal: bool = False,
        varied: Varied | None = None,
    ) -> None:
        self.compile_seconds = 0.0
        self.device_bytes = self.model_bytes = 0
        self.traffic = Traffic(0, 0, 0, 0)
        self.finishing = 0 if algorithm.parts.finish is None else data.clients
        algorithm = algorithm.on(fitted(algorithm.parts, data, runs))
        self.algorithm, self.model, self.task = algorithm, model, task
        self._execution, self.runs, self._every = execution, runs, eval_every
        self._personal = personal and algorithm.personal is not None
        self._varied = varied
        self._given = data, sets
        mb = execution.samples_mb
        self._windows = None if mb is None else Windows(data, mb)
        self._computed = Programs(
            algorithm, model, task, execution, data, sets, runs, eval_every,
            personal=personal, varied=varied, windows=self._windows,
        )  # fmt: skip
        self._feed: Feed | None = None
        self._programs: dict[str, Compiled] = {}

    @property
    def data(self) -> ClientData:
        """The clients, as they were given."""
        return self._given[0]

    @functools.cached_property
    def _inputs(self) -> tuple[ClientData, Sets]:
        """Data and sets on the devices, each array once however many hold it.

        The data without samples, but for the server's own, if those of clients are fetched.
        """
        data, sets = self._given
        if self._windows is not None:
            data = self._windows.fetched(None)
        return placed((data, sets), self._execution)

    def lowered(
        self, platforms: Sequence[str] | None = None, weights: Variables | None = None
    ) -> Iterator[tuple[str, Lowered]]:
        """The programs, see :meth:`fedjax_sim.run.programs.Programs.lowered`."""
        return self._computed.lowered(platforms, weights)

    def told(self, run: Run) -> Run:
        """The run as users know it; see :class:`fedjax_sim.run.layout.Layout`."""
        return self._computed.layout.told(run)

    def stages(
        self,
        seeds: Sequence[int],
        rounds: int,
        initial: Variables | None = None,
        record: Callable[[FedState], PyTree] | None = None,
        on_compiled: Callable[[int], None] | None = None,
        saved: Saved | None = None,
    ) -> Iterator[tuple[int, Stage]]:
        """Runs all rounds; yields the rounds done and the stage at every evaluation.

        Those that were ``saved`` come first, as they were.
        """
        over = saved is not None and saved.done == rounds
        # What goes on needs nothing to begin with, and what is over nothing at all.
        self._prepare(initial, lambda name: not over and (saved is None or name not in ONCE))
        if on_compiled is not None and not over:
            on_compiled(self.device_bytes)
        if saved is None:
            run, done = self.start(seeds, initial), 0
        else:
            run, past = saved.restored(self._computed.shapes, self._computed.layout, rounds, record)
            yield from past
            done = saved.done
        if self._windows is not None and not over:
            began, base = time.perf_counter(), self._inputs[0]
            cohorts = self._computed.cohorts(run, base, rounds - done)
            self.compile_seconds += time.perf_counter() - began  # of which the draws are little
            self._feed = Feed(self._windows, self._execution, base, cohorts, self._every)
        while done < rounds:
            todo = min(self._every, rounds - done)
            run, metrics, scored = self.advance(run, todo)
            rows = jax.tree.map(lambda a, todo=todo: np.asarray(a)[:, :todo], metrics)
            done += todo
            server = run.state.server
            collected = self.finish(run) if done == rounds else None
            server = server if collected is None else collected.variables
            kept = None if record is None else jax.device_get(record(self.told(run).state))
            yield done, Stage(todo, rows, scored, server, collected, run, kept)

    def saver(
        self,
        where: Checkpoints | str | Path,
        rounds: int,
        seeds: Sequence[int],
        initial: Variables | None,
    ) -> Saver:
        """What saves a run of this, and knows where one that was killed stopped.

        Raises:
            CheckpointError: if the folder has checkpoints of another run, or of more rounds.
        """
        parts = self.algorithm.parts.by_role()
        data, (test, *validation) = self._given
        identity = {
            "algorithm": " ".join(repr(self.algorithm).split()),
            "setting of the algorithm": digest(parts),
            "model": digest(self.model),
            "task": repr(self.task),
            "seeds": [*map(int, seeds)],
            "eval_every": self._every,
            "clients' data": digest(data),
            "test set": digest(test),
            "validation set": digest(validation),
            "initial": digest(initial),
            "personal": self._personal,
        }
        if self._varied is not None:
            identity["points"] = [dict(point) for point in self._varied.settings]
        given = where if isinstance(where, Checkpoints) else Checkpoints(where)
        return Saver(given, identity, rounds, self._every, self._computed.layout)

    def start(self, seeds: Sequence[int], initial: Variables | None = None) -> Run:
        """Initialises R runs, from the weights ``initial [*p]`` or ``[R, *p]``, or the model's."""
        weights, numbers = self._prepare(initial), np.asarray(seeds, np.uint32)
        weights = self._programs["weights"](numbers) if weights is None else weights
        run: Run = self._programs["start"](numbers, weights, self._inputs[0])
        return run

    def _prepare(
        self, initial: Variables | None, wanted: Callable[[str], bool] = lambda name: True
    ) -> Variables | None:
        """Compiles the programs that are ``wanted``, once; gives the weights of each run."""
        shapes = jax.eval_shape(lambda: self.model.init(jax.random.key(0)))
        weights = None if initial is None else stacked(initial, shapes, self.runs)
        if not self.model_bytes:
            self._compile(weights, wanted)
            self.model_bytes = tree.num_bytes(shapes)
            data = self._inputs[0]
            one = jax.eval_shape(lambda d: first_run(d, client_axes(data)), data)
            self.traffic = self.algorithm.traffic(shapes, one)
        return weights

    def advance(self, run: Run, todo: int) -> tuple[Run, Metrics, Scored]:
        """``todo`` rounds, at most ``eval_every``, and the evaluation of the models."""
        out: tuple[Run, Metrics, Scored]
        if self._windows is None:
            out = self._programs["advance"](run, *self._inputs, np.int32(todo))
            return out
        assert self._feed is not None
        parts: list[Metrics] = []
        while todo:
            window, data = self._feed.take()
            run, rows = self._programs["rounds"](run, data, np.int32(window.rounds))
            self._feed.fetch()  # while they run
            parts.append(jax.tree.map(lambda a, w=window: np.asarray(a)[:, : w.rounds], rows))
            todo -= window.rounds
        rows = jax.tree.map(lambda *some: np.concatenate(some, axis=1), *parts)
        return run, rows, self._programs["evaluate"](run, *self._inputs)

    def finish(self, run: Run) -> Collected | None:
        """Collects the models in flight, finishes and evaluates; None if nothing is left to do."""
        if not self.algorithm.ends:
            return None
        out: Collected = self._programs["finish"](run, *self._inputs)
        return out

    def _compile(self, weights: Variables | None, wanted: Callable[[str], bool]) -> None:
        """Compiles programs: XLA is at work on one while the next is traced."""
        began = time.perf_counter()
        pool, devices = ThreadPoolExecutor(), self._execution.devices
        try:
            compiling = {
                name: pool.submit(compiled, lowered, options_for(devices, once=name in ONCE))
                for name, lowered in self.lowered(weights=weights)
                if wanted(name)
            }
            self._programs = {name: job.result() for name, job in compiling.items()}
        finally:  # an interrupt does not wait for XLA
            pool.shutdown(wait=False, cancel_futures=True)
        self.compile_seconds += time.perf_counter() - began
        self.device_bytes = max(map(self._held, self._programs), default=0)
        check_fits(self.device_bytes, self._execution.devices)

    def _held(self, name: str) -> int:
        """Bytes on a device while a program runs: what it needs, and what waits for others."""
        needs = needed(self._programs[name])
        if self._windows is None:
            return needs
        window, sets = map(tree.num_bytes, (self._windows.like(), self._given[1]))
        return needs + (window + sets if name == "rounds" else 2 * window)
