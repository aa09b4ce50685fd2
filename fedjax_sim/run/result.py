"""The result of a run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import FedState, Metrics, PyTree, Sums, Task
from fedjax_sim.base.brief import Text, brief, brief_html, over_runs
from fedjax_sim.run.client_memory import ClientRows
from fedjax_sim.run.metrics import Scores, SetScores
from fedjax_sim.run.records import Evaluations, column

Set = Literal["test", "validation", "personal", "personal_validation"]


class Evaluation(NamedTuple):
    """Scores and totals after some rounds; the leading axis R is runs (seeds, or seeds and folds).

    Attributes:
        round: number of rounds done.
        sums: sums that the scores on the test set are computed from, ``[R, ...]``.
        test: scores on the test set.
        validation: scores on the validation set; None without one.
        personal: scores of the clients' personal models on the test set; None without them.
        personal_validation: the same on the validation set; None if it is not of these clients.
        train_loss: ``f64[R]``, mean local training loss of the last round.
        uploads: ``int64[R]``, models or fragments sent by clients so far.
        downloads: ``int64[R]``, models sent to clients so far.
        samples: ``int64[R]``, training samples visited so far.
        bytes_up: ``int64[R]``, bytes sent by clients so far: models, compressed or not, and what
            a method sends in addition, including before the first round. Not counted: the number
            of samples of each client, and shared samples, which are part of the data.
        bytes_down: ``int64[R]``, bytes received by clients so far.
        skipped: ``int64[R]``, visits so far whose update was rejected, see
            :func:`fedjax_sim.sending.finite_only`.
        diagnostics: diagnostics of the last round, ``f64[R]`` by name.
        uncollected: the task's leading score ``f64[R]`` before models in flight were collected and
            the algorithm finished, at the end of a run that does either; else None.
        seconds: ``f64[R]``, simulated seconds so far; None without a clock. Transfers before the
            first round and after the last take no time.
        wall_seconds: seconds on this machine so far, including compilation; for a resumed run,
            also those before the checkpoint.
        recorded: what ``record`` of :func:`fedjax_sim.simulate` kept, NumPy; None without it.
        before: the evaluation before models were collected; None if ``uncollected`` is None.
    """

    round: int
    sums: Sums
    test: SetScores
    validation: SetScores | None
    personal: SetScores | None
    personal_validation: SetScores | None
    train_loss: NDArray[np.float64]
    uploads: NDArray[np.int64]
    downloads: NDArray[np.int64]
    samples: NDArray[np.int64]
    bytes_up: NDArray[np.int64]
    bytes_down: NDArray[np.int64]
    skipped: NDArray[np.int64]
    diagnostics: dict[str, NDArray[np.float64]]
    uncollected: NDArray[np.float64] | None = None
    seconds: NDArray[np.float64] | None = None
    wall_seconds: float = float("nan")
    recorded: Any = None
    before: Evaluation | None = None

    @property
    def correct(self) -> NDArray[np.int32]:
        """``int32[R, M]``, right answers on the test set by class; classification only."""
        return self.sums.own.correct

    @property
    def total(self) -> NDArray[np.int32]:
        """``int32[R, M]``, test samples by class; classification only."""
        return self.sums.own.total

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """``f64[R]``, fraction of right answers on the test set, if the task has that score."""
        return self.test.pooled.accuracy

    @property
    def test_loss(self) -> NDArray[np.float64]:
        """``f64[R]``, mean loss on the test set."""
        return self.test.pooled.loss

    def __repr__(self) -> str:
        return brief(self, self.entries())

    def reported(self) -> dict[str, NDArray[np.float64]]:
        """Returns the scores ``f64[R]`` on all sets by name; all but the test set have a prefix."""
        sets: dict[str, SetScores | None] = {"": self.test}
        for part in ("validation", "personal", "personal_validation"):
            sets[f"{part}_"] = getattr(self, part)
        return {
            prefix + name: values
            for prefix, found in sets.items()
            for name, values in ({} if found is None else found.reported).items()
        }

    def entries(self) -> dict[str, Any]:
        """Returns the entries that ``repr`` shows: means over runs."""
        scores = {name: over_runs(values) for name, values in self.reported().items()}
        known = {"round": self.round, "runs": len(self.uploads), **scores}
        if self.seconds is not None:
            known["seconds"] = over_runs(self.seconds)
        return known | {"bytes": Text(f"{total_bytes(self).mean():,.0f}")}


class Reached(NamedTuple):
    """The cost of reaching a score, for each of R runs; None for a run that never reached it.

    Attributes:
        rounds: rounds until the first evaluation with the score.
        bytes: bytes sent by then, up and down.
        seconds: simulated seconds by then; None without a clock.
    """

    rounds: list[int | None]
    bytes: list[int | None]
    seconds: list[float | None] | None = None


@dataclasses.dataclass
class Result:
    """A finished run.

    Attributes:
        task: the task.
        evaluations: evaluations in order of rounds.
        metrics: metrics of each round, NumPy ``[R, rounds, ...]``: the participants (``client``,
            by slot), which model went where (``source``), losses, numbers of transfers,
            diagnostics, simulated time (``time``, see :class:`fedjax_sim.base.Elapsed`; None
            without a clock).
        variables: ``[R, *p]``, the final models.
        state: ``[R, ...]`` except ``round``, after the last round: clusters (``broadcast``),
            personal models and control variates (``client_state``), shared state, models in flight
            (``slots``). ``state`` and ``variables`` are None if the run was interrupted within a
            round. With ``client_state_mb``, per-client state only has rows of the clients that
            trained: ``np.asarray`` makes all N rows, ``a[run, client]`` one.
        samples: training samples visited, over all runs.
        steps: local steps that trained.
        executed: local steps that the devices ran or waited: devices × steps of the longest.
        model_bytes: bytes of one model (params and state).
        device_bytes: memory that the run needs on one device, as XLA planned it.
        compile_seconds: seconds of tracing, lowering and compiling.
        run_seconds: all other seconds.
        xla_programs: programs compiled or fetched from the compilation cache.
    """

    task: Task
    evaluations: Sequence[Evaluation]
    metrics: Metrics
    variables: Any
    state: FedState | None
    samples: int
    steps: int
    executed: int
    model_bytes: int
    device_bytes: int
    compile_seconds: float
    run_seconds: float
    xla_programs: int

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """``f64[evaluations, R]``, pooled over the test set, if the task has this score."""
        return self.series("accuracy", by_client=False)

    @property
    def score(self) -> NDArray[np.float64]:
        """``f64[evaluations, R]``, the task's leading score, pooled over the test set."""
        return self.series(self.task.score, by_client=False)

    @property
    def seconds(self) -> NDArray[np.float64]:
        """``f64[evaluations, R]``, simulated seconds so far.

        Raises:
            ValueError: if the run had no clock.
        """
        if self.evaluations[0].seconds is None:
            raise ValueError("the run has no seconds: compose it with a clock, see fs.clock")
        return column(self.evaluations, lambda e: e.seconds)

    def series(
        self,
        metric: str,
        *,
        by_client: bool,
        part: Set = "test",
    ) -> NDArray[np.float64]:
        """Returns a score after every evaluation, ``f64[evaluations, R]``.

        Args:
            metric: a score of the task, such as "accuracy", "f1" and "auc", or "loss".
            by_client: whether to return the unweighted mean over the clients of the set instead
                of the pooled score.
            part: "test" or "validation" set; "personal" or "personal_validation": the same sets,
                with each client's personal model.

        Raises:
            ValueError: if the run did not score it.
        """
        first = getattr(self.evaluations[0], part)
        if first is None or (by_client and first.by_client is None):
            what = "personal models scored" if "personal" in part else f"{part} set"
            what += " on a validation set" * (part == "personal_validation")
            raise ValueError(f"the run has no {what}{' by client' if by_client else ''}")
        if metric not in (known := (*self.task.metrics, "loss")):
            raise ValueError(
                f"metric must be one of {', '.join(known)}, which {self.task!r} has, got {metric!r}"
            )

        def of(evaluation: Evaluation) -> NDArray[np.float64]:
            found = getattr(evaluation, part)
            scores: Scores = found.by_client.mean() if by_client else found.pooled
            return scores[metric]

        return column(self.evaluations, of)

    def validated(
        self, metric: str, *, by_client: bool, personal: bool = False
    ) -> NDArray[np.float64]:
        """Returns the test score of the weights with the best validation score, ``f64[R]``.

        Each run has its own best round, by the same score; the first of equals.

        Args:
            metric: as in :meth:`series`.
            by_client: as in :meth:`series`.
            personal: whether both are scores of the clients' personal models.
        """
        sets: tuple[Set, Set] = ("test", "validation")
        if personal:
            sets = ("personal", "personal_validation")
        choice = self.series(metric, by_client=by_client, part=sets[1])
        sign = -1 if self.lowest(metric) else 1
        best = np.nan_to_num(sign * choice, nan=-np.inf).argmax(axis=0)
        test = self.series(metric, by_client=by_client, part=sets[0])
        return np.take_along_axis(test, best[None], axis=0)[0]

    def of_runs(self, runs: slice) -> Result:
        """Returns some of the R runs, as NumPy arrays; seconds, programs and memory stay totals."""
        some = functools.partial(select_runs, runs=runs)
        metrics = some(self.metrics)
        counted = (getattr(metrics, name) for name in ("samples", "steps", "executed"))
        samples, steps, executed = (int(n.sum(dtype=np.int64)) for n in counted)
        return dataclasses.replace(
            self,
            evaluations=Evaluations(map(some, self.evaluations)),
            metrics=metrics,
            variables=some(self.variables),
            state=some(self.state),
            samples=samples,
            steps=steps,
            executed=executed,
        )

    def __repr__(self) -> str:
        return brief(self, self._entries())

    def _repr_html_(self) -> str:
        return brief_html(self, self._entries())

    def _entries(self) -> dict[str, Any]:
        """Returns the entries that ``repr`` shows: the last scores."""
        last = self.evaluations[-1].entries() if self.evaluations else {}
        model, took = Text(f"{self.model_bytes:,}"), Text(f"{self.run_seconds:.1f}")
        known = {"task": self.task, "evaluations": len(self.evaluations), **last}
        return known | {"model_bytes": model, "run_seconds": took}

    def lowest(self, metric: str) -> bool:
        """Returns whether the lowest value of a score is the best."""
        return lower_is_better(self.task, metric)

    def reached(self, metric: str, value: float, *, part: Set = "test") -> Reached:
        """Returns the cost of reaching a score of ``value``, run by run.

        For a set of several clients, the score is their unweighted mean. At the end of a run whose
        models in flight were collected, the score before that counts too.

        Args:
            metric: as in :meth:`series`.
            value: value to reach: from below, or from above if the lowest is the best.
            part: set or models that are scored, as in :meth:`series`.

        Raises:
            ValueError: if the run did not score it.
        """
        self.series(metric, by_client=False, part=part)
        every = [e for last in self.evaluations for e in (last.before, last) if e is not None]
        good = np.stack([reaches(e, self.task, metric, value, part) for e in every])
        ever = np.any(good, axis=0).tolist(), np.argmax(good, axis=0).tolist()
        first = [i if g else None for g, i in zip(*ever, strict=True)]

        def of(values: Sequence[Any], kind: type[Any] = int) -> list[Any]:
            return [None if i is None else kind(values[i][r]) for r, i in enumerate(first)]

        timed = every[0].seconds is not None
        return Reached(
            of([[e.round] * len(first) for e in every]),
            of([*map(total_bytes, every)]),
            of([e.seconds for e in every], float) if timed else None,
        )


