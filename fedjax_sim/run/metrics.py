"""Scores of the server model and of personal models: pooled, by client, and their spread."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Array, ModelApply, PyTree, Sums, Task, Variables
from fedjax_sim.base.brief import brief, over_runs
from fedjax_sim.data.clients import EvalSet
from fedjax_sim.engine import tree
from fedjax_sim.engine.execution import Execution
from fedjax_sim.tasks.sums import Floats, add_up, mean_known, ratio

BATCH_SIZE = 50
"""Samples of an evaluation set to which a model answers at once, at most."""

Pool = tuple[PyTree, Array]
"""Inputs and targets of an evaluation set."""

Answers = tuple[Array, PyTree]
"""Losses and the task's answers, ``[n, ...]``."""


class Counts(NamedTuple):
    """Counts over an evaluation set, from :func:`evaluate`."""

    pooled: Sums  # counts of all samples together; its arrays lack the axis G
    by_client: Sums | None  # counts of each client, [K, ...]; None if the set has one client


def evaluate(
    apply: ModelApply,
    task: Task,
    execution: Execution,
    variables: Variables,
    examples: EvalSet,
) -> Counts:
    """Counts answers over an evaluation set; its batches are split over the devices.

    ``variables``, and ``index [n]`` and ``start [K + 1]`` of the examples, may be batched by vmap.
    """
    n, parts = len(examples.index), execution.groups
    batch_size = min(BATCH_SIZE, -(-n // parts))
    batches = -(-n // (batch_size * parts))  # per part

    def part(pool: Pool, weights: Variables, _: tuple[()], rows: Array) -> Any:
        answers = functools.partial(_answers, apply, task, weights, pool)
        return jax.lax.map(answers, rows)

    place = jnp.minimum(jnp.arange(parts * batches * batch_size, dtype=jnp.int32), n - 1)
    rows = examples.index[place].reshape(parts, batches, batch_size)
    pool = (examples.x, examples.y)
    out = execution.replicate(execution.run(part, pool, variables, (), rows))
    losses, answers = jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:])[:n], out)
    return _count(task, losses, answers, examples)


