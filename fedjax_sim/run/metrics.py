"""Scores of the server model and of personal ones: of all samples, of each client's, spread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Array, LossFn, Model, PyTree, Variables
from fedjax_sim.data.evaluation import EvalSet
from fedjax_sim.engine.execution import Execution
from fedjax_sim.run.tally import WIN_BITS, Tally, rank_wins, tally

Floats = NDArray[np.float64]
Metric = Literal["accuracy", "f1", "auc"]


class Counts(NamedTuple):
    """What :func:`evaluate` counts over an evaluation set.

    Attributes:
        pooled: of all samples together; its arrays lack the axis G.
        by_client: ``[K, ...]``; None if the set has one client.
    """

    pooled: Tally
    by_client: Tally | None


def evaluate(
    model: Model,
    loss: LossFn,
    execution: Execution,
    variables: Variables,
    examples: EvalSet,
    *,
    ranked: bool = False,
    batch_size: int = 50,
) -> Counts:
    """Counts answers over an evaluation set, its batches spread over the devices.

    Args:
        model: the model.
        loss: per-sample loss.
        execution: devices.
        variables: the weights; may be batched by vmap.
        examples: ``index [n]`` and ``start [K + 1]``; both may be batched by vmap.
        ranked: whether to count the pairs that a score puts in order, for the AUC: it sorts the
          set, once for two classes and M times for more (10,000 samples in 2 ms on a CPU core).
        batch_size: rows at once.

    Returns:
        Counts of all samples that are no padding.
    """
    n, parts = len(examples.index), len(execution.devices)
    batch_size = min(batch_size, -(-n // parts))
    batches = -(-n // (batch_size * parts))  # per part

    def part(pool: tuple[Array, Array], weights: Variables, _: tuple[()], rows: Array) -> Any:
        answers = functools.partial(_answers, model, loss, weights, pool, ranked=ranked)
        return jax.lax.map(answers, rows)

    place = jnp.minimum(jnp.arange(parts * batches * batch_size, dtype=jnp.int32), n - 1)
    rows = examples.index[place].reshape(parts, batches, batch_size)
    pool = (examples.x, examples.y)
    out = execution.run(part, pool, variables, (), rows)
    out = jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:])[:n], out)
    predicted, losses, ranking = execution.replicate(out)
    return _counted(model, predicted, losses, ranking if ranked else None, examples)


def evaluate_own(
    model: Model,
    loss: LossFn,
    personal: Callable[..., Any],
    examples: EvalSet,
    *,
    most: int,
    ranked: bool = False,
    batch_size: int = 50,
) -> Counts:
    """Counts the answers of each client's own model to that client's samples.

    Args:
        model: the model.
        loss: per-sample loss.
        personal: ``(score, constants, tasks) -> [K, ...]``, calls ``score(constants, variables,
          task)`` with each client's own model: ``Algorithm.personal`` of one run.
        examples: of the K clients; ``index`` and ``start`` may be batched by vmap.
        most: samples of the client that has the most.
        ranked: see :func:`evaluate`.
        batch_size: rows at once.

    Returns:
        Counts of all samples that are no padding.
    """
    batch_size = min(batch_size, most)
    room = -(-most // batch_size) * batch_size

    def score(pool: tuple[Array, Array], weights: Variables, task: tuple[Array, Array]) -> Any:
        rows, size = task
        answers = functools.partial(_answers, model, loss, weights, pool, ranked=ranked)

        def batch(b: Array, out: Any) -> Any:
            new = answers(jax.lax.dynamic_slice_in_dim(rows, b * batch_size, batch_size))
            return jax.tree.map(
                lambda a, v: jax.lax.dynamic_update_slice_in_dim(a, v, b * batch_size, axis=0),
                out,
                new,
            )

        empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(answers, rows))
        return jax.lax.fori_loop(0, (size + batch_size - 1) // batch_size, batch, empty)

    n, start = len(examples.index), examples.start
    position = start[:-1, None] + jnp.arange(room, dtype=jnp.int32)[None]
    rows = examples.index[jnp.minimum(position, n - 1)]
    out = personal(score, (examples.x, examples.y), (rows, jnp.diff(start)))
    client = jnp.minimum(_owners(examples), examples.clients - 1)
    here = jnp.minimum(jnp.arange(n, dtype=jnp.int32) - start[client], room - 1)
    predicted, losses, ranking = jax.tree.map(lambda a: a[client, here], out)
    return _counted(model, predicted, losses, ranking if ranked else None, examples)


def _answers(
    model: Model,
    loss: LossFn,
    weights: Variables,
    pool: tuple[Array, Array],
    rows: Array,
    *,
    ranked: bool,
) -> tuple[Array, Array, PyTree]:
    """Of a model to ``rows int32[B]`` of a pool: answers, losses, scores that rank (or ())."""
    xs, ys = pool
    logits, _ = model.apply(weights, xs[rows], train=False)
    answer = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return answer, loss(logits, ys[rows]), _ranking(logits) if ranked else ()


def _ranking(logits: Array) -> Array:
    """Scores that rank samples by class, ``f32[B, C]``: nothing saturates as a probability does."""
    if logits.shape[-1] == 2:
        return logits[:, 1:] - logits[:, :1]
    return jax.nn.log_softmax(logits)


def _owners(examples: EvalSet) -> Array:
    """The client of each entry of ``index``, ``int32[n]``; K for padding, which comes last."""
    n = len(examples.index)
    # A client ends where the next one starts.
    ends = jnp.zeros(n + 1, jnp.int32).at[examples.start[1:]].add(1)
    return jnp.cumsum(ends)[:n]


def _counted(
    model: Model, predicted: Array, losses: Array, ranking: Array | None, examples: EvalSet
) -> Counts:
    def logits(x: Array) -> Array:
        return model.apply(model.init(jax.random.key(0)), x, train=False)[0]

    classes, clients = jax.eval_shape(logits, examples.x[:1]).shape[-1], examples.clients
    labels = examples.y[examples.index]
    client = _owners(examples)
    real = client < clients
    by_client = tally(predicted, labels, losses, client, groups=clients, classes=classes)
    pooled = jax.tree.map(lambda a: jnp.sum(a, axis=0), by_client)
    # One running sum of 10⁵ losses would lose 7e-6 of them.
    pooled = pooled._replace(loss=jnp.sum(jnp.where(real, losses, 0)))
    if ranking is not None:
        first = classes - ranking.shape[-1]  # the first class that is ranked
        positive = labels[:, None] == jnp.arange(first, classes, dtype=jnp.int32)[None]

        def wins(group: Array, groups: int) -> Array:
            count = functools.partial(rank_wins, groups=groups)
            return jax.vmap(count, in_axes=(1, 1, None), out_axes=1)(ranking, positive, group)

        pooled = pooled._replace(wins=wins((~real).astype(jnp.int32), 1)[0])
        if clients > 1:
            by_client = by_client._replace(wins=wins(client, clients))
    return Counts(pooled, by_client if clients > 1 else None)


class Scores(NamedTuple):
    """Scores of groups of samples, one array entry for each group; NaN if there is none.

    Attributes:
        accuracy: ``f64[...]``, fraction of right answers.
        f1: ``f64[...]``, mean over classes of F1, weighted by the samples of each.
        auc: ``f64[...]`` or None if nothing was ranked: area under the ROC curve; of more than two
          classes the unweighted mean of each against the rest. NaN for a group of one class.
        loss: ``f64[...]``, mean.
    """

    accuracy: Floats
    f1: Floats
    auc: Floats | None
    loss: Floats

    def mean(self) -> Scores:
        """Unweighted mean over the last axis, of the groups that have a score."""
        return Scores(*(None if a is None else mean_known(a) for a in self))  # type: ignore[arg-type]


def scores(tally: Tally) -> Scores:
    r"""Scores in float64 from counts.

    .. math:: F_1 = \sum_y \frac{n_y}{n} \cdot \frac{2\,\mathrm{TP}_y}{n_y + \hat n_y}, \qquad
        \mathrm{AUC}_y = \frac{U_y}{n_y (n - n_y)}

    with :math:`n_y` samples of class y, :math:`\hat n_y` answers y, :math:`\mathrm{TP}_y` of them
    right.

    Args:
        tally: arrays ``[..., M]``, any leading axes.

    Returns:
        Arrays ``[...]``.

    >>> counts = Tally(*np.array([[1, 1], [1, 2], [2, 1]]), np.float32(3), None)
    >>> scores(counts).accuracy.round(3), scores(counts).f1.round(3), float(scores(counts).loss)
    (np.float64(0.667), np.float64(0.667), 1.0)
    """
    correct, predicted, total = (np.asarray(a, np.float64) for a in tally[:3])
    n = total.sum(axis=-1)
    f1 = np.nan_to_num(_ratio(2 * correct, total + predicted))
    return Scores(
        accuracy=_ratio(correct.sum(axis=-1), n),
        f1=_ratio((total * f1).sum(axis=-1), n),
        auc=None if tally.wins is None else _auc(np.asarray(tally.wins, np.float64), total),
        loss=_ratio(np.asarray(tally.loss, np.float64), n),
    )


class SetScores(NamedTuple):
    """Scores on an evaluation set.

    Attributes:
        pooled: ``[R]``, of all samples together.
        by_client: ``[R, K]``, each client's own; None if the set has one client.
    """

    pooled: Scores
    by_client: Scores | None

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Those that were computed."""
        return ("accuracy", "f1") if self.pooled.auc is None else ("accuracy", "f1", "auc")

    @property
    def reported(self) -> Scores:
        """``[R]``: the unweighted mean over clients if there are any, else pooled."""
        return self.pooled if self.by_client is None else self.by_client.mean()


