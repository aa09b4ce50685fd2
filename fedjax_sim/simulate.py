"""Runs an algorithm: a few XLA programs for the whole experiment, all seeds at once."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim import tree
from fedjax_sim.base import Algorithm, Array, ClientData, FedState, LossFn, Metrics, Model
from fedjax_sim.execution import Execution, make_execution
from fedjax_sim.losses import Tally, cross_entropy
from fedjax_sim.metrics import evaluate


class Evaluation(NamedTuple):
    """What is known after some rounds; the leading axis R is seeds.

    Attributes:
        round: rounds done.
        correct: ``int32[R, M]``, right answers on the test set by class.
        total: ``int32[R, M]``, test samples by class.
        test_loss: ``f64[R]``, mean.
        train_loss: ``f64[R]``, mean local training loss of the last round.
        uploads: ``int64[R]``, models sent by clients so far.
        downloads: ``int64[R]``, models sent to clients so far.
        uncollected: accuracy ``f64[R]`` before the models still in flight were collected, at the
          end of a run that has any; else None.
    """

    round: int
    correct: NDArray[np.int32]
    total: NDArray[np.int32]
    test_loss: NDArray[np.float64]
    train_loss: NDArray[np.float64]
    uploads: NDArray[np.int64]
    downloads: NDArray[np.int64]
    uncollected: NDArray[np.float64] | None = None

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """``f64[R]``, fraction of right answers on the test set."""
        return np.asarray(self.correct.sum(axis=1) / self.total.sum(axis=1))


@dataclasses.dataclass
class Result:
    """A finished run.

    Attributes:
        evaluations: in order of rounds.
        variables: ``[R, *p]``, the final models.
        samples: training samples visited, over all seeds.
        steps: local steps that trained.
        executed: local steps that the devices ran, idle lanes included.
        model_bytes: bytes of one model (params and state).
        compile_seconds: tracing, lowering and XLA.
        run_seconds: the rest.
        xla_programs: programs compiled or fetched from the compilation cache.
    """

    evaluations: list[Evaluation]
    variables: Any
    samples: int
    steps: int
    executed: int
    model_bytes: int
    compile_seconds: float
    run_seconds: float
    xla_programs: int

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """``f64[evaluations, R]``."""
        return np.stack([e.accuracy for e in self.evaluations])


class DivergedError(FloatingPointError):
    """A loss became NaN or infinite."""


def simulate(
    algorithm: Algorithm,
    model: Model,
    data: ClientData,
    test: tuple[Any, Any],
    *,
    rounds: int,
    classes: int,
    seeds: Sequence[int] = (0,),
    eval_every: int = 1,
    loss: LossFn = cross_entropy,
    execution: Execution | None = None,
    on_evaluation: Callable[[Evaluation], None] | None = None,
) -> Result:
    """Runs ``rounds`` rounds for every seed, and evaluates the server model on the way.

    Rounds between two evaluations are one XLA program, and seeds are one more leading axis of it.

    Args:
        algorithm: e.g. :func:`fedjax_sim.fedavg`.
        model: the model that its local update trains.
        data: the clients; ``start`` may be ``[R, N + 1]``, a partition for each seed.
        test: (x, y) of the test set.
        rounds: local rounds.
        classes: M.
        seeds: one run for each; they decide initial weights, cohorts, shuffles and dropout.
        eval_every: rounds between evaluations; the last round is always evaluated.
        loss: for the test loss.
        execution: devices; the one that the algorithm was composed with (None: the default).
        on_evaluation: called as soon as each evaluation is known.

    Returns:
        The run.

    Raises:
        ValueError: if a setting is out of range, or the model does not fit the data.
        DivergedError: if a loss is not finite; says the round and the seed.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> digits = fs.load_dataset("digits")
        >>> model = fs.models.logistic((8, 8, 1), 10)
        >>> model = fs.models.with_scaling(model, digits.mean, digits.std)
        >>> data = fs.client_data(digits.train_x, digits.train_y,
        ...                       fs.partition.iid(digits.train_y, 10, seed=0))
        >>> local = fs.LocalSGD(fs.empirical_risk(model), optax.sgd(0.1), epochs=3)
        >>> result = fs.simulate(fs.fedavg(local, clients_per_round=5), model, data,
        ...                      (digits.test_x, digits.test_y), rounds=3, classes=10)
        >>> bool(result.accuracy[-1, 0] > 0.8)
        True
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if eval_every < 1:
        raise ValueError(f"eval_every must be at least 1, got {eval_every}")
    if not seeds:
        raise ValueError("seeds must not be empty")
    check_model(model, data.x, classes)
    execution = execution or make_execution()
    programs = Experiment(algorithm, model, loss, execution, data, len(seeds), eval_every)
    began = time.perf_counter()
    with _count_programs() as counter:
        evaluations: list[Evaluation] = []
        run = programs.start(data, test, seeds)
        totals = np.zeros((5, len(seeds)), np.int64)
        done = 0
        while done < rounds:
            todo = min(eval_every, rounds - done)
            run, metrics, scores = programs.advance(run, todo)
            rows = jax.tree.map(lambda a, todo=todo: np.asarray(a)[:, :todo], metrics)
            _check_finite(rows.loss, done, seeds)
            totals += np.stack([a.astype(np.int64).sum(axis=1) for a in rows[1:]])
            done += todo
            last = done == rounds
            evaluation = _evaluation(done, scores, rows.loss[:, -1], totals)
            if last:
                evaluation = programs.finish(run, evaluation)
            _check_finite(evaluation.test_loss[:, None], done - 1, seeds)
            evaluations.append(evaluation)
            if on_evaluation is not None:
                on_evaluation(evaluation)
    samples, steps, executed = (int(n) for n in totals[:3].sum(axis=1))
    return Result(
        evaluations=evaluations,
        variables=programs.final,
        samples=samples,
        steps=steps,
        executed=executed,
        model_bytes=programs.model_bytes,
        compile_seconds=programs.compile_seconds,
        run_seconds=time.perf_counter() - began - programs.compile_seconds,
        xla_programs=counter.programs,
    )


