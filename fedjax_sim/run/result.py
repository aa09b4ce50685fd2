"""What a run gives."""

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
from fedjax_sim.run.client_rows import ClientRows
from fedjax_sim.run.history import Evaluations, column
from fedjax_sim.run.metrics import Scores, SetScores

Set = Literal["test", "validation", "personal"]


class Evaluation(NamedTuple):
    """What is known after some rounds; the leading axis R is runs (seeds, or seeds and folds).

    Attributes:
        round: rounds done.
        sums: what the scores on the test set are made of, ``[R, ...]``.
        test: scores on the test set.
        validation: scores on the validation set; None without one.
        personal: scores on the test set of each client's own model; None if there are none.
        train_loss: ``f64[R]``, mean local training loss of the last round.
        uploads: ``int64[R]``, models sent by clients so far, or fragments of them.
        downloads: ``int64[R]``, models sent to clients so far.
        samples: ``int64[R]``, training samples visited so far.
        bytes_up: ``int64[R]``, what clients have sent so far: models, compressed or not, and what
          a method sends besides, before the first round too. Not counted: how many samples each
          client has, and what makes the data (shared samples).
        bytes_down: ``int64[R]``, what they have received so far.
        skipped: ``int64[R]``, visits so far of which nothing was taken, see
          :func:`fedjax_sim.sending.finite_only`.
        diagnostics: those of the last round, ``f64[R]`` by name.
        uncollected: the task's leading score ``f64[R]`` before the models still in flight were
          collected and the algorithm finished, at the end of a run that has any such; else None.
        seconds: ``f64[R]``, simulated so far; None without a clock. What travels before the first
          round and after the last takes none.
        wall_seconds: that this machine took so far, compiling included; of a run that was resumed,
          also those before the checkpoint.
        recorded: what ``record`` of :func:`fedjax_sim.simulate` kept, NumPy; None without one.
        before: all of this as it was before then; None where ``uncollected`` is.
    """

    round: int
    sums: Sums
    test: SetScores
    validation: SetScores | None
    personal: SetScores | None
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
        """``int32[R, M]``, right answers on the test set by class; of classification alone."""
        return self.sums.own.correct

    @property
    def total(self) -> NDArray[np.int32]:
        """``int32[R, M]``, test samples by class; of classification alone."""
        return self.sums.own.total

    @property
    def accuracy(self) -> NDArray[np.float64]:
        """``f64[R]``, fraction of right answers on the test set, if the task has that score."""
        return self.test.pooled.accuracy

    @property
    def test_loss(self) -> NDArray[np.float64]:
        """``f64[R]``, mean over the test set."""
        return self.test.pooled.loss

    def __repr__(self) -> str:
        return brief(self, self.entries())

    def entries(self) -> dict[str, Any]:
        """Returns what ``repr`` shows of it: means over runs."""
        sets = {"": self.test, "validation_": self.validation, "personal_": self.personal}
        scores = {
            prefix + name: over_runs(values)
            for prefix, found in sets.items()
            for name, values in ({} if found is None else found.reported).items()
        }
        known = {"round": self.round, "runs": len(self.uploads), **scores}
        if self.seconds is not None:
            known["seconds"] = over_runs(self.seconds)
        return known | {"bytes": Text(f"{sent(self).mean():,.0f}")}


class Reached(NamedTuple):
    """What it took until a score was reached, for each of R runs; None for "never".

    Attributes:
        rounds: done at the first evaluation that has it.
        bytes: sent by then, up and down.
        seconds: simulated by then; None without a clock.
    """

    rounds: list[int | None]
    bytes: list[int | None]
    seconds: list[float | None] | None = None


