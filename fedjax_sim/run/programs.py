"""The XLA programs of one experiment; all its runs (seeds, folds) share a leading axis."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Sharding
from jax.stages import Lowered, Traced
from numpy.typing import NDArray

from fedjax_sim.base import Array, ClientData, FedState, Model, PyTree, Task, Variables, shown
from fedjax_sim.base.data import ElsewhereError
from fedjax_sim.engine import tree
from fedjax_sim.engine.execution import Execution
from fedjax_sim.engine.memory import (
    check_memory_for,
    compile_program,
    largest_new_array,
    step_flops,
)
from fedjax_sim.engine.reading import without_dead_code
from fedjax_sim.engine.targets import ProgramReport, options_for, program_report
from fedjax_sim.models.layers import outer_products
from fedjax_sim.round import Algorithm
from fedjax_sim.round.placement import client_steps, fitted, with_size_range
from fedjax_sim.run.cache import evaluation_program, weights_program
from fedjax_sim.run.client_memory import check_state_unread, rows_that_fit
from fedjax_sim.run.functions import Functions, PerRunSettings, Sets, functions_for, own_sizes
from fedjax_sim.run.layout import Layout, RunAxes, shapes_for, without_client_state
from fedjax_sim.run.prefetch import PrefetchBlocks
from fedjax_sim.run.records import Collected, Run, SetCounts

ONCE = ("weights", "start")
"""Programs before the first round, which run once and briefly."""

BRIEF = 2e11
"""FLOPs of training up to which a run compiles quickly: two to three seconds on one core."""

_FEWEST_ROWS, _MOST_ROWS = 16, 1024
"""Bounds of ``advance``'s capacity for records, a power of two of rounds.