def check_model(model: Model, x: Any, classes: int) -> None:
    """Raises ValueError if the model's output on ``x [n, *feature]`` is not ``[B, classes]``."""
    sample = jax.ShapeDtypeStruct((2, *x.shape[1:]), x.dtype)

    def both_ways(key: Array, v: Array) -> Array:
        variables = model.init(key)
        model.apply(variables, v, train=True, mask=jnp.ones(2, bool), key=key)
        return model.apply(variables, v, train=False)[0]

    try:
        logits = jax.eval_shape(both_ways, jax.eval_shape(lambda: jax.random.key(0)), sample)
    except Exception as e:  # whatever the network raises: flax has errors of its own
        reason = (str(e).strip() or type(e).__name__).splitlines()[0]
        raise ValueError(f"the model rejects inputs of shape {x.shape[1:]}: {reason}") from e
    if logits.shape != (2, classes):
        raise ValueError(
            f"the model must return logits of shape [batch, {classes}], one per class; "
            f"for a batch of 2 it returns {list(logits.shape)}"
        )


class Run(NamedTuple):
    """A run between two programs: ``keys key[R]`` and the state of all seeds."""

    keys: Array
    state: FedState


class Experiment:
    """The XLA programs of one experiment; :func:`simulate` is a loop over them.

    At most three: start, advance, and finish if models are in flight. Each is compiled on first
    use, and once: ``advance`` takes the number of rounds as data.

    Args:
        algorithm: what to run.
        model: the model that its local update trains.
        loss: for the test loss.
        execution: devices.
        data: the clients, for the shapes alone.
        n_seeds: R.
        eval_every: the most rounds that one ``advance`` may run.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        model: Model,
        loss: LossFn,
        execution: Execution,
        data: ClientData,
        n_seeds: int,
        eval_every: int,
    ) -> None:
        self.compile_seconds = 0.0
        self.model_bytes = 0
        self.final: Any = None
        self._algorithm, self._model = algorithm, model
        self._execution, self._every = execution, eval_every
        self._advance: Any = None
        axes: dict[str, Any] = {"x": None, "y": None, "index": None}
        axes["start"] = None if data.start.ndim == 1 else 0
        self._data_axes: Any = dataclasses.replace(data, **axes)
        # The round is common to all seeds: unbatched, it keeps branches on it real branches.
        self._state_axes = FedState(None, 0, 0, 0, 0, 0)  # type: ignore[arg-type]
        self._n_seeds = n_seeds
        score = functools.partial(evaluate, model, loss, execution)
        self._score = self._over_seeds(score, in_axes=(0, None, None))

    def _over_seeds(self, fn: Callable[..., Any], in_axes: Any, out_axes: Any = 0) -> Any:
        """vmap; for one seed no vmap, which would turn branches on the data into selects."""
        if self._n_seeds > 1:
            return jax.vmap(fn, in_axes=in_axes, out_axes=out_axes)

        def only(*args: Any) -> Any:
            inner = (_at_axes(lambda a: a[0], x, a) for x, a in zip(args, in_axes, strict=True))
            return _at_axes(lambda a: a[None], fn(*inner), out_axes)

        return only

    def start(self, data: ClientData, test: tuple[Any, Any], seeds: Sequence[int]) -> Run:
        """Places the data on the devices and initialises a run for every seed."""
        put = self._execution.replicated
        self._data = jax.device_put(data, put)
        self._test = jax.device_put((np.asarray(test[0]), np.asarray(test[1], np.int32)), put)

        def begin(seed: Array, data: ClientData) -> tuple[Array, FedState]:
            key = jax.random.key(seed)
            variables = self._model.init(jax.random.fold_in(key, 0))
            run_key = jax.random.fold_in(key, 1)
            return run_key, self._algorithm.init(run_key, variables, data)

        both = self._over_seeds(begin, in_axes=(0, self._data_axes), out_axes=(0, self._state_axes))
        program = self._compile(
            lambda s, d: Run(*both(s, d)), np.asarray(seeds, np.uint32), self._data
        )
        run: Run = program(np.asarray(seeds, np.uint32), self._data)
        self.model_bytes = tree.num_bytes(run.state.server) // self._n_seeds
        return run

    def advance(self, run: Run, todo: int) -> tuple[Run, Metrics, Tally]:
        """``todo`` rounds, at most ``eval_every``, and a score."""
        if self._advance is None:
            self._advance = self._compile(
                self._rounds, run, self._data, self._test, np.int32(todo), donate=(0,)
            )
        out: tuple[Run, Metrics, Tally] = self._advance(run, self._data, self._test, np.int32(todo))
        return out

    def _rounds(
        self, run: Run, data: ClientData, test: tuple[Array, Array], todo: Array
    ) -> tuple[Run, Metrics, Tally]:
        def one(key: Array, state: FedState, data: ClientData) -> tuple[FedState, Metrics]:
            return self._algorithm.step(jax.random.fold_in(key, state.round), state, data)

        step = self._over_seeds(
            one,
            in_axes=(0, self._state_axes, self._data_axes),
            out_axes=(self._state_axes, 0),
        )
        shape = jax.eval_shape(step, run.keys, run.state, data)[1]
        rows = jax.tree.map(
            lambda s: jnp.zeros((self._n_seeds, self._every, *s.shape[1:]), s.dtype), shape
        )

        # A bound that is data: a shorter last stretch needs no program of its own.
        def body(i: Array, carry: tuple[FedState, Metrics]) -> tuple[FedState, Metrics]:
            state, rows = carry
            state, new = step(run.keys, state, data)
            return state, jax.tree.map(lambda a, b: a.at[:, i].set(b), rows, new)

        state, rows = jax.lax.fori_loop(0, todo, body, (run.state, rows))
        scores = self._score(state.server, *test)
        return Run(run.keys, state), rows, scores

    def finish(self, run: Run, last: Evaluation) -> Evaluation:
        """Collects the models in flight, if any, and scores the result."""
        self.final = run.state.server
        if run.state.slots is None:
            return last

        def collect(run: Run, data: ClientData, test: tuple[Array, Array]) -> Any:
            gather = self._over_seeds(
                self._algorithm.collect, in_axes=(self._state_axes, self._data_axes)
            )
            variables, uploads = gather(run.state, data)
            scores = self._score(variables, *test)
            return variables, uploads, scores

        program = self._compile(collect, run, self._data, self._test)
        self.final, uploads, scores = program(run, self._data, self._test)
        return last._replace(
            correct=np.asarray(scores.correct),
            total=np.asarray(scores.total),
            test_loss=_mean_loss(scores),
            uploads=last.uploads + np.asarray(uploads, np.int64),
            uncollected=last.accuracy,
        )

    def _compile(self, fn: Callable[..., Any], *args: Any, donate: tuple[int, ...] = ()) -> Any:
        began = time.perf_counter()
        put = self._execution.replicated
        jitted = jax.jit(fn, donate_argnums=donate, in_shardings=put, out_shardings=put)
        compiled = jitted.lower(*args).compile()
        self.compile_seconds += time.perf_counter() - began
        return compiled


def _at_axes(change: Callable[[Array], Array], tree: Any, axes: Any) -> Any:
    """Changes the leaves of ``tree`` whose entry in the vmap prefix ``axes`` is 0."""

    def subtree(axis: int | None, part: Any) -> Any:
        return part if axis is None else jax.tree.map(change, part)

    return jax.tree.map(subtree, axes, tree, is_leaf=lambda a: a is None)


def _evaluation(
    done: int, scores: Tally, loss: NDArray[np.float32], totals: NDArray[np.int64]
) -> Evaluation:
    return Evaluation(
        round=done,
        correct=np.asarray(scores.correct),
        total=np.asarray(scores.total),
        test_loss=_mean_loss(scores),
        train_loss=loss.astype(np.float64),
        uploads=totals[3].copy(),
        downloads=totals[4].copy(),
    )


def _mean_loss(scores: Tally) -> NDArray[np.float64]:
    return np.asarray(scores.loss, np.float64) / np.asarray(scores.total).sum(axis=1)


def _check_finite(loss: NDArray[Any], done: int, seeds: Sequence[int]) -> None:
    bad = np.argwhere(~np.isfinite(loss.T))  # by round, then seed
    if len(bad):
        where, seed = bad[0]
        raise DivergedError(
            f"the loss became {loss[seed, where]} in round {done + where + 1} "
            f"(seed {seeds[seed]}): lower the learning rate or clip gradients"
        )


class _Counter:
    programs = 0


@contextmanager
def _count_programs() -> Iterator[_Counter]:
    """Counts the programs that XLA is asked for, those that our own code did not mean included."""
    counter = _Counter()

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        del duration_secs
        counter.programs += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield counter
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
