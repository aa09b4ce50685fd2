"""The functions behind the programs of an experiment, for any arrays."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Array, ClientData, FedState, Metrics, Model, PyTree, Task, Variables
from fedjax_sim.data import EvalSet
from fedjax_sim.engine.order import in_order
from fedjax_sim.engine.streams import Seed, stream
from fedjax_sim.round import Algorithm
from fedjax_sim.run.cache import shared_program
from fedjax_sim.run.layout import Layout, RunAxes
from fedjax_sim.run.metrics import Answers, Counts, count_own, own_answers
from fedjax_sim.run.records import EvaluatedModels, Run

Sets = tuple[EvalSet, ...]


@dataclasses.dataclass(frozen=True)
class PerRunSettings:
    """The algorithm of each of R runs of one program.

    Attributes:
        make: function that makes an algorithm from settings, which may be traced.
        settings: settings by name, one mapping for each setting of the grid.
        index: ``int32[R]``, index into ``settings`` of each run.
    """

    make: Callable[..., Algorithm]
    settings: Sequence[Mapping[str, float]]
    index: NDArray[np.int32]

    def algorithm(self, index: Array) -> Algorithm:
        """Returns the algorithm of a run, by its traced ``index int32[]``.

        >>> ours = PerRunSettings(dict, [{"mu": 0.0}, {"mu": 0.5}], np.array([0, 1], np.int32))
        >>> jax.vmap(ours.algorithm)(ours.index)["mu"].tolist()
        [0.0, 0.5]
        """
        return self.make(**{name: self._value(name, index) for name in self.settings[0]})

    def _value(self, name: str, index: Array) -> Array:
        # A choice among Python floats is weakly typed, as they are: it takes the weights' dtype.
        value: Array = self.settings[0][name]  # type: ignore[assignment]
        for i, settings in enumerate(self.settings[1:], 1):
            value = jnp.where(index == i, settings[name], value)
        return value


@dataclasses.dataclass(frozen=True, eq=False)
class Functions:
    """The jitted functions of an experiment; :class:`fedjax_sim.run.programs.Programs` has arrays.

    JAX keeps the traces and programs of a function as long as the function lives:
    :func:`functions_for` returns the same functions again.

    Attributes:
        algorithm: the algorithm, with lanes that fit the clients' sizes.
        model: the model that its local update trains.
        task: the task, by which the sets are scored.
        axes: axes of the runs.
        layout: layout of a run between two programs.
        capacity: the maximum number of rounds of one ``advance``.
        personal: whether rounds and the end score personal models; else ``own`` and ``count`` do.
        largest: number of samples of the largest client of each set on which personal models are
          scored.
        per_run: the algorithm of each run, if they differ.
        run: shapes of a run, if groups of devices train a model.
    """

    algorithm: Algorithm
    model: Model
    task: Task
    axes: RunAxes
    layout: Layout
    capacity: int
    personal: bool
    largest: tuple[int, ...]
    per_run: PerRunSettings | None = None
    run: Run | None = None

    @functools.cached_property
    def jitted(self) -> dict[str, Any]:
        """The functions by the names of their programs, jitted."""
        run, whole = self.layout.shardings(self.run), cast(Any, self.layout.execution.replicated)
        models = EvaluatedModels(run.state.server, whole)
        shardings: dict[str, tuple[Callable[..., Any], Any, Any]] = {
            "start": (self.begin, (whole, run.state.server, whole), run),
            "advance": (self._advance, (run, whole, whole, whole, whole), (run, whole, models)),
            "rounds": (self._rounds, (run, whole, whole), (run, whole)),
            "models": (self._models, (run, whole, whole), models),
            "finish": (self.collect, (run, whole, whole), (whole, models)),
            "own": (self._own, (run, whole, whole, whole), whole),
            "count": (self._count, (whole, whole), whole),
        }
        return {
            name: jax.jit(
                fn,
                donate_argnums=0 if name in ("advance", "rounds") else (),
                in_shardings=given,
                out_shardings=returned,
            )
            for name, (fn, given, returned) in shardings.items()
        }

    @property
    def _run_axes(self) -> tuple[Any, ...]:
        """Axes of the key, the state and the data."""
        return 0, self.axes.state, self.axes.data

    def _map(self, fn: Callable[..., Any], in_axes: Any, out_axes: Any = 0) -> Callable[..., Any]:
        """Maps ``fn(algorithm, ...)`` over the runs, with the algorithm of each."""

        def ordered(algorithm: Algorithm, *args: Any) -> Any:
            with in_order(self.layout.execution.mesh):
                return fn(algorithm, *args)

        if self.per_run is None:
            return self.axes.map(functools.partial(ordered, self.algorithm), in_axes, out_axes)
        index, algorithm = self.per_run.index, self.per_run.algorithm

        def of_run(index: Array, *args: Any) -> Any:
            return ordered(algorithm(index).on(self.algorithm.parts.execution), *args)

        return functools.partial(self.axes.map(of_run, (0, *in_axes), out_axes), index)

    def begin(self, seeds: Array, weights: Variables, data: ClientData) -> Run:
        """Returns the runs before the first round."""

        def begin(algorithm: Algorithm, seed: Array, start: Variables, data: ClientData) -> PyTree:
            run_key = stream(jax.random.key(seed), Seed.ROUNDS)
            return run_key, algorithm.init(run_key, start, data)

        all_runs = self._map(begin, (0, 0, self.axes.data), (0, self.axes.state))
        return self.layout.padded(Run(*all_runs(seeds, weights, data)))

    def _advance(
        self, run: Run, data: ClientData, sets: Sets, todo: Array, score: Array
    ) -> tuple[Run, Metrics, EvaluatedModels]:
        """Runs rounds and returns the models; scores personal models if ``score`` is true."""
        run, rows = self._rounds(run, data, todo)
        if not self.personal:
            return run, rows, self._models(run, data, sets)

        def zeros(*args: Any) -> EvaluatedModels:
            shapes = jax.eval_shape(self._models, *args)
            return cast(
                EvaluatedModels, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
            )

        return run, rows, jax.lax.cond(score, self._models, zeros, run, data, sets)

    def _rounds(self, run: Run, data: ClientData, todo: Array) -> tuple[Run, Metrics]:
        keys, state = self.layout.stripped(run)
        step = jax.jit(self.step, inline=True)  # traced once, for its shapes and in the loop
        shape = jax.eval_shape(step, keys, state, data)[1]
        rows = jax.tree.map(
            lambda s: jnp.zeros((self.axes.runs, self.capacity, *s.shape[1:]), s.dtype), shape
        )

        # The bound is data: fewer rounds at the end need no program of their own.
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
        return self._map(_with_round_key(Algorithm.step), self._run_axes, (self.axes.state, 0))

    def _models(self, run: Run, data: ClientData, sets: Sets) -> EvaluatedModels:
        run = self.layout.stripped(run)
        evaluated = self._map(_with_round_key(Algorithm.evaluated), self._run_axes)
        return self._with_personal(evaluated(run.keys, run.state, data), run, data, sets)

    def collect(self, run: Run, data: ClientData, sets: Sets) -> tuple[Array, EvaluatedModels]:
        """Returns the uploads after the last round and the final models."""
        run = self.layout.stripped(run)
        collect = self._map(_with_round_key(Algorithm.collect), self._run_axes)
        variables, uploads = collect(run.keys, run.state, data)
        run = Run(run.keys, run.state._replace(server=variables))
        return uploads, self._with_personal(variables, run, data, sets)

    def _with_personal(
        self, variables: Variables, run: Run, data: ClientData, sets: Sets
    ) -> EvaluatedModels:
        if not self.personal:
            return EvaluatedModels(variables, None)
        return EvaluatedModels(variables, self._count(self._own(run, data, sets), sets))

    def _own(self, run: Run, data: ClientData, sets: Sets, clients: Array | None = None) -> PyTree:
        """Returns the answers of the personal models of these clients, or of all, to each set."""
        run, scored = self.layout.stripped(run), len(self.largest)

        def answers(
            algorithm: Algorithm,
            key: Array,
            state: FedState,
            data: ClientData,
            sets: Sets,
            clients: Array | None,
        ) -> PyTree:
            key = jax.random.fold_in(key, state.round)

            def of(some: Sets, most: Sequence[int], adapt: ClientData | None) -> PyTree:
                own = functools.partial(algorithm.score_personal, key, state, data, adapt=adapt)
                return own_answers(
                    self.model.apply, self.task, own, some, most=most, clients=clients
                )

            if sets[0].adapt is None:
                return of(sets, self.largest, None)
            each = zip(sets, self.largest, strict=True)  # the clients of a set are its own
            return tuple(of((one,), (most,), one.adapt)[0] for one, most in each)

        all_runs = self._map(answers, (*self._run_axes, tuple(self.axes.sets[:scored]), None))
        return all_runs(run.keys, run.state, data, sets[:scored], clients)

    def _count(self, answers: Sequence[Answers], sets: Sets) -> tuple[Counts, ...]:
        count = functools.partial(count_own, self.task)
        return tuple(
            self.axes.map(count, (0, axes))(of_set, examples)
            for of_set, examples, axes in zip(answers, sets, self.axes.sets, strict=False)
        )


def own_sizes(data: ClientData, sets: Sets) -> tuple[int, ...]:
    """Returns the number of samples of the largest client in each set with personal models.

    These are sets of the clients of ``data``, or of clients that adapt, but not pooled sets. The
    first set is one of them.
    """
    if sets[0].adapt is not None:
        own = [examples for examples in sets if examples.adapt is not None]
    else:
        own = [sets[0], *(examples for examples in sets[1:] if examples.clients == data.clients)]
    return tuple(int(np.diff(examples.start).max()) for examples in own)


def functions_for(algorithm: Algorithm, made: Functions) -> Functions:
    """Returns ``made``, or equal functions that were made earlier for the same algorithm.

    Another experiment with the algorithm, such as with other seeds, is then neither traced nor
    compiled. The user's algorithm keeps the functions alive; ``made.algorithm`` is another object.
    """
    axes, structure = jax.tree.flatten((made.axes.data, made.axes.sets))
    key = (
        made.algorithm.parts.execution,
        made.model,
        made.task,
        (made.axes.runs, tuple(axes), structure),
        (made.layout, made.capacity, made.personal, made.largest, made.per_run),
    )
    return shared_program(algorithm, key, lambda _: made)


def _with_round_key(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Folds the round number into the key of ``fn(algorithm, key, state, data)``."""
    return lambda algorithm, key, state, data: fn(
        algorithm, jax.random.fold_in(key, state.round), state, data
    )
