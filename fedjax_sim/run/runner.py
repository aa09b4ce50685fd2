"""Compiles the programs of an experiment and runs them from one evaluation to the next."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.stages import Compiled

from fedjax_sim.base import (
    ClientData,
    FedState,
    Metrics,
    PyTree,
    Traffic,
    Variables,
    with_loss,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.memory import argument_bytes, check_fits, compile_program, peak_bytes
from fedjax_sim.run.checkpoint_files import Checkpoint, CheckpointError
from fedjax_sim.run.checkpoints import Checkpoints, Saver
from fedjax_sim.run.client_memory import ClientMemory
from fedjax_sim.run.functions import Sets
from fedjax_sim.run.identity import digest, random_settings
from fedjax_sim.run.layout import (
    Layout,
    client_axes,
    one_run,
    readable,
    replicated,
    weights_of_runs,
)
from fedjax_sim.run.metrics import Counts
from fedjax_sim.run.prefetch import PrefetchBlocks, Prefetcher
from fedjax_sim.run.programs import ONCE, Programs
from fedjax_sim.run.records import Collected, EvaluatedModels, Interval, Run, SetCounts

CALL_SECONDS = 10.0
"""Seconds after which a program returns: progress, checkpoints and signals wait no longer."""


class Runner:
    """Compiles and runs the programs of an experiment.

    All are compiled once, before the first round. Data and sets are placed on the devices, each
    array once even if several trees hold it.

    Attributes:
        compile_seconds: seconds of tracing, lowering and compiling.
        device_bytes: the peak memory of a device, known once the programs are compiled.
        model_bytes: bytes of one model, known once the programs are compiled.
        traffic: bytes that are sent, known once the programs are compiled.
    """

    def __init__(self, programs: Programs) -> None:
        self.programs = programs
        self.compile_seconds = 0.0
        self.device_bytes = self.model_bytes = 0
        self.traffic = Traffic(0, 0, 0, 0)
        self._prefetcher: Prefetcher | None = None
        hosted, clients = programs.hosted, programs.data.clients
        self._memory = ClientMemory(programs.layout, clients) if hosted else None
        self._exporter: Layout | ClientMemory = self._memory or programs.layout
        self._compiled: dict[str, Compiled] = {}

    @functools.cached_property
    def _inputs(self) -> tuple[ClientData, Sets]:
        """Data and sets on the devices; only the server's own samples if others are fetched."""
        programs = self.programs
        data = programs.data if programs.blocks is None else programs.blocks.fetched(None)
        return replicated((data, programs.sets), programs.execution)

    def exported(self, run: Run) -> Run:
        """Returns the run as users see it; see :class:`fedjax_sim.run.layout.Layout`."""
        return self._exporter.exported(run)

    def intervals(
        self,
        seeds: Sequence[int],
        rounds: int,
        initial: Variables | None = None,
        record: Callable[[FedState], PyTree] | None = None,
        on_compiled: Callable[[int], None] | None = None,
        saved: Checkpoint | None = None,
    ) -> Iterator[tuple[int, Interval]]:
        """Runs all rounds; yields the rounds done and the interval at every evaluation.

        Between evaluations, about every ten seconds, it yields the rounds of the interval that are
        done. The intervals of a checkpoint, ``saved``, come first.
        """
        programs, over = self.programs, False
        if saved is not None and saved.evaluated == rounds:
            over = saved.has_end or not programs.algorithm.ends
        # A resumed run needs no initial programs, and a finished one needs none at all.
        self._prepare(
            initial, lambda name: not over and (saved is None or name not in ONCE), rounds
        )
        if on_compiled is not None and not over:
            on_compiled(self.device_bytes)
        parts: list[Metrics] = []  # the rounds since the last evaluation
        if saved is None:
            run, done = self.start(seeds, initial), 0
        else:
            run, past = saved.restored(programs.shapes, self._exporter, rounds, record)
            done = saved.done
            if done == rounds and not over:  # saved by a run of more rounds
                past[-1] = done, self.collected(past[-1][1])
            yield from past
            parts = [interval.metrics for _, interval in past if interval.scored is None]
        if programs.blocks is not None and done < rounds:
            self._prefetcher = self._prefetch(programs.blocks, run, done, rounds)
        seconds: float | None = None  # of a round
        while done < rounds:
            left = min(programs.every - done % programs.every, rounds - done)
            todo = rounds_of_call(min(left, programs.capacity), seconds)
            began = time.perf_counter()
            run, metrics, scored = self.advance(run, todo, score=todo == left)
            parts.append(metrics)
            seconds = max(time.perf_counter() - began, 1e-9) / todo
            done += todo
            interval = Interval(_joined(parts), scored, run)
            if scored is not None:
                parts = []
                kept = None if record is None else jax.device_get(record(self.exported(run).state))
                interval = interval._replace(recorded=kept)
                if done == rounds:
                    interval = self.collected(interval)
            yield done, interval

    def _prefetch(self, blocks: PrefetchBlocks, run: Run, done: int, rounds: int) -> Prefetcher:
        """Predicts the cohorts of the rounds after ``done``, and fetches their first block."""
        programs, memory = self.programs, self._memory
        began, data = time.perf_counter(), self._inputs[0]
        loaded = run if memory is None else memory.load(run, np.arange(0))
        cohorts = programs.cohorts(loaded, data, rounds - done)
        if memory is not None:
            memory.reserve(cohorts, self.device_bytes)
        self.compile_seconds += time.perf_counter() - began  # the draws take little of it
        return Prefetcher(blocks, programs.execution, data, cohorts, programs.every, done)

    def saver(
        self,
        where: Checkpoints | str | Path,
        rounds: int,
        seeds: Sequence[int],
        initial: Variables | None,
    ) -> Saver:
        """Returns the saver of a run, which has the checkpoint to resume from.

        Raises:
            CheckpointError: if the folder has checkpoints of another run, or of more rounds.
        """
        programs = self.programs
        algorithm, model = programs.algorithm, programs.model
        test, *validation = programs.sets
        identity = {
            "algorithm": " ".join(repr(algorithm).split()),
            "setting of the algorithm": digest(algorithm.parts.by_role()),
            "model": digest(model),
            "task": repr(programs.task),
            "loss": digest(programs.task.loss) if isinstance(programs.task, with_loss) else None,
            "seeds": [*map(int, seeds)],
            "eval_every": programs.every,
            "clients' data": digest(programs.data),
            "test set": digest(test),
            "validation set": digest(validation),
            "initial": digest(initial),
            "personal": programs.personal,
            **random_settings(),
        }
        if programs.per_run is not None:
            identity["points"] = [dict(settings) for settings in programs.per_run.settings]
        given = where if isinstance(where, Checkpoints) else Checkpoints(where)
        return Saver(given, identity, rounds, programs.every, self._exporter)

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
        """Compiles the programs that are ``wanted``, once; returns the initial weights of runs."""
        programs = self.programs
        shapes = jax.eval_shape(lambda: programs.model.init(jax.random.key(0)))
        weights = None if initial is None else weights_of_runs(initial, shapes, programs.runs)
        if not self.model_bytes:
            self._compile(weights, wanted, rounds)
            self.model_bytes = tree.num_bytes(shapes)
            data = self._inputs[0]
            one = jax.eval_shape(lambda d: one_run(d, client_axes(data)), data)
            self.traffic = programs.algorithm.traffic(shapes, one)
        return weights

    def advance(
        self, run: Run, todo: int, *, score: bool = True
    ) -> tuple[Run, Metrics, SetCounts | None]:
        """Runs ``todo`` rounds, at most the capacity, and evaluates the models if ``score``."""
        if self.programs.blocks is None:
            given = (*self._inputs, np.int32(todo), np.bool_(score))
            run, rows, models = self._compiled["advance"](run, *given)
            counts = self._counts(run, models) if score else None
            return run, _first(todo, rows), counts
        assert self._prefetcher is not None
        parts: list[Metrics] = []
        while todo:
            assert self._prefetcher.next is not None
            block, data = self._prefetcher.next
            clients, memory = self.programs.blocks.clients(block), self._memory
            count = min(todo, block.rounds)
            run = run if memory is None else memory.load(run, clients)
            run, rows = self._compiled["rounds"](run, data, np.int32(count))
            self._prefetcher.fetch(count)  # while they run
            run = run if memory is None else memory.store(run, clients)
            parts.append(_first(count, rows))
            todo -= count
        if not score:
            return run, _joined(parts), None
        models = self._compiled["models"](run, *self._inputs)
        return run, _joined(parts), self._counts(run, models)

    def collected(self, interval: Interval) -> Interval:
        """Collects the models in flight after an interval, which becomes the last.

        Raises:
            CheckpointError: if the run continued and was saved after this interval.
        """
        if interval.run is None:
            raise CheckpointError("stop: the run was saved after more rounds than this rule allows")
        return interval._replace(collected=self.finish(interval.run))

    def finish(self, run: Run) -> Collected | None:
        """Collects the models in flight, finishes and evaluates; None if nothing is left to do."""
        if not self.programs.algorithm.ends:
            return None
        uploads, models = self._compiled["finish"](run, *self._inputs)
        run = run._replace(state=run.state._replace(server=models.variables))
        counts = self._counts(run, models)
        return Collected(readable(models.variables, self.programs.execution), uploads, counts)

    def _counts(self, run: Run, models: EvaluatedModels) -> SetCounts:
        counts: tuple[Counts, ...]
        counts = self._compiled["evaluate"](models.variables, self._inputs[1])
        own = self._personal_counts(run) if models.personal is None else models.personal
        return SetCounts(counts, *(own or ()))

    def _personal_counts(self, run: Run) -> tuple[Counts, ...] | None:
        """Counts personal models, some clients at a time, if per-client state is on the host."""
        programs, memory = self.programs, self._memory
        if memory is None or not programs.own_apart:
            return None
        found, capacity, total = [], programs.layout.clients, programs.data.clients
        for first in range(0, total, capacity):
            some = np.arange(first, min(first + capacity, total), dtype=np.int32)
            clients = np.full(capacity, total, np.int32)
            clients[: len(some)] = some
            out = self._compiled["own"](memory.load(run, some), *self._inputs, clients)
            found.append(_first(len(some), out))
        counts: tuple[Counts, ...] = self._compiled["count"](_joined(found), self._inputs[1])
        return counts

    def _compile(
        self, weights: Variables | None, wanted: Callable[[str], bool], rounds: int | None
    ) -> None:
        """Compiles programs; XLA compiles one while the next is traced."""
        began = time.perf_counter()
        pool, devices = ThreadPoolExecutor(), self.programs.execution.devices
        try:
            compiling = {
                name: pool.submit(compile_program, lowered, self.programs.options(name, rounds))
                for name, lowered in self.programs.lowered(weights=weights, rounds=rounds)
                if wanted(name)
            }
            self._compiled = {name: job.result() for name, job in compiling.items()}
        finally:  # an interrupt does not wait for XLA
            pool.shutdown(wait=False, cancel_futures=True)
        self.compile_seconds += time.perf_counter() - began
        self.device_bytes = max(map(self._bytes_during, self._compiled), default=0)
        check_fits(self.device_bytes, devices)

    def _bytes_during(self, name: str) -> int:
        """Returns the bytes on a device while a program runs, its own and those held by others."""
        programs = self.programs
        sets = tree.num_bytes(programs.sets)
        reading_sets = {"evaluate", "own", "count"}
        if programs.personal and not programs.own_apart:
            reading_sets |= {"advance", "models", "finish"}
        others = 0 if name in reading_sets or name in ONCE else sets
        if name == "evaluate":  # the run and the data, which the program before it was given
            before = "advance" if programs.blocks is None else "models"
            others += argument_bytes(self._compiled[before]) - (
                sets if before in reading_sets else 0
            )
        if programs.blocks is not None:
            block = tree.num_bytes(programs.blocks.changing(programs.blocks.shapes()))
            others += block if name == "rounds" else 2 * block
        return peak_bytes(self._compiled[name]) + others


def _first(count: int, rows: PyTree) -> PyTree:
    """Returns the first of ``rows [R, rounds or clients, ...]``, on the host."""
    return jax.tree.map(lambda a: np.asarray(a)[:, :count], rows)


def _joined(parts: Sequence[PyTree]) -> PyTree:
    """Joins arrays ``[R, rounds or clients, ...]``."""
    return jax.tree.map(lambda *some: np.concatenate(some, axis=1), *parts)


def rounds_of_call(left: int, seconds: float | None) -> int:
    """Returns how many of the rounds ``left`` the next call runs, for about ten seconds.

    ``seconds`` is the duration of a round in the last call; None before the first call, which runs
    one round. All processes of a run follow process 0.
    """
    if left <= 1:
        return left
    fitting = 1 if seconds is None else max(1, int(min(CALL_SECONDS / seconds, left)))
    if jax.process_count() > 1:
        fitting = int(multihost_utils.broadcast_one_to_all(np.int32(fitting)))
    return fitting
