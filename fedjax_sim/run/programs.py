"""The XLA programs of one experiment, all its runs (seeds, folds) on one more leading axis."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.stages import Lowered, Traced
from numpy.typing import NDArray

from fedjax_sim.base import (
    Array,
    ClientData,
    FedState,
    Metrics,
    Model,
    PyTree,
    Task,
    Variables,
)
from fedjax_sim.data import EvalSet
from fedjax_sim.engine.memory import largest_made
from fedjax_sim.engine.order import in_order
from fedjax_sim.engine.streams import Seed, stream
from fedjax_sim.engine.targets import options_for
from fedjax_sim.round import Algorithm
from fedjax_sim.round.placement import fitted
from fedjax_sim.run.axes import RunAxes
from fedjax_sim.run.client_memory import check_unread, rows_that_fit
from fedjax_sim.run.foreseen import foreseen
from fedjax_sim.run.inputs import drawing
from fedjax_sim.run.layout import Layout, bare, shapes_for
from fedjax_sim.run.metrics import Counts, count_own, own_answers
from fedjax_sim.run.scoring import scoring
from fedjax_sim.run.stages import Collected, Run, Scored, Unscored
from fedjax_sim.run.varied import Varied
from fedjax_sim.run.windows import Windows

Sets = tuple[EvalSet, ...]

ONCE = ("weights", "start")
"""The programs before the first round, which run once and not for long."""


class Programs:
    """What the programs compute; :class:`fedjax_sim.run.experiment.Experiment` runs them.

    At most five: weights, start, advance, evaluate, and finish if models are in flight or the
    algorithm has a finish. ``advance`` takes the number of rounds as data. All experiments of a
    model share weights, and evaluate too if they score the same way. If samples or client states
    stay on the host, ``rounds`` runs on the data of a window, and ``models`` does what is left of
    ``advance``; if client states do, ``own`` scores the own models of some clients, and ``count``
    adds up what all gave.

    Args:
        algorithm: what to run.
        model: the model that its local update trains.
        task: what the sets are scored by.
        data: the clients.
        sets: evaluation sets, e.g. (test, validation).
        runs: R.
        every: the most rounds that one ``advance`` may run.
        personal: whether the clients of the first set are those of ``data``: it is then scored with
          each client's own model too, if the algorithm has such.
        varied: what makes the algorithm of each run, if runs differ in more than their seeds;
          ``algorithm`` is then one of them.

    Attributes:
        algorithm: with lanes that fit the clients' sizes.
        windows: of samples or client states that stay on the host; None if all are on the devices.
        layout: of a run between two programs.
        hosted: whether what clients keep stays on the host.
        shapes: what each program gives, by name, once it is lowered.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        model: Model,
        task: Task,
        data: ClientData,
        sets: Sets,
        runs: int,
        every: int,
        *,
        personal: bool = False,
        varied: Varied | None = None,
    ) -> None:
        self.algorithm = algorithm.on(fitted(algorithm.parts, data, runs))
        self.model, self.task, self.execution = model, task, algorithm.parts.execution
        self.data, self.sets, self.runs, self.every = data, sets, runs, every
        self.personal = personal and algorithm.personal is not None
        self.varied = varied
        self._axes = RunAxes.of(data, sets, runs)
        self.layout, mb = Layout(self.execution, data.clients), self.execution.client_state_mb
        rows = None if mb is None else rows_that_fit(self.begun, self.layout, mb)
        self.layout = self.layout if rows is None else Layout(self.execution, rows.clients)
        self.hosted = rows is not None
        self.windows = None
        if self.execution.samples_mb is not None or self.hosted:
            self.windows = Windows(data, self.execution.samples_mb, rows)
        self.shapes: dict[str, Any] = {}
        self._largest: dict[str, int] = {}

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
        whole, of_run = self.execution.replicated, self.layout.shardings

        def shapes(tree: PyTree, where: PyTree = whole) -> PyTree:
            def part(sharding: Sharding, values: PyTree) -> PyTree:
                shape = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
                return jax.tree.map(lambda a: shape(a.shape, a.dtype), values)

            return jax.tree.map(part, where, tree)

        windows = self.windows
        data, sets = shapes((self.data, self.sets))
        if windows is not None:
            data, window = shapes((windows.fetched(None), windows.like()))
        seeds, todo = shapes((np.zeros(self.runs, np.uint32), np.int32(0)))
        if weights is None:
            draw = drawing(self.model.init, whole).trace(seeds)
            yield "weights", draw.lower(lowering_platforms=given)
        weights = shapes(draw.out_info if weights is None else weights)
        begin = self._traced("start", self._begin, (seeds, weights, data), (whole,) * 3, of_run)
        yield "start", begin.lower(lowering_platforms=given)
        run = shapes(begin.out_info, of_run)
        puts = of_run, whole, whole, whole
        counted = None  # of own models, by a program of its own
        if windows is None:
            args: tuple[Any, ...] = (run, data, sets, todo)
            gives = of_run, whole, whole
            advance = self._traced("advance", self._advance, args, puts, gives, (0,))
            rows, unscored = advance.out_info[1:]
            yield "advance", advance.lower(lowering_platforms=given)
        else:
            args = run, window, todo
            rounds = self._traced("rounds", self._rounds, args, puts[:3], (of_run, whole), (0,))
            rows = rounds.out_info[1]
            yield "rounds", rounds.lower(lowering_platforms=given)
            if self.hosted and self.algorithm.ends:
                args = run, data, sets
                check_unread(jax.make_jaxpr(self._collect)(*args).jaxpr, args)
            if self.hosted and self.personal:
                some = shapes(np.zeros(self.layout.clients, np.int32))
                own = self._traced("own", self._own, (run, data, sets, some), puts, whole)
                yield "own", own.lower(lowering_platforms=given)
                of_all = shapes(shapes_for(self.data.clients, own.out_info))
                count = self._traced("count", self._count, (of_all, sets), whole, whole)
                yield "count", count.lower(lowering_platforms=given)
                counted = count.out_info
            run = bare(run) if self.hosted else run
            models = self._traced("models", self._models, (run, data, sets), puts[:3], whole)
            unscored = models.out_info
            yield "models", models.lower(lowering_platforms=given)
        score = scoring(self.model.apply, self.task, self.execution, self._axes)
        evaluate = self._noted("evaluate", score.trace(shapes(unscored.variables), sets))
        yield "evaluate", evaluate.lower(lowering_platforms=given)
        counted = unscored.personal if counted is None else counted
        scored = Scored(evaluate.out_info, counted)
        self.shapes["advance"] = begin.out_info, rows, scored
        if self.algorithm.ends:
            finish = self._traced("finish", self._collect, (run, data, sets), puts[:3], whole)
            uploads, last = finish.out_info
            self.shapes["finish"] = Collected(last.variables, uploads, scored)
            yield "finish", finish.lower(lowering_platforms=given)

    def options(self, name: str) -> dict[str, Any] | None:
        """XLA's, for a program that was just lowered."""
        trains = self.algorithm.parts.finish is not None or self.personal
        once = name in ONCE or (name == "finish" and not trains)
        return options_for(self.execution.devices, once=once, largest=self._largest.get(name))

    def _traced(
        self,
        name: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        puts: PyTree,
        gives: PyTree,
        donated: tuple[int, ...] = (),
    ) -> Traced:
        jitted = jax.jit(fn, donate_argnums=donated, in_shardings=puts, out_shardings=gives)
        return self._noted(name, jitted.trace(*args))

    def _noted(self, name: str, traced: Traced) -> Traced:
        self.shapes[name] = traced.out_info
        self._largest[name] = largest_made(traced.jaxpr.jaxpr)
        return traced

    @property
    def begun(self) -> Run:
        """The shapes of a run before the first round."""
        seeds = np.zeros(self.runs, np.uint32)
        weights = jax.eval_shape(jax.vmap(lambda _: self.model.init(jax.random.key(0))), seeds)
        run: Run = jax.eval_shape(self._begin, seeds, weights, self.data)
        return run

    @property
    def _of_run(self) -> tuple[Any, ...]:
        """Axes of what each run has: key, state, data."""
        return 0, self._axes.state, self._axes.data

    def _map(self, fn: Callable[..., Any], in_axes: Any, out_axes: Any = 0) -> Callable[..., Any]:
        """``fn(algorithm, ...)`` for each run, with the algorithm of each."""

        def ordered(algorithm: Algorithm, *args: Any) -> Any:
            with in_order(self.execution.mesh):
                return fn(algorithm, *args)

        if self.varied is None:
            return self._axes.map(functools.partial(ordered, self.algorithm), in_axes, out_axes)
        point, at = self.varied.point, self.varied.at

        def of_point(point: Array, *args: Any) -> Any:
            return ordered(at(point).on(self.algorithm.parts.execution), *args)

        return functools.partial(self._axes.map(of_point, (0, *in_axes), out_axes), point)

    def _begin(self, seeds: Array, weights: Variables, data: ClientData) -> Run:
        def begin(algorithm: Algorithm, seed: Array, start: Variables, data: ClientData) -> PyTree:
            run_key = stream(jax.random.key(seed), Seed.ROUNDS)
            return run_key, algorithm.init(run_key, start, data)

        all_runs = self._map(begin, (0, 0, self._axes.data), (0, self._axes.state))
        return self.layout.padded(Run(*all_runs(seeds, weights, data)))

    def _advance(
        self, run: Run, data: ClientData, sets: Sets, todo: Array
    ) -> tuple[Run, Metrics, Unscored]:
        run, rows = self._rounds(run, data, todo)
        return run, rows, self._models(run, data, sets)

    def _rounds(self, run: Run, data: ClientData, todo: Array) -> tuple[Run, Metrics]:
        keys, state = self.layout.stripped(run)
        step = jax.jit(self._step, inline=True)  # traced once, for its shapes and in the loop
        shape = jax.eval_shape(step, keys, state, data)[1]
        rows = jax.tree.map(
            lambda s: jnp.zeros((self.runs, self.every, *s.shape[1:]), s.dtype), shape
        )

        # A bound that is data: a shorter last stretch needs no program of its own.
        def body(i: Array, carry: tuple[FedState, Metrics]) -> tuple[FedState, Metrics]:
            state, rows = carry
            state, new = step(keys, state, data)
            put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=i, axis=1)
            return state, jax.tree.map(put, rows, new)  # a scatter would be a loop on CPU

        state, rows = jax.lax.fori_loop(0, todo, body, (state, rows))
        return self.layout.padded(Run(keys, state)), rows

    @property
    def _step(self) -> Callable[[Array, FedState, ClientData], tuple[FedState, Metrics]]:
        return self._map(_at_round(Algorithm.step), self._of_run, (self._axes.state, 0))

    def cohorts(self, run: Run, data: ClientData, rounds: int) -> NDArray[np.int32]:
        """The clients of the next rounds, ``int32[R, rounds, S]``; N for none. Nobody trains.

        Raises:
            ValueError: if who comes depends on what clients say or on what was trained.
        """

        def drawn(run: Run, data: ClientData) -> Array:
            def body(state: FedState, _: None) -> tuple[FedState, Array]:
                state, metrics = self._step(keys, state, data)
                return state, metrics.client

            keys, state = self.layout.stripped(run)
            return jax.lax.scan(body, state, length=rounds)[1]

        assert self.windows is not None
        draw = foreseen(drawn, self.algorithm, run, data, self.windows.setting)
        return np.asarray(draw(run, data)).swapaxes(0, 1)

    def _models(self, run: Run, data: ClientData, sets: Sets) -> Unscored:
        run = self.layout.stripped(run)
        evaluated = self._map(_at_round(Algorithm.evaluated), self._of_run)
        return self._unscored(evaluated(run.keys, run.state, data), run, data, sets)

    def _collect(self, run: Run, data: ClientData, sets: Sets) -> tuple[Array, Unscored]:
        run = self.layout.stripped(run)
        gather = self._map(_at_round(Algorithm.collect), self._of_run)
        variables, uploads = gather(run.keys, run.state, data)
        run = Run(run.keys, run.state._replace(server=variables))
        return uploads, self._unscored(variables, run, data, sets)

    def _unscored(self, variables: Variables, run: Run, data: ClientData, sets: Sets) -> Unscored:
        if not self.personal or self.hosted:
            return Unscored(variables, None)
        return Unscored(variables, self._count(self._own(run, data, sets), sets))

    def _own(self, run: Run, data: ClientData, sets: Sets, clients: Array | None = None) -> PyTree:
        """The answers of the own models of these clients, or of all."""
        run, most = self.layout.stripped(run), int(np.diff(self.sets[0].start).max())

        def answers(
            algorithm: Algorithm,
            key: Array,
            state: FedState,
            data: ClientData,
            examples: EvalSet,
            clients: Array | None,
        ) -> PyTree:
            key = jax.random.fold_in(key, state.round)
            own = functools.partial(algorithm.score_personal, key, state, data)
            return own_answers(
                self.model.apply, self.task, own, examples, most=most, clients=clients
            )

        of_runs = self._map(answers, (*self._of_run, self._axes.sets[0], None))
        return of_runs(run.keys, run.state, data, sets[0], clients)

    def _count(self, found: PyTree, sets: Sets) -> Counts:
        count = functools.partial(count_own, self.task)
        counts: Counts = self._axes.map(count, (0, self._axes.sets[0]))(found, sets[0])
        return counts


def _at_round(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn(algorithm, key, state, data)`` with the key of the round, of the run's."""
    return lambda algorithm, key, state, data: fn(
        algorithm, jax.random.fold_in(key, state.round), state, data
    )
