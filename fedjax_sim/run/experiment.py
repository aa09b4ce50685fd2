"""One experiment: compiles its programs, and runs them from one evaluation to the next."""

from __future__ import annotations

import functools
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jax.stages import Compiled

from fedjax_sim.base import ClientData, FedState, Metrics, PyTree, Traffic, Variables
from fedjax_sim.engine import tree
from fedjax_sim.engine.memory import arguments, check_fits, compiled, needed
from fedjax_sim.run.axes import client_axes, first_run
from fedjax_sim.run.checkpoints import Checkpoints, Saver
from fedjax_sim.run.client_memory import ClientMemory
from fedjax_sim.run.functions import Sets
from fedjax_sim.run.identity import code, digest, drawing
from fedjax_sim.run.inputs import placed, stacked
from fedjax_sim.run.layout import Layout
from fedjax_sim.run.metrics import Counts
from fedjax_sim.run.pace import Pace
from fedjax_sim.run.programs import ONCE, Programs
from fedjax_sim.run.saved import Saved
from fedjax_sim.run.stages import Collected, Run, Scored, Stage, Unscored
from fedjax_sim.run.windows import Feed


class Experiment:
    """The programs at work; :func:`fedjax_sim.run.simulation` is a loop over them.

    All are compiled before the first round, and once. The arrays of data and sets are placed on the
    devices, each once however many hold it.

    Args:
        programs: what they compute.

    Attributes:
        compile_seconds: of all that was traced, lowered and compiled.
        device_bytes: what a device holds at most, once they are compiled.
        model_bytes: of one model, likewise.
        traffic: what is sent, likewise.
    """

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self.compile_seconds = 0.0
        self.device_bytes = self.model_bytes = 0
        self.traffic = Traffic(0, 0, 0, 0)
        self._feed: Feed | None = None
        of = programs
        self._memory = ClientMemory(of.layout, of.data.clients) if of.hosted else None
        self._compiled: dict[str, Compiled] = {}

    @functools.cached_property
    def _inputs(self) -> tuple[ClientData, Sets]:
        """Data and sets on the devices, each array once however many hold it.

        The data without samples, but for the server's own, if those of clients are fetched.
        """
        of = self.programs
        data = of.data if of.windows is None else of.windows.fetched(None)
        return placed((data, of.sets), of.execution)

    def told(self, run: Run) -> Run:
        """The run as users know it; see :class:`fedjax_sim.run.layout.Layout`."""
        return self._keeper.told(run)

    @property
    def _keeper(self) -> Layout | ClientMemory:
        """What tells and restores runs."""
        return self._memory or self.programs.layout

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

        Between evaluations it yields what is done of the stage, about every ten seconds. The stages
        that were ``saved`` come first, as they were.
        """
        of, over = self.programs, saved is not None and saved.evaluated == rounds
        # What goes on needs nothing to begin with, and what is over nothing at all.
        self._prepare(
            initial, lambda name: not over and (saved is None or name not in ONCE), rounds
        )
        if on_compiled is not None and not over:
            on_compiled(self.device_bytes)
        parts: list[Metrics] = []  # the rounds since the last evaluation
        if saved is None:
            run, done = self.start(seeds, initial), 0
        else:
            run, past = saved.restored(of.shapes, self._keeper, rounds, record)
            yield from past
            done = saved.done
            parts = [stage.metrics for _, stage in past if stage.scored is None]
        if of.windows is not None and not over:
            began, base = time.perf_counter(), self._inputs[0]
            rows = run if self._memory is None else self._memory.lent(run, np.arange(0))
            cohorts = of.cohorts(rows, base, rounds - done)
            if self._memory is not None:
                self._memory.reserve(cohorts, self.device_bytes)
            self.compile_seconds += time.perf_counter() - began  # of which the draws are little
            self._feed = Feed(of.windows, of.execution, base, cohorts, of.every, done)
        pace = Pace()
        while done < rounds:
            left = min(of.every - done % of.every, rounds - done)
            todo = pace.begin(min(left, of.most))
            run, metrics, scored = self.advance(run, todo, score=todo == left)
            parts.append(jax.tree.map(lambda a, todo=todo: np.asarray(a)[:, :todo], metrics))
            pace.end()
            done += todo
            rows = jax.tree.map(lambda *some: np.concatenate(some, axis=1), *parts)
            count = sum(part.loss.shape[1] for part in parts)
            server = run.state.server
            if scored is None:
                yield done, Stage(count, rows, None, server, None, run, None)
                continue
            parts = []
            collected = self.finish(run) if done == rounds else None
            server = server if collected is None else collected.variables
            kept = None if record is None else jax.device_get(record(self.told(run).state))
            yield done, Stage(count, rows, scored, server, collected, run, kept)

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
        of = self.programs
        test, *validation = of.sets
        identity = {
            "algorithm": " ".join(repr(of.algorithm).split()),
            "setting of the algorithm": digest(of.algorithm.parts.by_role()),
            "model": digest(of.model),
            "task": repr(of.task),
            "seeds": [*map(int, seeds)],
            "eval_every": of.every,
            "clients' data": digest(of.data),
            "test set": digest(test),
            "validation set": digest(validation),
            "initial": digest(initial),
            "personal": of.personal,
            **drawing(),
            "code": {
                "python": platform.python_version_tuple()[:2],
                "functions": code((of.algorithm.parts.by_role(), of.model, of.task)),
            },
        }
        if of.varied is not None:
            identity["points"] = [dict(point) for point in of.varied.settings]
        given = where if isinstance(where, Checkpoints) else Checkpoints(where)
        return Saver(given, identity, rounds, of.every, self._keeper)

    def start(self, seeds: Sequence[int], initial: Variables | None = None) -> Run:
        """Initialises R runs, from the weights ``initial [*p]`` or ``[R, *p]``, or the model's."""
        weights, numbers = self._prepare(initial), np.asarray(seeds, np.uint32)
        weights = self._compiled["weights"](numbers) if weights is None else weights
        run: Run = self._compiled["start"](numbers, weights, self._inputs[0])
        return run if self._memory is None else self._memory.begin(run)

    def _prepare(
        self,
        initial: Variables | None,
        wanted: Callable[[str], bool] = lambda name: True,
        rounds: int | None = None,
    ) -> Variables | None:
        """Compiles the programs that are ``wanted``, once; gives the weights of each run."""
        of = self.programs
        shapes = jax.eval_shape(lambda: of.model.init(jax.random.key(0)))
        weights = None if initial is None else stacked(initial, shapes, of.runs)
        if not self.model_bytes:
            self._compile(weights, wanted, rounds)
            self.model_bytes = tree.num_bytes(shapes)
            data = self._inputs[0]
            one = jax.eval_shape(lambda d: first_run(d, client_axes(data)), data)
            self.traffic = of.algorithm.traffic(shapes, one)
        return weights

    def advance(
        self, run: Run, todo: int, *, score: bool = True
    ) -> tuple[Run, Metrics, Scored | None]:
        """Runs ``todo`` rounds, as many as fit, and evaluates the models if asked to."""
        if self.programs.windows is None:
            given = (*self._inputs, np.int32(todo), np.bool_(score))
            run, rows, unscored = self._compiled["advance"](run, *given)
            return run, rows, self._scored(run, unscored) if score else None
        assert self._feed is not None
        parts: list[Metrics] = []
        while todo:
            window, data = self._feed.take()
            clients, memory = self.programs.windows.people(window), self._memory
            count = min(todo, window.rounds)
            run = run if memory is None else memory.lent(run, clients)
            run, rows = self._compiled["rounds"](run, data, np.int32(count))
            self._feed.fetch(count)  # while they run
            run = run if memory is None else memory.returned(run, clients)
            parts.append(jax.tree.map(lambda a, n=count: np.asarray(a)[:, :n], rows))
            todo -= count
        rows = jax.tree.map(lambda *some: np.concatenate(some, axis=1), *parts)
        if not score:
            return run, rows, None
        return run, rows, self._scored(run, self._compiled["models"](run, *self._inputs))

    def finish(self, run: Run) -> Collected | None:
        """Collects the models in flight, finishes and evaluates; None if nothing is left to do."""
        if not self.programs.algorithm.ends:
            return None
        uploads, unscored = self._compiled["finish"](run, *self._inputs)
        run = run._replace(state=run.state._replace(server=unscored.variables))
        return Collected(unscored.variables, uploads, self._scored(run, unscored))

    def _scored(self, run: Run, unscored: Unscored) -> Scored:
        counts: tuple[Counts, ...]
        counts = self._compiled["evaluate"](unscored.variables, self._inputs[1])
        return Scored(counts, self._own(run) if unscored.personal is None else unscored.personal)

    def _own(self, run: Run) -> Counts | None:
        """The counts of own models, of some at a time, if what clients keep is on the host."""
        of, memory = self.programs, self._memory
        if memory is None or not of.personal:
            return None
        found, room = [], of.layout.clients
        for first in range(0, of.data.clients, room):
            some = np.arange(first, min(first + room, of.data.clients), dtype=np.int32)
            clients = np.full(room, of.data.clients, np.int32)
            clients[: len(some)] = some
            out = self._compiled["own"](memory.lent(run, some), *self._inputs, clients)
            found.append(jax.tree.map(lambda a, some=some: np.asarray(a)[:, : len(some)], out))
        answers = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *found)
        counted: Counts = self._compiled["count"](answers, self._inputs[1])
        return counted

    def _compile(
        self, weights: Variables | None, wanted: Callable[[str], bool], rounds: int | None
    ) -> None:
        """Compiles programs: XLA is at work on one while the next is traced."""
        began = time.perf_counter()
        pool, devices = ThreadPoolExecutor(), self.programs.execution.devices
        try:
            compiling = {
                name: pool.submit(compiled, lowered, self.programs.options(name, rounds))
                for name, lowered in self.programs.lowered(weights=weights)
                if wanted(name)
            }
            self._compiled = {name: job.result() for name, job in compiling.items()}
        finally:  # an interrupt does not wait for XLA
            pool.shutdown(wait=False, cancel_futures=True)
        self.compile_seconds += time.perf_counter() - began
        self.device_bytes = max(map(self._held, self._compiled), default=0)
        check_fits(self.device_bytes, devices)

    def _held(self, name: str) -> int:
        """Bytes on a device while a program runs: what it needs, and what waits for others."""
        of, program = self.programs, self._compiled[name]
        sets = tree.num_bytes(of.sets)
        read = {"evaluate", "own", "count"}  # what is given the sets
        if of.personal and not of.hosted:
            read |= {"advance", "models", "finish"}
        beside = 0 if name in read or name in ONCE else sets
        if name == "evaluate":  # the run and the data, which the program before it has
            before = "advance" if of.windows is None else "models"
            beside += arguments(self._compiled[before]) - (sets if before in read else 0)
        if of.windows is not None:
            window = tree.num_bytes(of.windows.moving(of.windows.like()))
            beside += window if name == "rounds" else 2 * window
        return needed(program) + beside
