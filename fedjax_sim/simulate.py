"""Runs an algorithm: a few XLA programs for the whole experiment, all seeds at once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Algorithm, Array, ClientData, LossFn, Metrics, Model, Traffic
from fedjax_sim.data import EvalSet, eval_set
from fedjax_sim.execution import Execution, make_execution
from fedjax_sim.experiment import Experiment, Scored
from fedjax_sim.losses import MOST_RANKED, cross_entropy
from fedjax_sim.metrics import Metric, SetScores, set_scores


class Evaluation(NamedTuple):
    """What is known after some rounds; the leading axis R is runs (seeds, or seeds and folds).

    Attributes:
        round: rounds done.
        correct: ``int32[R, M]``, right answers on the test set by class.
        total: ``int32[R, M]``, test samples by class.
        test: scores on the test set.
        validation: scores on the validation set; None without one.
        personal: scores on the test set of each client's own model; None where there are none.
        train_loss: ``f64[R]``, mean local training loss of the last round.
        uploads: ``int64[R]``, models sent by clients so far.
        downloads: ``int64[R]``, models sent to clients so far.
        bytes_up: ``int64[R]``, what clients have sent so far: models, compressed or not, and what
          a method sends besides, before the first round too. Not counted: how many samples each
          client has, and what makes the data (shared samples).
        bytes_down: ``int64[R]``, what they have received so far.
        probes: the probes of the last round, ``f64[R]`` by name.
        uncollected: accuracy ``f64[R]`` before the models still in flight were collected, at the
          end of a run that has any; else None.
    """

    round: int
    correct: NDArray[np.int32]
    total: NDArray[np.int32]
    test: SetScores
    validation: SetScores | None
    personal: SetScores | None
    train_loss: NDArray[np.float64]
    uploads: NDArray[np.int64]
    downloads: NDArray[np.int64]
    bytes_up: NDArray[np.int64]
    bytes_down: NDArray[np.int64]
    probes: dict[str, NDArray[np.float64]]
    uncollected: NDArray[np.float64] | None = None

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """``f64[R]``, fraction of right answers on the test set."""
        return self.test.pooled.accuracy

    @property
    def test_loss(self) -> NDArray[np.float64]:
        """``f64[R]``, mean over the test set."""
        return self.test.pooled.loss


@dataclasses.dataclass
class Result:
    """A finished run.

    Attributes:
        evaluations: in order of rounds.
        variables: ``[R, *p]``, the final models.
        samples: training samples visited, over all runs.
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
        """``f64[evaluations, R]``, pooled over the test set."""
        return self.series("accuracy", by_client=False)

    def series(
        self,
        metric: Metric,
        *,
        by_client: bool,
        part: Literal["test", "validation", "personal"] = "test",
    ) -> NDArray[np.float64]:
        """A score after every evaluation, ``f64[evaluations, R]``.

        Args:
            metric: "accuracy", "f1" or "auc".
            by_client: the unweighted mean over the clients of the set, instead of the pooled score.
            part: "test" or "validation" set; "personal": the test set, with each client's own
              model.

        Raises:
            ValueError: if the run did not score that.
        """
        sets = [getattr(e, part) for e in self.evaluations]
        if sets[0] is None or (by_client and sets[0].by_client is None):
            what = "personal models scored" if part == "personal" else f"{part} set"
            raise ValueError(f"the run has no {what}{' by client' if by_client else ''}")
        found = [getattr(s.by_client.mean() if by_client else s.pooled, metric) for s in sets]
        if found[0] is None:
            raise ValueError(f"the run did not score {metric!r}; see auc of simulate")
        return np.stack(found)

    def validated(self, metric: Metric, *, by_client: bool) -> NDArray[np.float64]:
        """The test score of the weights that scored best on the validation set, ``f64[R]``.

        Each run has its own best round, by the same score; the first of equals.
        """
        choice = self.series(metric, by_client=by_client, part="validation")
        best = np.nan_to_num(choice, nan=-np.inf).argmax(axis=0)
        test = self.series(metric, by_client=by_client)
        return np.take_along_axis(test, best[None], axis=0)[0]


class DivergedError(FloatingPointError):
    """A loss became NaN or infinite."""


