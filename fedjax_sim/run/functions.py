"""What the programs of an experiment compute, whatever the arrays that they are given."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

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
from fedjax_sim.engine.order import in_order
from fedjax_sim.engine.streams import Seed, stream
from fedjax_sim.round import Algorithm
from fedjax_sim.run.axes import RunAxes
from fedjax_sim.run.inputs import shared
from fedjax_sim.run.layout import Layout
from fedjax_sim.run.metrics import Counts, count_own, own_answers
from fedjax_sim.run.stages import Run, Unscored
from fedjax_sim.run.varied import Varied

Sets = tuple[EvalSet, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Functions:
    """The functions of an experiment, jitted; :class:`fedjax_sim.run.programs.Programs` has arrays.

    JAX knows what it has traced and compiled of a function as long as the function lives:
    :func:`functions_for` gives the same ones again.

    Attributes:
        algorithm: with lanes that fit the clients' sizes.
        model: the model that its local update trains.
        task: what the sets are scored by.
        axes: of the runs.
        layout: of a run between two programs.
        capacity: the most rounds that one ``advance`` may run.
        personal: whether rounds and the end score own models, which ``own`` and ``count`` else do.
        most: samples of the largest client of the first set.
        varied: what makes the algorithm of each run, if they differ.
    """

    algorithm: Algorithm
    model: Model
    task: Task
    axes: RunAxes
    layout: Layout
    capacity: int
    personal: bool
    most: int
    varied: Varied | None = None

    @functools.cached_property
    def start(self) -> Any:
        """``(seeds, weights, data)``, the runs before the first round."""
        run, whole = self._places
        return jax.jit(self.begin, in_shardings=(whole, whole, whole), out_shardings=run)

    @functools.cached_property
    def advance(self) -> Any:
        """``(run, data, sets, todo, score)``: so many rounds, and the models that they lead to.

        Own models are scored if ``score`` is true.
        """
        run, whole = self._places
        puts, gives = (run, whole, whole, whole, whole), (run, whole, whole)
        return jax.jit(self._advance, donate_argnums=0, in_shardings=puts, out_shardings=gives)

    @functools.cached_property
    def rounds(self) -> Any:
        """``(run, data, todo)``, the rounds alone."""
        run, whole = self._places
        puts, gives = (run, whole, whole), (run, whole)
        return jax.jit(self._rounds, donate_argnums=0, in_shardings=puts, out_shardings=gives)

    @functools.cached_property
    def models(self) -> Any:
        """``(run, data, sets)``, the models alone."""
        run, whole = self._places
        return jax.jit(self._models, in_shardings=(run, whole, whole), out_shardings=whole)

    @functools.cached_property
    def finish(self) -> Any:
        """``(run, data, sets)``, the uploads of the end and the models after it."""
        run, whole = self._places
        return jax.jit(self.collect, in_shardings=(run, whole, whole), out_shardings=whole)

    @functools.cached_property
    def own(self) -> Any:
        """``(run, data, sets, clients)``, the answers of the own models of some clients."""
        run, whole = self._places
        return jax.jit(self._own, in_shardings=(run, whole, whole, whole), out_shardings=whole)

    @functools.cached_property
    def count(self) -> Any:
        """``(answers, sets)``, what the answers of all clients add up to."""
        _, whole = self._places
        return jax.jit(self._count, in_shardings=(whole, whole), out_shardings=whole)

    @property
    def _places(self) -> tuple[Any, Any]:
        """Of a run, and of what is whole on every device."""
        return self.layout.shardings, self.layout.execution.replicated

    @property
    def _of_run(self) -> tuple[Any, ...]:
        """Axes of what each run has: key, state, data."""
        return 0, self.axes.state, self.axes.data

    def _map(self, fn: Callable[..., Any], in_axes: Any, out_axes: Any = 0) -> Callable[..., Any]:
        """``fn(algorithm, ...)`` for each run, with the algorithm of each."""

        def ordered(algorithm: Algorithm, *args: Any) -> Any:
            with in_order(self.layout.execution.mesh):
                return fn(algorithm, *args)

        if self.varied is None:
            return self.axes.map(functools.partial(ordered, self.algorithm), in_axes, out_axes)
        point, at = self.varied.point, self.varied.at

        def of_point(point: Array, *args: Any) -> Any:
            return ordered(at(point).on(self.algorithm.parts.execution), *args)

        return functools.partial(self.axes.map(of_point, (0, *in_axes), out_axes), point)

    def begin(self, seeds: Array, weights: Variables, data: ClientData) -> Run:
        """What ``start`` computes."""

        def begin(algorithm: Algorithm, seed: Array, start: Variables, data: ClientData) -> PyTree:
            run_key = stream(jax.random.key(seed), Seed.ROUNDS)
            return run_key, algorithm.init(run_key, start, data)

        all_runs = self._map(begin, (0, 0, self.axes.data), (0, self.axes.state))
        return self.layout.padded(Run(*all_runs(seeds, weights, data)))

    def _advance(
        self, run: Run, data: ClientData, sets: Sets, todo: Array, score: Array
    ) -> tuple[Run, Metrics, Unscored]:
        run, rows = self._rounds(run, data, todo)
        if not self.personal:
            return run, rows, self._models(run, data, sets)

        def unscored(*given: Any) -> Unscored:
            shapes = jax.eval_shape(self._models, *given)
            return cast(Unscored, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes))

        return run, rows, jax.lax.cond(score, self._models, unscored, run, data, sets)

    def _rounds(self, run: Run, data: ClientData, todo: Array) -> tuple[Run, Metrics]:
        keys, state = self.layout.stripped(run)
        step = jax.jit(self.step, inline=True)  # traced once, for its shapes and in the loop
        shape = jax.eval_shape(step, keys, state, data)[1]
        rows = jax.tree.map(
            lambda s: jnp.zeros((self.axes.runs, self.capacity, *s.shape[1:]), s.dtype), shape
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
    def step(self) -> Callable[[Array, FedState, ClientData], tuple[FedState, Metrics]]:
        """A round of all runs, ``(keys, state, data)``."""
        return self._map(_at_round(Algorithm.step), self._of_run, (self.axes.state, 0))

    def _models(self, run: Run, data: ClientData, sets: Sets) -> Unscored:
        run = self.layout.stripped(run)
        evaluated = self._map(_at_round(Algorithm.evaluated), self._of_run)
        return self._unscored(evaluated(run.keys, run.state, data), run, data, sets)

    def collect(self, run: Run, data: ClientData, sets: Sets) -> tuple[Array, Unscored]:
        """What ``finish`` computes."""
        run = self.layout.stripped(run)
        gather = self._map(_at_round(Algorithm.collect), self._of_run)
        variables, uploads = gather(run.keys, run.state, data)
        run = Run(run.keys, run.state._replace(server=variables))
        return uploads, self._unscored(variables, run, data, sets)

    def _unscored(self, variables: Variables, run: Run, data: ClientData, sets: Sets) -> Unscored:
        if not self.personal:
            return Unscored(variables, None)
        return Unscored(variables, self._count(self._own(run, data, sets), sets))

    def _own(self, run: Run, data: ClientData, sets: Sets, clients: Array | None = None) -> PyTree:
        """The answers of the own models of these clients, or of all."""
        run = self.layout.stripped(run)

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
                self.model.apply, self.task, own, examples, most=self.most, clients=clients
            )

        of_runs = self._map(answers, (*self._of_run, self.axes.sets[0], None))
        return of_runs(run.keys, run.state, data, sets[0], clients)

    def _count(self, found: PyTree, sets: Sets) -> Counts:
        count = functools.partial(count_own, self.task)
        counts: Counts = self.axes.map(count, (0, self.axes.sets[0]))(found, sets[0])
        return counts


def functions_for(algorithm: Algorithm, made: Functions) -> Functions:
    """The functions ``made``, or those that were made alike for the same algorithm before.

    So another experiment with an algorithm, other seeds say, is neither traced nor compiled again.

    Args:
        algorithm: the user's, as long as which they live; ``made.algorithm`` is another object.
        made: what is asked for.
    """
    axes, structure = jax.tree.flatten((made.axes.data, made.axes.sets))
    key = (
        made.algorithm.parts.execution,
        made.model,
        made.task,
        (made.axes.runs, tuple(axes), structure),
        (made.layout, made.capacity, made.personal, made.most, made.varied),
    )
    return shared(algorithm, key, lambda _: made)


def _at_round(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn(algorithm, key, state, data)`` with the key of the round, of the run's."""
    return lambda algorithm, key, state, data: fn(
        algorithm, jax.random.fold_in(key, state.round), state, data
    )