def select_runs(values: PyTree, runs: slice) -> Any:
    """Selects runs of arrays ``[R, ...]``, as NumPy arrays; scalars stay, and keys stay keys."""

    def select(a: Any) -> Any:
        if not np.ndim(a):  # the round number has no axis of runs
            return a
        # A slice of a JAX array is a program of its own.
        key = isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        return a[runs] if key or isinstance(a, ClientRows) else np.asarray(a)[runs]

    return jax.tree.map(select, values)


def lower_is_better(task: Task, metric: str) -> bool:
    """Returns whether the lowest value of a score is the best."""
    return metric == "loss" or task.metrics[metric].best == "lowest"


def total_bytes(evaluation: Evaluation) -> NDArray[np.int64]:
    """Returns the bytes sent so far, up and down together, ``int64[R]``."""
    return evaluation.bytes_up + evaluation.bytes_down


def reaches(
    evaluation: Evaluation, task: Task, metric: str, value: float, part: Set
) -> NDArray[np.bool_]:
    """Returns whether a score is as good as a value, ``bool[R]``."""
    scores: SetScores = getattr(evaluation, part)
    found = scores.reported[metric]
    return np.asarray(found <= value if lower_is_better(task, metric) else found >= value)


class DivergedError(FloatingPointError):
    """A loss became NaN or infinite."""