def simulate(
    algorithm: Algorithm,
    model: Model,
    data: ClientData,
    test: tuple[Any, Any] | EvalSet,
    *,
    rounds: int,
    classes: int,
    seeds: Sequence[int] | NDArray[np.integer[Any]] = (0,),
    eval_every: int = 1,
    validation: tuple[Any, Any] | EvalSet | None = None,
    auc: bool | None = None,
    personal: bool = False,
    loss: LossFn = cross_entropy,
    execution: Execution | None = None,
    on_evaluation: Callable[[Evaluation], None] | None = None,
) -> Result:
    """Runs ``rounds`` rounds for every seed, and evaluates the models on the way.

    Rounds between two evaluations are one XLA program, and runs are one more leading axis of it.

    Args:
        algorithm: e.g. :func:`fedjax_sim.fedavg`.
        model: the model that its local update trains.
        data: the clients; ``start`` may be ``[R, N + 1]``, a partition for each run.
        test: (x, y), or samples by client: :func:`fedjax_sim.data.eval_set`, one list for all runs
          or one for each.
        rounds: local rounds.
        classes: M.
        seeds: one of the R runs for each; they decide initial weights, cohorts, shuffles and
          dropout. Runs that differ in their clients (folds) may share a seed.
        eval_every: rounds between evaluations; the last round is always evaluated.
        validation: like ``test``, scored at the same rounds: :meth:`Result.validated` then needs no
          weights kept.
        auc: whether to compute the area under the ROC curve, which sorts the sets; None: of two
          classes, where it takes one sort and not M.
        personal: whether client k of the test set is client k of ``data``: an algorithm with
          personal models is then scored by these too.
        loss: for the loss on the sets.
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
        >>> local = fs.local_sgd(fs.empirical_risk(model), optax.sgd(0.1), epochs=3)
        >>> result = fs.simulate(fs.fedavg(local, clients_per_round=5), model, data,
        ...                      (digits.test_x, digits.test_y), rounds=3, classes=10)
        >>> bool(result.accuracy[-1, 0] > 0.8)
        True
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    if eval_every < 1:
        raise ValueError(f"eval_every must be at least 1, got {eval_every}")
    seeds = _checked_seeds(seeds)
    check_model(model, data.x, classes)
    given = {"test": test} if validation is None else {"test": test, "validation": validation}
    sets = {name: _as_set(name, s) for name, s in given.items()}
    ranked = classes == 2 if auc is None else auc
    _check_sets(data, sets, len(seeds), ranked=ranked, personal=personal)
    began = time.perf_counter()
    with _count_programs() as counter:
        programs = Experiment(
            algorithm,
            model,
            loss,
            execution or make_execution(),
            data,
            tuple(sets.values()),
            len(seeds),
            eval_every,
            ranked=ranked,
            personal=personal,
        )
        evaluations: list[Evaluation] = []
        run = programs.start(seeds)
        totals = _Totals(*np.zeros((len(_Totals._fields), len(seeds)), np.int64))
        opening = _opening(algorithm, model, data, len(seeds))
        done = 0
        while done < rounds:
            todo = min(eval_every, rounds - done)
            run, metrics, counts = programs.advance(run, todo)
            rows = jax.tree.map(lambda a, todo=todo: np.asarray(a)[:, :todo], metrics)
            _check_finite(rows.loss, done, seeds)
            totals = totals.plus(rows)
            done += todo
            evaluation = _evaluation(done, counts, rows, totals, programs.traffic, opening)
            final = run.state.server
            collected = programs.finish(run) if done == rounds else None
            if collected is not None:
                final = collected.variables
                totals = totals._replace(uploads=totals.uploads + np.asarray(collected.uploads))
                accuracy = evaluation.accuracy
                evaluation = _evaluation(
                    done, collected.counts, rows, totals, programs.traffic, opening
                )
                evaluation = evaluation._replace(uncollected=accuracy)
            _check_finite(evaluation.test_loss[:, None], done - 1, seeds)
            if evaluation.personal is not None:
                _check_finite(evaluation.personal.pooled.loss[:, None], done - 1, seeds)
            evaluations.append(evaluation)
            if on_evaluation is not None:
                on_evaluation(evaluation)
    return Result(
        evaluations=evaluations,
        variables=final,
        samples=int(totals.samples.sum()),
        steps=int(totals.steps.sum()),
        executed=int(totals.executed.sum()),
        model_bytes=programs.model_bytes,
        compile_seconds=programs.compile_seconds,
        run_seconds=time.perf_counter() - began - programs.compile_seconds,
        xla_programs=counter.programs,
    )


def _checked_seeds(seeds: Any) -> list[int]:
    given = np.asarray(seeds)
    if given.ndim == 1 and not given.size:
        raise ValueError("seeds must not be empty")
    whole = given.dtype.kind in "iu" and given.ndim == 1
    if not whole or given.min() < 0 or given.max() >= 2**32:
        raise ValueError(
            f"seeds must be whole numbers from 0 to 2**32 - 1, one for each run, got {seeds!r}"
        )
    return given.tolist()


def _as_set(name: str, given: Any) -> EvalSet:
    if isinstance(given, EvalSet):
        return given
    if not isinstance(given, tuple | list) or len(given) != 2:
        size = f" of {len(given)}" if isinstance(given, tuple | list) else ""
        raise ValueError(
            f"{name} must be a pair (x, y) or made by eval_set, got {type(given).__name__}{size}"
        )
    return eval_set(*given)


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
        if isinstance(e, ZeroDivisionError):
            reason += ", as where its layers leave nothing of an input so small"
        raise ValueError(f"the model rejects inputs of shape {x.shape[1:]}: {reason}") from e
    if logits.shape != (2, classes):
        raise ValueError(
            f"the model must return logits of shape [batch, {classes}], one per class; "
            f"for a batch of 2 it returns {list(logits.shape)}"
        )


def _check_sets(
    data: ClientData, sets: Mapping[str, EvalSet], runs: int, *, ranked: bool, personal: bool
) -> None:
    starts = {"data": data.start, **{name: s.start for name, s in sets.items()}}
    for name, start in starts.items():
        if start.ndim == 2 and len(start) != runs:
            raise ValueError(
                f"{name}.start has {len(start)} lists of clients, one for each run, but seeds has "
                f"{runs} runs"
            )
    for name, examples in sets.items():
        if examples.x.shape[1:] != data.x.shape[1:]:
            raise ValueError(
                f"{name}.x must have samples of shape {data.x.shape[1:]} as the clients have, "
                f"got {examples.x.shape[1:]}"
            )
        n = examples.index.shape[-1]
        if ranked and n > MOST_RANKED:
            raise ValueError(f"auc counts at most {MOST_RANKED:,} samples, {name} has {n:,}")
    clients = data.start.shape[-1] - 1
    if personal and sets["test"].clients != clients:
        raise ValueError(
            f"personal=True needs a test set of the {clients} clients that train, "
            f"got one of {sets['test'].clients}"
        )


class _Totals(NamedTuple):
    """Sums over the rounds so far, ``int64[R]``; the names are those of :class:`Metrics`."""

    samples: NDArray[np.int64]
    steps: NDArray[np.int64]
    executed: NDArray[np.int64]
    uploads: NDArray[np.int64]
    downloads: NDArray[np.int64]
    visits: NDArray[np.int64]

    def plus(self, rows: Metrics) -> _Totals:
        """With the rounds ``rows [R, rounds]``."""
        new = (getattr(rows, name).astype(np.int64).sum(axis=1) for name in self._fields)
        return _Totals(*(a + b for a, b in zip(self, new, strict=True)))


def _opening(algorithm: Algorithm, model: Model, data: ClientData, runs: int) -> NDArray[np.int64]:
    """Bytes up and down before the first round, ``[2, R]``."""
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    starts = np.broadcast_to(np.asarray(data.start), (runs, data.start.shape[-1]))
    each = [algorithm.opening(variables, dataclasses.replace(data, start=s)) for s in starts]
    return np.array(each, np.int64).T


def _evaluation(
    done: int,
    scored: Scored,
    rows: Metrics,
    totals: _Totals,
    traffic: Traffic,
    opening: NDArray[np.int64],
) -> Evaluation:
    counts, personal = jax.tree.map(np.asarray, scored)
    test, *validation = map(set_scores, counts)
    up, down = opening
    return Evaluation(
        round=done,
        correct=counts[0].pooled.correct,
        total=counts[0].pooled.total,
        test=test,
        validation=validation[0] if validation else None,
        personal=None if personal is None else set_scores(personal),
        train_loss=np.asarray(rows.loss[:, -1], np.float64),
        uploads=totals.uploads,
        downloads=totals.downloads,
        bytes_up=up + totals.uploads * traffic.upload + totals.visits * traffic.message,
        bytes_down=down + totals.downloads * traffic.download + totals.visits * traffic.shared,
        probes={name: np.asarray(a[:, -1], np.float64) for name, a in rows.probes.items()},
    )


def _check_finite(loss: NDArray[Any], done: int, seeds: Sequence[int]) -> None:
    bad = np.argwhere(~np.isfinite(loss.T))  # by round, then seed
    if len(bad):
        where, seed = bad[0]
        raise DivergedError(
            f"the loss became {loss[seed, where]} in round {done + where + 1} "
            f"(seed {seeds[seed]}): lower the learning rate, the clients' or the server's"
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