def set_scores(counts: Counts) -> SetScores:
    """Scores of what :func:`evaluate` counted."""
    return SetScores(
        scores(counts.pooled), None if counts.by_client is None else scores(counts.by_client)
    )


def _auc(wins: Floats, total: Floats) -> Floats:
    positives = total[..., -wins.shape[-2] :]
    pairs = positives * (total.sum(axis=-1, keepdims=True) - positives)
    return mean_known(_ratio((wins[..., 0] + 2.0**WIN_BITS * wins[..., 1]) / 2, pairs))


def _ratio(above: Floats, below: Floats) -> Floats:
    """``above / below``, NaN if that is 0 / 0."""
    return np.divide(above, below, out=np.full(np.shape(below), np.nan), where=below > 0)


def mean_known(values: Floats) -> Floats:
    """Mean over the last axis of what is not NaN; NaN if nothing is known.

    >>> mean_known(np.array([[1.0, np.nan, 3.0], [np.nan, np.nan, np.nan]])).tolist()
    [2.0, nan]
    """
    known = ~np.isnan(values)
    return _ratio(np.where(known, values, 0).sum(axis=-1), known.sum(axis=-1, dtype=np.float64))


def client_accuracy(
    correct: NDArray[np.integer[Any]], count: NDArray[np.integer[Any]], table: NDArray[np.int64]
) -> NDArray[np.float64]:
    r"""Each client's expected accuracy on fresh data with its own label mix.

    .. math:: a_k = \sum_y p_k(y)\, a(y) \Big/ \sum_y p_k(y)

    over the classes y that the test set has, with a(y) the test accuracy on class y. Under label
    skew this is the accuracy a client would see; it costs nothing beyond the test set.

    Args:
        correct: ``int[M]``, right answers by class on the test set.
        count: ``int[M]``, test samples by class.
        table: ``int[N, M]``, samples of each class at each client.

    Returns:
        ``f64[N]``, fractions; NaN for a client without a class that was tested.

    >>> table = np.array([[9, 1, 0], [0, 5, 5], [0, 0, 3]])
    >>> client_accuracy(np.array([10, 0, 0]), np.array([10, 10, 0]), table).tolist()
    [0.9, 0.0, nan]
    """
    tested = np.where(count > 0, table, 0)
    by_class = correct / np.maximum(count, 1)
    return _ratio(tested @ by_class, tested.sum(axis=1, dtype=np.float64))


def spread(values: NDArray[np.float64]) -> dict[str, float]:
    """Mean, standard deviation, minimum, 10 % quantile and maximum of ``f64[N]``.

    NaN, a client without a score, is left out; of nothing else, all are NaN.

    >>> spread(np.array([0.0, 1.0, np.nan]))["mean"]
    0.5
    """
    values = values[~np.isnan(values)]
    if not len(values):
        return dict.fromkeys(("mean", "std", "min", "p10", "max"), np.nan)
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": float(values.min()),
        "p10": float(np.quantile(values, 0.1)),
        "max": float(values.max()),
    }
