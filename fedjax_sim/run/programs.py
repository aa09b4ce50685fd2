"""The XLA programs of one experiment, all its runs (seeds, folds) on one more leading axis."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding
from jax.stages import Lowered, Traced
from numpy.typing import NDArray

from fedjax_sim.base import Array, ClientData, FedState, Model, PyTree, Task, Variables
from fedjax_sim.engine import tree
from fedjax_sim.engine.effort import step_flops
from fedjax_sim.engine.execution import Execution
from fedjax_sim.engine.memory import check_room, largest_made
from fedjax_sim.engine.targets import options_for
from fedjax_sim.round import Algorithm
from fedjax_sim.round.placement import client_steps, fitted
from fedjax_sim.run.axes import RunAxes
from fedjax_sim.run.client_memory import check_unread, rows_that_fit
from fedjax_sim.run.foreseen import foreseen
from fedjax_sim.run.functions import Functions, Sets, functions_for
from fedjax_sim.run.inputs import drawing
from fedjax_sim.run.layout import Layout, bare, shapes_for
from fedjax_sim.run.scoring import scoring
from fedjax_sim.run.stages import Collected, Run, Scored
from fedjax_sim.run.varied import Varied
from fedjax_sim.run.windows import Windows

ONCE = ("weights", "start")
"""The programs before the first round, which run once and not for long."""

BRIEF = 2e11
"""FLOPs of training up to which a run compiles quickly: two to three seconds of a core."""

_FEWEST_ROWS, _MOST_ROWS = 16, 1024
"""``advance`` has room for the records of a power of two of rounds, between these two.