A different ``eval_every`` then seldom needs another program.
"""


class Programs:
    """The programs of an experiment; :class:`fedjax_sim.run.runner.Runner` runs them.

    At most five: weights, start, advance, evaluate, and finish if models are in flight or the
    algorithm has a finish. ``advance`` takes the number of rounds as data. All experiments with a
    model share weights, and evaluate if they score the same way; those with an algorithm share
    all. If samples or client states stay on the host, ``rounds`` runs on the data of a prefetch
    block and ``models`` replaces the rest of ``advance``; with client states there, ``own`` scores
    the personal models of some clients, and ``count`` adds up all answers.

    Args:
        algorithm: the algorithm to run.
        model: the model that its local update trains.
        task: the task, by which the sets are scored.
        data: the clients.
        sets: evaluation sets, e.g. (test, validation).
        runs: R.
        every: rounds from one evaluation to the next.
        execution: where and how to run; None: as the algorithm was composed.
        personal: whether the sets have the clients of ``data``: they, and sets that adapt, are then
          also scored with personal models, if the algorithm has any.
        per_run: the algorithm of each run, if runs differ in more than their seeds; ``algorithm``
          is then one of them.

    Attributes:
        algorithm: the algorithm, with lanes that fit the clients' sizes.
        blocks: prefetch blocks of samples or client states that stay on the host; None if all are
            on the devices.
        layout: layout of a run between two programs.
        hosted: whether client states stay on the host.
        own_apart: whether separate programs score personal models, some clients at a time.
        shapes: results of start, advance and finish with the counts, by name, once all is lowered.
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
        execution: Execution | None = None,
        personal: bool = False,
        per_run: PerRunSettings | None = None,
    ) -> None:
        placed = algorithm if execution is None else algorithm.on(execution)
        self.algorithm = placed.on(fitted(placed.parts, model, data, runs))
        data = with_size_range(data, self.algorithm.parts.execution)
        self.model, self.task, self.execution = model, task, placed.parts.execution
        self.data, self.sets, self.runs, self.every = data, sets, runs, every
        adapts = sets[0].adapt is not None
        self.personal = (personal or adapts) and algorithm.personal is not None
        self.per_run = per_run
        functions = Functions(
            self.algorithm,
            model,
            task,
            RunAxes.of(data, sets, runs),
            Layout(self.execution, data.clients),
            min(max(_FEWEST_ROWS, 1 << (every - 1).bit_length()), _MOST_ROWS),
            self.personal,
            own_sizes(data, sets) if self.personal else (),
            per_run,
        )
        rows, mb = None, self.execution.client_state_mb
        if mb is not None:
            rows = rows_that_fit(self._start_shapes(functions), functions.layout, mb)
        self.hosted = rows is not None
        self.own_apart = self.hosted and self.personal and not adapts
        if rows is not None:
            layout, within = Layout(self.execution, rows.clients), self.personal and adapts
            functions = dataclasses.replace(functions, layout=layout, personal=within)
        if self.execution.model_devices > 1:
            functions = dataclasses.replace(functions, run=self._start_shapes(functions))
        self._functions = functions_for(algorithm, functions)
        self.layout = functions.layout
        self.blocks = None
        if self.execution.samples_mb is not None or self.hosted:
            self.blocks = PrefetchBlocks(data, self.execution.samples_mb, rows)
        self.shapes: dict[str, Any] = {}
        self._largest: dict[str, int] = {}
        self._step_flops = 0.0

    @property
    def scored(self) -> list[str]:
        """The sets and models that an evaluation scores, see :class:`fedjax_sim.Evaluation`."""
        sets = ["test", "validation"][: len(self.sets)]
        return sets + ["personal", "personal_validation"][: len(self._functions.largest)]

    @property
    def capacity(self) -> int:
        """The maximum number of rounds of one call of ``advance``."""
        return self._functions.capacity

    def lowered(
        self,
        platforms: Sequence[str] | None = None,
        weights: Variables | None = None,
        rounds: int | None = None,
    ) -> Iterator[tuple[str, Lowered]]:
        """Yields the programs by name, lowered for devices that may be absent.

        Nothing is placed and nothing runs; :meth:`jax.stages.Lowered.compile` compiles them.
        Platforms are "cpu", "cuda" or "tpu"; None: the platform of the devices.
        """
        on_cpu = platforms is None and self.execution.devices[0].platform == "cpu"
        for name, traced in self._traced(weights):
            self._largest[name] = largest_new_array(traced.jaxpr.jaxpr)
            if name in ("advance", "rounds"):
                self._step_flops = step_flops(traced.jaxpr.jaxpr)
            with outer_products(on_cpu and not self._quick(name, rounds)):
                lowered = traced.lower(lowering_platforms=tuple(platforms) if platforms else None)
            yield name, lowered

    def compiled_ahead(self) -> Iterator[ProgramReport]:
        """Compiles one program after another for their devices; nothing runs.

        Raises:
            TooLargeError: if a program does not fit in a device's memory.
        """
        began = time.perf_counter()
        for name, lowered in self.lowered():
            program = compile_program(lowered, self.options(name))
            yield program_report(name, time.perf_counter() - began, program)
            began = time.perf_counter()

    def check(self) -> None:
        """Traces all programs of a run; computes nothing.

        Raises:
            ValueError: if the algorithm does not fit the data: it needs samples at the server, or
              visits clients whose samples cannot be prefetched.
        """
        results = {name: traced.out_info for name, traced in self._traced(None)}
        if self.blocks is not None:
            self._cohort_program(results["start"], self.blocks.fetched(None), 2)

    def _traced(self, weights: Variables | None) -> Iterator[tuple[str, Traced]]:
        try:
            yield from self._each_traced(weights)
        except OverflowError as error:  # a number that no part has rejected
            reason = str(error).partition("\n")[0]
            raise ValueError(f"a whole number is too large for the devices: {reason}") from error

    def _each_traced(self, weights: Variables | None) -> Iterator[tuple[str, Traced]]:
        functions, blocks = self._functions, self.blocks
        jitted = functions.jitted
        shapes = functools.partial(_placed_shapes, self.execution.replicated)
        data, sets = shapes((self.data, self.sets))
        if blocks is not None:
            data, block = shapes((blocks.fetched(None), blocks.shapes()))
        seeds, todo, score = shapes((np.zeros(self.runs, np.uint32), np.int32(0), np.bool_(True)))
        if weights is None:
            draw = weights_program(self.model.init, self.execution).trace(seeds)
            yield "weights", draw
        weights = draw.out_info if weights is None else weights
        split = self.execution.shardings(weights, None)
        weights = _placed_shapes(split, weights)
        start = jitted["start"].trace(seeds, weights, data)
        held = tree.num_bytes(start.out_info) // len(self.execution.devices)
        check_memory_for("the state of the runs on one device would", held)
        self.shapes["start"] = start.out_info
        yield "start", start
        run = _placed_shapes(self.layout.shardings(start.out_info), start.out_info)
        personal = None  # counts of personal models, by a program of their own
        if blocks is None:
            advance = jitted["advance"].trace(run, data, sets, todo, score)
            yield "advance", advance
            rows, models = advance.out_info[1:]
        else:
            rounds = jitted["rounds"].trace(run, block, todo)
            yield "rounds", rounds
            rows = rounds.out_info[1]
            if self.hosted and self.algorithm.ends:
                args = run, data, sets
                check_state_unread(jax.make_jaxpr(functions.collect)(*args).jaxpr, args)
            if self.own_apart:
                some = shapes(np.zeros(self.layout.clients, np.int32))
                own = jitted["own"].trace(run, data, sets, some)
                yield "own", own
                answers = shapes(shapes_for(self.data.clients, own.out_info))
                count = jitted["count"].trace(answers, sets)
                yield "count", count
                personal = count.out_info
            run = without_client_state(run) if self.hosted else run
            models_program = jitted["models"].trace(run, data, sets)
            yield "models", models_program
            models = models_program.out_info
        evaluation = evaluation_program(self.model.apply, self.task, self.execution, functions.axes)
        evaluate = evaluation.trace(_placed_shapes(split, models.variables), sets)
        yield "evaluate", evaluate
        personal = models.personal if personal is None else personal
        counts = SetCounts(evaluate.out_info, *(personal or ()))
        self.shapes["advance"] = start.out_info, rows, counts
        if self.algorithm.ends:
            finish = jitted["finish"].trace(run, data, sets)
            uploads, last = finish.out_info
            self.shapes["finish"] = Collected(last.variables, uploads, counts)
            yield "finish", finish

    def options(self, name: str, rounds: int | None = None) -> dict[str, Any] | None:
        """Returns XLA's options for a program that was just lowered."""
        quick, largest = self._quick(name, rounds), self._largest.get(name)
        return options_for(self.execution.devices, quick=quick, largest=largest)

    def _quick(self, name: str, rounds: int | None) -> bool:
        """Returns whether to compile with less effort: the program runs once, or trains briefly."""
        trains = self.algorithm.parts.finish is not None or self.personal
        once = name in ONCE or (name == "finish" and not trains)
        return once or (rounds is not None and 0 < self._flops(rounds) < BRIEF)

    def _flops(self, rounds: int) -> float:
        """Estimates the FLOPs of all local training; 0 if steps are not in a loop of their own."""
        visits = self.runs * rounds * self.algorithm.parts.slots
        return visits * self._mean_steps * self._step_flops

    @functools.cached_property
    def _mean_steps(self) -> float:
        """Mean number of local steps over the clients."""
        return float(client_steps(self.algorithm.parts, self.data).mean())

    def _start_shapes(self, functions: Functions) -> Run:
        """Returns the shapes of a run before the first round."""
        seeds = np.zeros(self.runs, np.uint32)
        weights = jax.eval_shape(jax.vmap(lambda _: self.model.init(jax.random.key(0))), seeds)
        run: Run = jax.eval_shape(functions.begin, seeds, weights, self.data)
        return run

    def cohorts(self, run: Run, data: ClientData, rounds: int) -> NDArray[np.int32]:
        """Predicts the clients of the next rounds, ``int32[R, rounds, S]``; N for an empty slot."""
        draw = self._cohort_program(run, data, rounds)
        return np.asarray(draw(run, data)).swapaxes(0, 1)

    def _cohort_program(
        self, run: Run, data: ClientData, rounds: int
    ) -> Callable[[Run, ClientData], Array]:
        """Returns a program of the next rounds' cohorts from which training is eliminated.

        Raises:
            ElsewhereError: if the cohorts depend on samples; names the selection.
        """

        def draw(run: Run, data: ClientData) -> Array:
            def body(state: FedState, _: None) -> tuple[FedState, Array]:
                state, metrics = self._functions.step(keys, state, data)
                return state, metrics.client

            keys, state = self.layout.stripped(run)
            return jax.lax.scan(body, state, length=rounds)[1]

        assert self.blocks is not None
        traced = jax.jit(draw).trace(run, data).jaxpr
        rest, used = without_dead_code(traced.jaxpr, (run, data))
        of_data = used[1]
        if any(jax.tree.leaves((of_data.x, of_data.y, of_data.index))):
            parts = self.algorithm.parts
            clock = "" if parts.clock is None else f" with clock {shown(parts.clock)}"
            raise ElsewhereError(
                f"{self.blocks.setting} needs cohorts that are known before anyone trains, such as "
                f"those of uniform(); selection {shown(parts.selection)}{clock} depends on training"
            )
        program = jax.jit(jaxpr_as_fun(ClosedJaxpr(rest, traced.consts)))
        needs = jax.tree.leaves(used)

        def call(run: Run, data: ClientData) -> Array:
            leaves = jax.tree.leaves((run, data))
            out: Array = program(*(a for a, need in zip(leaves, needs, strict=True) if need))[0]
            return out

        return call


def _placed_shapes(shardings: PyTree, values: PyTree) -> PyTree:
    """Returns the shapes of arrays on the devices; ``shardings`` is their prefix."""

    def placed(sharding: Sharding, part: PyTree) -> PyTree:
        shape = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
        return jax.tree.map(lambda a: shape(a.shape, a.dtype), part)

    return jax.tree.map(placed, shardings, values)