@dataclasses.dataclass
class Result:
    """A finished run.

    Attributes:
        task: what was learnt.
        evaluations: in order of rounds.
        metrics: what each round reported, NumPy ``[R, rounds, ...]``: who took part (``client``, by
            slot), which model went where (``source``), losses, bytes' counts, diagnostics; what the
            clock says (``time``, see :class:`fedjax_sim.base.Elapsed`), None without one.
        variables: ``[R, *p]``, the final models.
        state: ``[R, ...]`` but for its ``round``, after the last round: clusters (``broadcast``),
            own models and control variates (``client_state``), what is shared, models in flight
            (``slots``). Like ``variables`` None if the run was interrupted within a round. With
            ``client_state_mb`` what clients keep has rows for those that trained alone:
            ``np.asarray`` makes all N, ``a[run, client]`` one.
        samples: training samples visited, over all runs.
        steps: local steps that trained.
        executed: local steps that the devices ran or waited: devices × those of the longest.
        model_bytes: bytes of one model (params and state).
        device_bytes: memory that the run needs on one device, as XLA planned it.
        compile_seconds: tracing, lowering and XLA.
        run_seconds: the rest.
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
        """``f64[evaluations, R]``, pooled over the test set, if the task has that score."""
        return self.series("accuracy", by_client=False)

    @property
    def score(self) -> NDArray[np.float64]:
        """``f64[evaluations, R]``, the task's leading score, pooled over the test set."""
        return self.series(self.task.score, by_client=False)

    @property
    def seconds(self) -> NDArray[np.float64]:
        """``f64[evaluations, R]``, simulated so far.

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
        """A score after every evaluation, ``f64[evaluations, R]``.

        Args:
            metric: one of the task's, such as "accuracy", "f1" and "auc", or "loss".
            by_client: the unweighted mean over the clients of the set, instead of the pooled score.
            part: "test" or "validation" set; "personal": the test set, with each client's own
              model.

        Raises:
            ValueError: if the run did not score that.
        """
        first = getattr(self.evaluations[0], part)
        if first is None or (by_client and first.by_client is None):
            what = "personal models scored" if part == "personal" else f"{part} set"
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

    def validated(self, metric: str, *, by_client: bool) -> NDArray[np.float64]:
        """The test score of the weights that scored best on the validation set, ``f64[R]``.

        Each run has its own best round, by the same score; the first of equals.
        """
        choice = self.series(metric, by_client=by_client, part="validation")
        sign = -1 if self.lowest(metric) else 1
        best = np.nan_to_num(sign * choice, nan=-np.inf).argmax(axis=0)
        test = self.series(metric, by_client=by_client)
        return np.take_along_axis(test, best[None], axis=0)[0]

    def of_runs(self, runs: slice) -> Result:
        """Some of the R runs, as NumPy arrays; seconds, programs and memory stay those of all."""
        some = functools.partial(of_runs, runs=runs)
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
        """What is shown of it: the last scores."""
        last = self.evaluations[-1].entries() if self.evaluations else {}
        model, took = Text(f"{self.model_bytes:,}"), Text(f"{self.run_seconds:.1f}")
        known = {"task": self.task, "evaluations": len(self.evaluations), **last}
        return known | {"model_bytes": model, "run_seconds": took}

    def lowest(self, metric: str) -> bool:
        """Whether the lowest value of a score is the best."""
        return lowest(self.task, metric)

    def reached(self, metric: str, value: float, *, part: Set = "test") -> Reached:
        """What it took until a score was as good as ``value``, run by run.

        Of a set of several clients it is their unweighted mean. At the end of a run whose models in
        flight were collected then, those before count as well.

        Args:
            metric: as in :meth:`series`.
            value: that is to be reached: from below, or from above where the lowest is the best.
            part: what is scored, as in :meth:`series`.

        Raises:
            ValueError: if the run did not score that.
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
            of([*map(sent, every)]),
            of([e.seconds for e in every], float) if timed else None,
        )


def of_runs(values: PyTree, runs: slice) -> Any:
    """Of arrays ``[R, ...]`` those of some runs, NumPy's; numbers and keys stay what they are."""

    def of(a: Any) -> Any:
        if not np.ndim(a):  # the number of the round has no axis of runs
            return a
        # A slice of a JAX array is a program of its own.
        key = isinstance(a, jax.Array) and jnp.issubdtype(a.dtype, jax.dtypes.prng_key)
        return a[runs] if key or isinstance(a, ClientRows) else np.asarray(a)[runs]

    return jax.tree.map(of, values)


def lowest(task: Task, metric: str) -> bool:
    """Whether the lowest value of a score is the best."""
    return metric == "loss" or task.metrics[metric].best == "lowest"


def sent(evaluation: Evaluation) -> NDArray[np.int64]:
    """Bytes so far, up and down together, ``int64[R]``."""
    return evaluation.bytes_up + evaluation.bytes_down


def reaches(
    evaluation: Evaluation, task: Task, metric: str, value: float, part: Set
) -> NDArray[np.bool_]:
    """Whether a score is as good as a value, ``bool[R]``."""
    scores: SetScores = getattr(evaluation, part)
    found = scores.reported[metric]
    return np.asarray(found <= value if lowest(task, metric) else found >= value)


class DivergedError(FloatingPointError):
    """A loss became NaN or infinite."""