def own_answers(
    apply: ModelApply,
    task: Task,
    personal: Callable[..., Any],
    sets: Sequence[EvalSet],
    *,
    most: Sequence[int],
    clients: Array | None = None,
) -> tuple[Answers, ...]:
    """Returns the answers of clients' personal models to these clients' samples.

    ``personal(score, constants, tasks, clients) -> [K, ...]`` calls ``score(constants, variables,
    task)`` with each personal model of the ``clients int32[K]``, None for all; it is
    ``Algorithm.score_personal`` of one run. ``index`` and ``start`` of the sets may be batched by
    vmap; ``most`` is the number of samples of the largest client in each.

    Returns:
        Losses and answers ``[K, at least most, ...]`` of each set, for :func:`count_own`.
    """
    # A personal model may be trained to be scored: all sets are scored at once.
    sizes = [min(BATCH_SIZE, largest) for largest in most]

    def score(pools: Sequence[Pool], weights: Variables, own: Sequence[tuple[Array, Array]]) -> Any:
        return tuple(
            _own_answers(functools.partial(_answers, apply, task, weights, pool), *of_set, size)
            for pool, of_set, size in zip(pools, own, sizes, strict=True)
        )

    rows = tuple(
        _own_rows(examples, -(-largest // size) * size, clients)
        for examples, largest, size in zip(sets, most, sizes, strict=True)
    )
    pools = tuple((examples.x, examples.y) for examples in sets)
    out: tuple[Answers, ...] = personal(score, pools, rows, clients)
    return out


def _own_rows(examples: EvalSet, length: int, clients: Array | None) -> tuple[Array, Array]:
    """Returns the rows of clients' samples, ``int32[K, length]``, and how many there are."""
    n, start, sizes = len(examples.index), examples.start[:-1], jnp.diff(examples.start)
    if clients is not None:
        known = jnp.minimum(clients, examples.clients - 1)
        start, sizes = start[known], jnp.where(clients < examples.clients, sizes[known], 0)
    position = start[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    return examples.index[jnp.minimum(position, n - 1)], sizes


def _own_answers(
    answers: Callable[[Array], Answers], rows: Array, size: Array, batch_size: int
) -> Answers:
    """Returns the answers to the first ``size`` of some rows; zeros to the rest."""

    def batch(b: Array, out: Answers) -> Answers:
        new = answers(jax.lax.dynamic_slice_in_dim(rows, b * batch_size, batch_size))
        put = functools.partial(
            jax.lax.dynamic_update_slice_in_dim, start_index=b * batch_size, axis=0
        )
        found: Answers = jax.tree.map(put, out, new)
        return found

    empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(answers, rows))
    found: Answers = jax.lax.fori_loop(0, (size + batch_size - 1) // batch_size, batch, empty)
    return found


def count_own(task: Task, answers: Answers, examples: EvalSet) -> Counts:
    """Counts the :func:`own_answers` of all clients to a set, except to padding."""
    n, start, length = len(examples.index), examples.start, answers[0].shape[1]
    client = jnp.minimum(_owners(examples), examples.clients - 1)
    place = jnp.minimum(jnp.arange(n, dtype=jnp.int32) - start[client], length - 1)
    losses, kept = jax.tree.map(lambda a: a[client, place], answers)
    return _count(task, losses, kept, examples)


def _answers(apply: ModelApply, task: Task, weights: Variables, pool: Pool, rows: Array) -> Answers:
    """Returns losses and the task's answers of a model, for ``rows int32[B]`` of a pool."""
    x, y = tree.take(pool, rows)
    outputs, _ = apply(weights, x, train=False)
    return task.loss(outputs, y), task.answers(outputs, y)


def _owners(examples: EvalSet) -> Array:
    """Returns the client of each entry of ``index``, ``int32[n]``; K for padding, at the end."""
    n = len(examples.index)
    # A client ends where the next one starts.
    ends = jnp.zeros(n + 1, jnp.int32).at[examples.start[1:]].add(1)
    return jnp.cumsum(ends)[:n]


def _count(task: Task, losses: Array, answers: PyTree, examples: EvalSet) -> Counts:
    y, clients = examples.y[examples.index], examples.clients
    weight = jnp.ones(len(y), jnp.int32) if task.weight is None else task.weight(y)
    if task.weight is not None:
        losses = jnp.where(weight > 0, losses * weight.astype(losses.dtype), 0)

    def sums(group: Array, groups: int) -> Sums:
        loss, total = add_up((losses, weight), group, groups)
        return Sums(loss, total, task.sums(answers, y, group, groups))

    # All samples are one group; padding, at the end, is in no group.
    padding = jnp.arange(len(y), dtype=jnp.int32) >= examples.start[-1]
    pooled = jax.tree.map(lambda a: a[0], sums(padding.astype(jnp.int32), 1))
    return Counts(pooled, sums(_owners(examples), clients) if clients > 1 else None)


class Scores(Mapping[str, Floats]):
    """Scores of groups of samples by name, ``f64[...]``, also as attributes; NaN if undefined.

    They are the task's scores and the mean loss.

    >>> Scores({"mse": np.array([4.0]), "loss": np.array([2.0])}).mse.tolist()
    [4.0]
    """

    def __init__(self, values: Mapping[str, Floats]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Floats:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return brief(self, {name: over_runs(values) for name, values in self.items()})

    def __getattr__(self, name: str) -> Floats:
        if name == "_values":  # pickle and copy look for methods before it is there
            raise AttributeError(name)
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"no score {name!r}: there are {', '.join(self._values)}")
        return self._values[name]

    def mean(self) -> Scores:
        """Returns the unweighted mean over the last axis, over groups with a score."""
        return Scores({name: mean_known(values) for name, values in self.items()})


def _unflatten(names: tuple[str, ...], values: Any) -> Scores:
    return Scores(dict(zip(names, values, strict=True)))


jax.tree_util.register_pytree_node(Scores, lambda s: (tuple(s.values()), tuple(s)), _unflatten)


def scores(task: Task, sums: Sums) -> Scores:
    """Returns scores in float64 from sums, whose arrays may have any leading axes."""
    return Scores({**task.scores(sums), "loss": ratio(sums.loss, sums.weight)})


class SetScores(NamedTuple):
    """Scores on an evaluation set.

    Attributes:
        pooled: ``[R]``, scores of all samples together.
        by_client: ``[R, K]``, scores of each client; None if the set has one client.
    """

    pooled: Scores
    by_client: Scores | None

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the scores, except the loss."""
        return tuple(name for name in self.pooled if name != "loss")

    @property
    def reported(self) -> Scores:
        """``[R]``: the unweighted mean over clients if there are several, else pooled."""
        return self.pooled if self.by_client is None else self.by_client.mean()


def set_scores(task: Task, counts: Counts) -> SetScores:
    """Returns the scores of :func:`evaluate`'s counts, as NumPy arrays."""
    return SetScores(
        scores(task, counts.pooled),
        None if counts.by_client is None else scores(task, counts.by_client),
    )


def client_accuracy(
    correct: NDArray[np.integer[Any]], count: NDArray[np.integer[Any]], table: NDArray[np.int64]
) -> NDArray[np.float64]:
    r"""Returns each client's expected accuracy on new data with its label distribution, ``f64[N]``.

    .. math:: a_k = \sum_y p_k(y)\, a(y) / \sum_y p_k(y)

    over the classes y in the test set, with a(y) the test accuracy on class y: ``int[M]`` right
    answers of ``int[M]`` samples, for ``table int[N, M]``. Under label skew this is the accuracy
    that a client would see; it is NaN for a client without any class of the test set.

    >>> table = np.array([[9, 1, 0], [0, 5, 5], [0, 0, 3]])
    >>> client_accuracy(np.array([10, 0, 0]), np.array([10, 10, 0]), table).tolist()
    [0.9, 0.0, nan]
    """
    tested = np.where(count > 0, table, 0)
    by_class = correct / np.maximum(count, 1)
    return ratio(tested @ by_class, tested.sum(axis=1, dtype=np.float64))


def spread(values: NDArray[np.float64]) -> dict[str, float]:
    """Returns mean, standard deviation, minimum, 10 % and 90 % quantiles, maximum and count.

    NaN, a client without a score, is ignored; if all are NaN, so is everything but the count.

    >>> found = spread(np.array([0.0, 1.0, np.nan]))
    >>> found["mean"], found["clients"]
    (0.5, 2)
    """
    values = values[~np.isnan(values)]
    if not len(values):
        return dict.fromkeys(("mean", "std", "min", "p10", "p90", "max"), np.nan) | {"clients": 0}
    return {
        "mean": float(values.mean()),
        "std": float(values.std()),
        "min": float(values.min()),
        "p10": float(np.quantile(values, 0.1)),
        "p90": float(np.quantile(values, 0.9)),
        "max": float(values.max()),
        "clients": len(values),
    }
