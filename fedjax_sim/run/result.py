"""The result of a run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import FedState, Metrics, PyTree, Task
from fedjax_sim.base.brief import Text, brief
from fedjax_sim.run.bands import draw_band
from fedjax_sim.run.client_memory import ClientRows
from fedjax_sim.run.evaluation import Evaluation, total_bytes
from fedjax_sim.run.metrics import Scores, SetScores
from fedjax_sim.run.provenance import Provenance
from fedjax_sim.run.records import Evaluations, column, work_of
from fedjax_sim.run.rows import row_of
from fedjax_sim.tasks.sums import mean_known

if TYPE_CHECKING:
    import matplotlib.axes
    import pandas

Set = Literal["test", "validation", "personal", "personal_validation"]


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
        metrics: metrics of each round, NumPy ``[R, rounds, ...]``: the participants (``client``, by
            slot), the moves of models (``source``), losses, numbers of transfers, diagnostics,
            simulated time (``time``, see :class:`fedjax_sim.base.Elapsed`; None without a clock).
        variables: ``[R, *p]``, the final models.
        state: ``[R, ...]`` except ``round``, after the last round: clusters (``broadcast``),
            personal models and control variates (``client_state``), shared state, models in flight
            (``slots``). ``state`` and ``variables`` are None if the run was interrupted within a
            round or diverged. With ``client_state_mb``, per-client state only has rows of the
            clients that trained: ``np.asarray`` makes all N rows, ``a[run, client]`` one.
        samples: training samples visited, over all runs.
        steps: local steps that trained.
        executed: local steps that the devices ran or waited for: devices × steps of the busiest.
        model_bytes: bytes of one model (params and state).
        device_bytes: memory that the run needs on one device, as XLA planned it.
        compile_seconds: seconds of tracing, lowering and compiling.
        run_seconds: all other seconds; for a resumed run they include compilation by earlier
          processes.
        xla_programs: programs compiled or fetched from the compilation cache.
        provenance: the algorithm, seeds and clients, for saving and comparing the result.
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
    provenance: Provenance

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

    @property
    def visits(self) -> NDArray[np.int64]:
        """``int64[R, N]``, how often each client trained."""
        clients = self.provenance.start.shape[-1] - 1
        rows = np.asarray(self.metrics.client)
        return np.stack([np.bincount(r.ravel(), minlength=clients + 1)[:clients] for r in rows])

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
        if part not in get_args(Set):
            raise ValueError(f"part must be one of {', '.join(get_args(Set))}, got {part!r}")
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

        Each run has its own best round, the first in case of ties. A run without a validation score
        is NaN.

        Args:
            metric: as in :meth:`series`.
            by_client: as in :meth:`series`.
            personal: whether both are scores of the clients' personal models.

        Raises:
            ValueError: as :meth:`series`, also without a validation set.
        """
        scored: Set = "personal" if personal else "test"
        decisive: Set = "personal_validation" if personal else "validation"
        test = self.series(metric, by_client=by_client, part=scored)
        choice = self.series(metric, by_client=by_client, part=decisive)
        sign = -1 if self.lowest(metric) else 1
        best = np.nan_to_num(sign * choice, nan=-np.inf).argmax(axis=0)
        found = np.take_along_axis(test, best[None], axis=0)[0]
        return np.where(np.isnan(choice).all(axis=0), np.nan, found)

    def of_runs(self, runs: slice) -> Result:
        """Returns some of the R runs, as NumPy arrays; seconds, programs and memory stay totals."""
        some = functools.partial(select_runs, runs=runs)
        metrics = some(self.metrics)
        return dataclasses.replace(
            self,
            evaluations=Evaluations(map(some, self.evaluations)),
            metrics=metrics,
            variables=some(self.variables),
            state=some(self.state),
            provenance=self.provenance.of_runs(runs),
            **work_of(metrics),
        )

    def to_pandas(self) -> pandas.DataFrame:
        """Returns a row for each evaluation and run, with the columns of ``metrics.jsonl``.

        Statistics over clients are columns such as ``client_accuracy.mean``, scores on the
        validation set such as ``validation.accuracy``.

        Example:
            >>> import optax, fedjax_sim as fs
            >>> problem = fs.toy()
            >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
            >>> result = fs.simulate(fs.fedavg(local, clients_per_round=5), problem.model,
            ...                      problem.data, problem.test, rounds=2, classes=10, seeds=(0, 1))
            >>> result.to_pandas()[["seed", "round", "bytes_up"]]
               seed  round  bytes_up
            0     0      1     13000
            1     1      1     13000
            2     0      2     26000
            3     1      2     26000
        """
        import pandas

        runs, tables = self.provenance.runs, self.provenance.tables(self.task)
        rows = (
            row_of(evaluation, i, run, tables[i], self.task)[0]
            for evaluation in self.evaluations
            for i, run in enumerate(runs)
        )
        return pandas.json_normalize([*rows])

    def table(self) -> pandas.DataFrame:
        """Returns the scores after the last round: mean and standard deviation over runs.

        A row is a score on the test set, on the validation set (``validation_NAME``) or of the
        clients' personal models (``personal_NAME``), pooled or, for a set of several clients, the
        unweighted mean over them. The standard deviation is that of the population (divisor R).
        """
        import pandas

        rows = {}
        for name, values in self.evaluations[-1].reported().items():
            mean = mean_known(values)
            rows[name] = {"mean": mean, "std": np.sqrt(mean_known((values - mean) ** 2))}
        return pandas.DataFrame.from_dict(rows, orient="index", dtype=np.float64)

    def plot(
        self,
        metric: str | None = None,
        *,
        by_client: bool = False,
        part: Set = "test",
        label: str | None = None,
        axes: matplotlib.axes.Axes | None = None,
    ) -> matplotlib.axes.Axes:
        """Draws a score against rounds: the mean over runs, and a band of ± one std.

        Args:
            metric: as in :meth:`series`; None: the task's leading score.
            by_client: as in :meth:`series`.
            part: as in :meth:`series`.
            label: text in the legend.
            axes: where to draw; None: in a new figure. A second result drawn into the same axes has
                another colour.

        Returns:
            The axes.
        """
        from matplotlib import pyplot
        from matplotlib.ticker import MaxNLocator

        metric = self.task.score if metric is None else metric
        values = self.series(metric, by_client=by_client, part=part)
        if axes is None:
            axes = pyplot.subplots()[1]
            axes.set_xlabel("rounds")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_ylabel(" ".join([part, metric, *(["mean over clients"] * by_client)]))
        draw_band(axes, [e.round for e in self.evaluations], values, label=label)
        return axes

    def __repr__(self) -> str:
        last = self.evaluations[-1].entries() if self.evaluations else {}
        model, took = Text(f"{self.model_bytes:,}"), Text(f"{self.run_seconds:.1f}")
        known = {"task": self.task, "evaluations": len(self.evaluations), **last}
        return brief(self, known | {"model_bytes": model, "run_seconds": took})

    def lowest(self, metric: str) -> bool:
        """Returns whether the lowest value of a score is the best."""
        return lower_is_better(self.task, metric)

    def reached(self, metric: str, value: float, *, part: Set = "test") -> Reached:
        """Returns the cost of reaching a score of ``value``, run by run.

        For a set of several clients, the score is their unweighted mean. If models in flight were
        collected at the end of a run, the score before that counts too.

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
        first = [int(np.argmax(of_run)) if of_run.any() else None for of_run in good.T]

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


def reaches(
    evaluation: Evaluation, task: Task, metric: str, value: float, part: Set
) -> NDArray[np.bool_]:
    """Returns whether a score is as good as a value, ``bool[R]``."""
    scores: SetScores = getattr(evaluation, part)
    found = scores.reported[metric]
    return np.asarray(found <= value if lower_is_better(task, metric) else found >= value)


class DivergedError(FloatingPointError):
    """A loss became NaN or infinite."""