Another ``eval_every`` then seldom needs another program.
"""


class Programs:
    """What the programs compute; :class:`fedjax_sim.run.experiment.Experiment` runs them.

    At most five: weights, start, advance, evaluate, and finish if models are in flight or the
    algorithm has a finish. ``advance`` takes the number of rounds as data. All experiments of a
    model share weights, and evaluate too if they score the same way; those of an algorithm share
    all. If samples or client states stay on the host, ``rounds`` runs on the data of a window, and
    ``models`` does what is left of ``advance``; if client states do, ``own`` scores the own models
    of some clients, and ``count`` adds up what all gave.

    Args:
        algorithm: what to run.
        model: the model that its local update trains.
        task: what the sets are scored by.
        data: the clients.
        sets: evaluation sets, e.g. (test, validation).
        runs: R.
        every: rounds from one evaluation to the next.
        execution: where and how it runs; None: as the algorithm was composed to.
        personal: whether the clients of the first set are those of ``data``: it is then scored with
          each client's own model too, if the algorithm has such.
        varied: what makes the algorithm of each run, if runs differ in more than their seeds;
          ``algorithm`` is then one of them.

    Attributes:
        algorithm: with lanes that fit the clients' sizes.
        windows: of samples or client states that stay on the host; None if all are on the devices.
        layout: of a run between two programs.
        hosted: whether what clients keep stays on the host.
        shapes: what start, advance and finish give with the scores, by name, once all is lowered.
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
        varied: Varied | None = None,
    ) -> None:
        there = algorithm if execution is None else algorithm.on(execution)
        self.algorithm = there.on(fitted(there.parts, data, runs))
        self.model, self.task, self.execution = model, task, there.parts.execution
        self.data, self.sets, self.runs, self.every = data, sets, runs, every
        self.personal = personal and algorithm.personal is not None
        self.varied = varied
        functions = Functions(
            self.algorithm,
            model,
            task,
            RunAxes.of(data, sets, runs),
            Layout(self.execution, data.clients),
            min(max(_FEWEST_ROWS, 1 << (every - 1).bit_length()), _MOST_ROWS),
            self.personal,
            int(np.diff(sets[0].start).max()) if self.personal else 0,
            varied,
        )
        rows, mb = None, self.execution.client_state_mb
        if mb is not None:
            rows = rows_that_fit(self._begun(functions), functions.layout, mb)
        self.hosted = rows is not None
        if rows is not None:
            layout = Layout(self.execution, rows.clients)
            functions = dataclasses.replace(functions, layout=layout, personal=False)
        self._functions = functions_for(algorithm, functions)
        self.layout = functions.layout
        self.windows = None
        if self.execution.samples_mb is not None or self.hosted:
            self.windows = Windows(data, self.execution.samples_mb, rows)
        self.shapes: dict[str, Any] = {}
        self._largest: dict[str, int] = {}
        self._step_flops = 0.0

    @property
    def most(self) -> int:
        """The most rounds that one call of ``advance`` runs."""
        return self._functions.capacity

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
        for name, traced in self._traced(weights):
            self._largest[name] = largest_made(traced.jaxpr.jaxpr)
            if name in ("advance", "rounds"):
                self._step_flops = step_flops(traced.jaxpr.jaxpr)
            yield name, traced.lower(lowering_platforms=given)

    def check(self) -> None:
        """Traces all that a run computes, which :meth:`lowered` then has; computes nothing.

        Raises:
            ValueError: if the algorithm does not fit the data, say lacks samples of the server's,
                or visits clients whose samples cannot be fetched in time.
        """
        runs = {name: traced.out_info for name, traced in self._traced(None)}
        if self.windows is not None:
            data = self.windows.fetched(None)
            foreseen(self._draw(2), self.algorithm, runs["start"], data, self.windows.setting)

    def _traced(self, weights: Variables | None) -> Iterator[tuple[str, Traced]]:
        try:
            yield from self._each_traced(weights)
        except OverflowError as error:  # no part has refused the number
            reason = str(error).partition("\n")[0]
            raise ValueError(f"a whole number is too large for the devices: {reason}") from error

    def _each_traced(self, weights: Variables | None) -> Iterator[tuple[str, Traced]]:
        of, windows = self._functions, self.windows
        whole, of_run = self.execution.replicated, self.layout.shardings

        def shapes(tree: PyTree, where: PyTree = whole) -> PyTree:
            def part(sharding: Sharding, values: PyTree) -> PyTree:
                shape = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
                return jax.tree.map(lambda a: shape(a.shape, a.dtype), values)

            return jax.tree.map(part, where, tree)

        data, sets = shapes((self.data, self.sets))
        if windows is not None:
            data, window = shapes((windows.fetched(None), windows.like()))
        seeds, todo, score = shapes((np.zeros(self.runs, np.uint32), np.int32(0), np.bool_(True)))
        if weights is None:
            draw = drawing(self.model.init, whole).trace(seeds)
            yield "weights", draw
        weights = shapes(draw.out_info if weights is None else weights)
        begin = of.start.trace(seeds, weights, data)
        held = tree.num_bytes(begin.out_info) // len(self.execution.devices)
        check_room("what the runs keep from round to round on a device would", held)
        self.shapes["start"] = begin.out_info
        yield "start", begin
        run = shapes(begin.out_info, of_run)
        counted = None  # of own models, by a program of its own
        if windows is None:
            advance = of.advance.trace(run, data, sets, todo, score)
            yield "advance", advance
            rows, unscored = advance.out_info[1:]
        else:
            rounds = of.rounds.trace(run, window, todo)
            yield "rounds", rounds
            rows = rounds.out_info[1]
            if self.hosted and self.algorithm.ends:
                args = run, data, sets
                check_unread(jax.make_jaxpr(of.collect)(*args).jaxpr, args)
            if self.hosted and self.personal:
                some = shapes(np.zeros(self.layout.clients, np.int32))
                own = of.own.trace(run, data, sets, some)
                yield "own", own
                count = of.count.trace(shapes(shapes_for(self.data.clients, own.out_info)), sets)
                yield "count", count
                counted = count.out_info
            run = bare(run) if self.hosted else run
            models = of.models.trace(run, data, sets)
            yield "models", models
            unscored = models.out_info
        score = scoring(self.model.apply, self.task, self.execution, of.axes)
        evaluate = score.trace(shapes(unscored.variables), sets)
        yield "evaluate", evaluate
        counted = unscored.personal if counted is None else counted
        scored = Scored(evaluate.out_info, counted)
        self.shapes["advance"] = begin.out_info, rows, scored
        if self.algorithm.ends:
            finish = of.finish.trace(run, data, sets)
            uploads, last = finish.out_info
            self.shapes["finish"] = Collected(last.variables, uploads, scored)
            yield "finish", finish

    def options(self, name: str, rounds: int | None = None) -> dict[str, Any] | None:
        """Returns XLA's options for a program that was just lowered.

        Programs that run once compile quickly, and so do all programs of a run that trains briefly.

        Args:
            name: of the program.
            rounds: of the whole run; None if they are not known.
        """
        trains = self.algorithm.parts.finish is not None or self.personal
        once = name in ONCE or (name == "finish" and not trains)
        quick = once or (rounds is not None and 0 < self._flops(rounds) < BRIEF)
        return options_for(self.execution.devices, quick=quick, largest=self._largest.get(name))

    def _flops(self, rounds: int) -> float:
        """Estimates the FLOPs of all local training; 0 if steps are not in a loop of their own."""
        visits = self.runs * rounds * self.algorithm.parts.slots
        return visits * self._mean_steps * self._step_flops

    @functools.cached_property
    def _mean_steps(self) -> float:
        """The local steps of a visit to the mean client."""
        return float(client_steps(self.algorithm.parts, self.data).mean())

    def _begun(self, functions: Functions) -> Run:
        """The shapes of a run before the first round."""
        seeds = np.zeros(self.runs, np.uint32)
        weights = jax.eval_shape(jax.vmap(lambda _: self.model.init(jax.random.key(0))), seeds)
        run: Run = jax.eval_shape(functions.begin, seeds, weights, self.data)
        return run

    def cohorts(self, run: Run, data: ClientData, rounds: int) -> NDArray[np.int32]:
        """The clients of the next rounds, ``int32[R, rounds, S]``; N for none. Nobody trains.

        Raises:
            ValueError: if who comes depends on what clients say or on what was trained.
        """
        assert self.windows is not None
        draw = foreseen(self._draw(rounds), self.algorithm, run, data, self.windows.setting)
        return np.asarray(draw(run, data)).swapaxes(0, 1)

    def _draw(self, rounds: int) -> Callable[[Run, ClientData], Array]:
        def drawn(run: Run, data: ClientData) -> Array:
            def body(state: FedState, _: None) -> tuple[FedState, Array]:
                state, metrics = self._functions.step(keys, state, data)
                return state, metrics.client

            keys, state = self.layout.stripped(run)
            return jax.lax.scan(body, state, length=rounds)[1]

        return drawn
