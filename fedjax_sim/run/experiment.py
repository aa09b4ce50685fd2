"""The XLA programs of one experiment, all its runs (seeds, folds) on one more leading axis."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Compiled, Lowered, Traced

from fedjax_sim.base import (
    Array,
    ClientData,
    FedState,
    Metrics,
    Model,
    PyTree,
    Task,
    Traffic,
    Variables,
)
from fedjax_sim.data import EvalSet
from fedjax_sim.engine import tree
from fedjax_sim.engine.execution import Execution
from fedjax_sim.engine.memory import check_fits, compiled, needed
from fedjax_sim.engine.streams import Seed, stream
from fedjax_sim.round import Algorithm
from fedjax_sim.round.placement import fitted
from fedjax_sim.run.axes import RunAxes, first_run
from fedjax_sim.run.checkpoints import Checkpoints, Saved, Saver
from fedjax_sim.run.identity import digest
from fedjax_sim.run.inputs import drawing, placed, stacked
from fedjax_sim.run.metrics import Counts, evaluate, evaluate_own
from fedjax_sim.run.stages import Collected, Run, Scored, Stage
from fedjax_sim.run.varied import Varied

Sets = tuple[EvalSet, ...]


class Experiment:
    """The programs; :func:`fedjax_sim.run.simulation` is a loop over them.

    At most four: weights, which all experiments of a model share, start, advance, and finish if
    models are in flight or the algorithm has a finish. All are compiled before the first round, and
    once: ``advance`` takes the number of rounds as data.

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
        self._varied = varied
        self._programs: dict[str, Compiled] = {}
        self._shapes: dict[str, Any] = {}
        self._given = data, sets
        self._axes = RunAxes.of(data, sets, runs)
        score = functools.partial(evaluate, model, task, execution)
        self._scorers = [self._axes.map(score, in_axes=(0, axes)) for axes in self._axes.sets]
        self._score_own: Any = None
        if personal and algorithm.personal is not None:
            most = int(np.diff(sets[0].start).max())
            own_score = functools.partial(self._own_counts, most=most)
            self._score_own = self._map(own_score, (*self._of_run, self._axes.sets[0]))

    @property
    def data(self) -> ClientData:
        """The clients, as they were given."""
        return self._given[0]

    @property
    def _of_run(self) -> tuple[Any, ...]:
        """Axes of what each run has: key, state, data."""
        return 0, self._axes.state, self._axes.data

    def _map(self, fn: Callable[..., Any], in_axes: Any, out_axes: Any = 0) -> Callable[..., Any]:
        """``fn(algorithm, ...)`` for each run, with the algorithm of each."""
        if self._varied is None:
            return self._axes.map(functools.partial(fn, self.algorithm), in_axes, out_axes)
        point, at = self._varied.point, self._varied.at

        def of_point(point: Array, *args: Any) -> Any:
            return fn(at(point).on(self.algorithm.parts.execution), *args)

        return functools.partial(self._axes.map(of_point, (0, *in_axes), out_axes), point)

    @functools.cached_property
    def _inputs(self) -> tuple[ClientData, Sets]:
        """Data and sets on the devices, each array once however many hold it."""
        return placed(self._given, self._execution)

    def lowered(
        self, platforms: Sequence[str] | None = None, weights: Variables | None = None
    ) -> Iterator[tuple[str, Lowered]]:
        """The programs and their names, lowered for devices that need not be there.

        Nothing is placed and nothing runs: :meth:`jax.stages.Lowered.compile` then compiles them.

        Args:
            platforms: "cpu", "cuda" or "tpu", for several at once; None for that of the devices.
            weights: ``[R, *p]``, to start from; None for the model's own.
        """
        given = None if platforms is None else tuple(platforms)

        def shapes(tree: PyTree) -> PyTree:
            shape = functools.partial(jax.ShapeDtypeStruct, sharding=self._execution.replicated)
            return jax.tree.map(lambda a: shape(a.shape, a.dtype), tree)

        data, sets = shapes(self._given)
        seeds, todo = shapes((np.zeros(self.runs, np.uint32), np.int32(0)))
        if weights is None:
            draw = drawing(self.model.init, self._execution.replicated).trace(seeds)
            yield "weights", draw.lower(lowering_platforms=given)
        weights = shapes(draw.out_info if weights is None else weights)
        begin = self._traced("start", self._begin, seeds, weights, data)
        yield "start", begin.lower(lowering_platforms=given)
        run = shapes(begin.out_info)
        advance = self._traced("advance", self._rounds, run, data, sets, todo, donate=(0,))
        yield "advance", advance.lower(lowering_platforms=given)
        if self.algorithm.ends:
            finish = self._traced("finish", self._collect, run, data, sets)
            yield "finish", finish.lower(lowering_platforms=given)

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
        self._prepare(initial, compiling=not over)
        if on_compiled is not None and not over:
            on_compiled(self.device_bytes)
        if saved is None:
            run, done = self.start(seeds, initial), 0
        else:
            run, past = saved.restored(self._shapes, self._execution.replicated, rounds, record)
            yield from past
            done = saved.done
        while done < rounds:
            todo = min(self._every, rounds - done)
            run, metrics, scored = self.advance(run, todo)
            rows = jax.tree.map(lambda a, todo=todo: np.asarray(a)[:, :todo], metrics)
            done += todo
            server = run.state.server
            collected = self.finish(run) if done == rounds else None
            server = server if collected is None else collected.variables
            kept = None if record is None else jax.device_get(record(run.state))
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
            "personal": self._score_own is not None,
        }
        if self._varied is not None:
            identity["points"] = [dict(point) for point in self._varied.settings]
        given = where if isinstance(where, Checkpoints) else Checkpoints(where)
        return Saver(given, identity, rounds, self._every)

    def start(self, seeds: Sequence[int], initial: Variables | None = None) -> Run:
        """Initialises R runs, from the weights ``initial [*p]`` or ``[R, *p]``, or the model's."""
        weights, numbers = self._prepare(initial), np.asarray(seeds, np.uint32)
        weights = self._programs["weights"](numbers) if weights is None else weights
        run: Run = self._programs["start"](numbers, weights, self._inputs[0])
        return run

    def _prepare(self, initial: Variables | None, *, compiling: bool = True) -> Variables | None:
        """Compiles all programs, once; gives the weights of each run.

        A run that is over needs no program, but what they would give.
        """
        shapes = jax.eval_shape(lambda: self.model.init(jax.random.key(0)))
        weights = None if initial is None else stacked(initial, shapes, self.runs)
        if not self.model_bytes:
            if compiling:
                self._compile(weights)
            else:
                deque(self.lowered(weights=weights), maxlen=0)
            self.model_bytes = tree.num_bytes(shapes)
            one = jax.eval_shape(lambda d: first_run(d, self._axes.data), self._inputs[0])
            self.traffic = self.algorithm.traffic(shapes, one)
        return weights

    def _begin(self, seeds: Array, weights: Variables, data: ClientData) -> Run:
        def begin(algorithm: Algorithm, seed: Array, start: Variables, data: ClientData) -> PyTree:
            run_key = stream(jax.random.key(seed), Seed.ROUNDS)
            return run_key, algorithm.init(run_key, start, data)

        all_runs = self._map(begin, (0, 0, self._axes.data), (0, self._axes.state))
        return Run(*all_runs(seeds, weights, data))

    def advance(self, run: Run, todo: int) -> tuple[Run, Metrics, Scored]:
        """``todo`` rounds, at most ``eval_every``, and the evaluation of the models."""
        out: tuple[Run, Metrics, Scored]
        out = self._programs["advance"](run, *self._inputs, np.int32(todo))
        return out

    def _rounds(
        self, run: Run, data: ClientData, sets: Sets, todo: Array
    ) -> tuple[Run, Metrics, Scored]:
        step = self._map(_at_round(Algorithm.step), self._of_run, (self._axes.state, 0))
        step = jax.jit(step, inline=True)  # traced once, for its shapes and in the loop
        shape = jax.eval_shape(step, run.keys, run.state, data)[1]
        rows = jax.tree.map(
            lambda s: jnp.zeros((self.runs, self._every, *s.shape[1:]), s.dtype), shape
        )

        # A bound that is data: a shorter last stretch needs no program of its own.
        def body(i: Array, carry: tuple[FedState, Metrics]) -> tuple[FedState, Metrics]:
            state, rows = carry
            state, new = step(run.keys, state, data)
            return state, jax.tree.map(lambda a, b: a.at[:, i].set(b), rows, new)

        state, rows = jax.lax.fori_loop(0, todo, body, (run.state, rows))
        evaluated = self._map(_at_round(Algorithm.evaluated), self._of_run)
        after = Run(run.keys, state)
        return after, rows, self._scored(evaluated(run.keys, state, data), after, data, sets)

    def _scored(self, variables: Variables, run: Run, data: ClientData, sets: Sets) -> Scored:
        counts = tuple(score(variables, s) for score, s in zip(self._scorers, sets, strict=True))
        if self._score_own is None:
            return Scored(counts, None)
        return Scored(counts, self._score_own(run.keys, run.state, data, sets[0]))

    def _own_counts(
        self,
        algorithm: Algorithm,
        key: Array,
        state: FedState,
        data: ClientData,
        examples: EvalSet,
        *,
        most: int,
    ) -> Counts:
        key = jax.random.fold_in(key, state.round)
        own = functools.partial(algorithm.score_personal, key, state, data)
        return evaluate_own(self.model, self.task, own, examples, most=most)

    def finish(self, run: Run) -> Collected | None:
        """Collects the models in flight, finishes and evaluates; None if nothing is left to do."""
        if not self.algorithm.ends:
            return None
        out: Collected = self._programs["finish"](run, *self._inputs)
        return out

    def _collect(self, run: Run, data: ClientData, sets: Sets) -> Collected:
        gather = self._map(_at_round(Algorithm.collect), self._of_run)
        variables, uploads = gather(run.keys, run.state, data)
        run = Run(run.keys, run.state._replace(server=variables))
        return Collected(variables, uploads, self._scored(variables, run, data, sets))

    def _compile(self, weights: Variables | None) -> None:
        """Compiles all programs: XLA is at work on one while the next is traced."""
        began = time.perf_counter()
        pool = ThreadPoolExecutor()
        try:
            compiling = {
                name: pool.submit(compiled, lowered)
                for name, lowered in self.lowered(weights=weights)
            }
            self._programs = {name: job.result() for name, job in compiling.items()}
        finally:  # an interrupt does not wait for XLA
            pool.shutdown(wait=False, cancel_futures=True)
        self.compile_seconds += time.perf_counter() - began
        self.device_bytes = max(map(needed, self._programs.values()))
        check_fits(self.device_bytes, self._execution.devices)

    def _traced(
        self, name: str, fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()
    ) -> Traced:
        put = self._execution.replicated
        jitted = jax.jit(fn, donate_argnums=donate, in_shardings=put, out_shardings=put)
        traced = jitted.trace(*args)
        self._shapes[name] = traced.out_info
        return traced


def _at_round(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn(algorithm, key, state, data)`` with the key of the round, of the run's."""
    return lambda algorithm, key, state, data: fn(
        algorithm, jax.random.fold_in(key, state.round), state, data
    )
