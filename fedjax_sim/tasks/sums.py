"""Sums by group, the counts behind the scores of classes, and the ratios of scores."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Array, Metric, PyTree
from fedjax_sim.engine import tree

Floats = NDArray[np.float64]
SHARE = Metric(percent=True)


def add_up(values: PyTree, group: Array, groups: int) -> PyTree:
    """Returns sums over the samples of each group; booleans count as 0 and 1.

    Args:
        values: leaves ``[n, ...]``.
        group: ``int32[n]``, from 0; samples of groups from G on are not counted.
        groups: G.

    Returns:
        Leaves ``[G, ...]``.

    >>> add_up(jnp.array([1.0, 2.0, 4.0]), jnp.array([0, 1, 0]), 2).tolist()
    [5.0, 2.0]
    """

    def total(leaf: Array) -> Array:
        leaf = leaf.astype(jnp.int32) if leaf.dtype == bool else leaf
        if groups > 1:
            return jax.ops.segment_sum(leaf, group, groups)
        # A segment sum of 10⁵ losses has a relative error of 7e-6.
        here = jnp.where(tree.expand(group == 0, leaf), leaf, 0)
        return jnp.sum(here, axis=0, keepdims=True, dtype=leaf.dtype)

    return jax.tree.map(total, values)


def plain_sums(answers: PyTree, y: Array, group: Array, groups: int) -> PyTree:
    """Returns ``Task.sums`` for answers that are added up, see :func:`add_up`."""
    return add_up(answers, group, groups)


def ratio(above: Any, below: Any) -> Floats:
    """Returns ``above / below`` in float64, NaN unless ``below`` is positive.

    >>> ratio(np.array([1, 0]), np.array([4, 0])).tolist()
    [0.25, nan]
    """
    above, below = np.asarray(above, np.float64), np.asarray(below, np.float64)
    unknown = np.full(np.broadcast_shapes(above.shape, below.shape), np.nan)
    return np.divide(above, below, out=unknown, where=below > 0)


def mean_known(values: Floats) -> Floats:
    """Returns the mean over the last axis without NaN; NaN if all are NaN.

    >>> mean_known(np.array([[1.0, np.nan, 3.0], [np.nan, np.nan, np.nan]])).tolist()
    [2.0, nan]
    """
    known = ~np.isnan(values)
    return ratio(np.where(known, values, 0).sum(axis=-1), known.sum(axis=-1))


class Tally(NamedTuple):
    r"""Counts of G groups of samples, from which scores are computed without rounding.

    Attributes:
        correct: ``int32[G, M]``, correct predictions by class.
        predicted: ``int32[G, M]``, predictions by predicted class.
        total: ``int32[G, M]``, samples by class.
        wins: ``uint32[G, C, 2]`` or None, :math:`2U` of :func:`rank_wins` for every ranked class:
          the second of two classes, or each of more.
        fooled: ``int32[G]`` or None, samples with a trigger that are classified as it wants.
        triggered: ``int32[G]`` or None, samples with a trigger; they count nowhere else.
    """

    correct: Array
    predicted: Array
    total: Array
    wins: Array | None
    fooled: Array | None = None
    triggered: Array | None = None


WIN_BITS = 11
"""Bits at which :func:`rank_wins` splits its counts: 2U exceeds 32 bits from n = 92,682 on."""

MOST_RANKED = 2**21
"""The largest number of samples that :func:`rank_wins` can count."""


def tally(predicted: Array, labels: Array, group: Array, *, groups: int, classes: int) -> Tally:
    """Counts the predicted classes ``int32[n]`` by group and class; ``wins`` is None.

    Samples of groups from ``groups`` on are not counted.

    >>> answers, labels, group = jnp.array([0, 1, 1]), jnp.array([0, 0, 1]), jnp.array([0, 0, 1])
    >>> t = tally(answers, labels, group, groups=1, classes=2)
    >>> t.correct.tolist(), t.predicted.tolist(), t.total.tolist()
    ([[1, 0]], [[1, 1]], [[2, 0]])
    """

    def count(classes_of: Array, which: Array) -> Array:
        # A scatter of n numbers; a one-hot sum costs M times as much (80 for characters).
        cells = jnp.zeros(groups * classes, jnp.int32)
        cells = cells.at[group * classes + classes_of].add(which.astype(jnp.int32), mode="drop")
        return cells.reshape(groups, classes)

    return Tally(
        correct=count(labels, predicted == labels),
        predicted=count(predicted, jnp.ones_like(labels)),
        total=count(labels, jnp.ones_like(labels)),
        wins=None,
    )


def rank_wins(score: Array, positive: Array, group: Array, *, groups: int) -> Array:
    r"""Counts correctly ordered pairs, exactly: twice the Mann-Whitney statistic.

    .. math:: 2U = \sum_{i\,\text{positive}}
        \#\{j\,\text{negative}: s_j < s_i\} + \#\{j\,\text{negative}: s_j \le s_i\}

    so that a tie counts half, and the area under the ROC curve is :math:`U / (PN)`.

    Args:
        score: ``f32[n]``, n at most ``MOST_RANKED``.
        positive: ``bool[n]``.
        group: ``int32[n]``; only pairs within a group count. Groups from ``groups`` on do not.
        groups: G.

    Returns:
        ``uint32[G, 2]``: :math:`2U` is the first plus ``2**WIN_BITS`` times the second.

    >>> score, positive = jnp.array([0.1, 0.4, 0.4, 0.8]), jnp.array([False, True, False, True])
    >>> rank_wins(score, positive, jnp.zeros(4, jnp.int32), groups=1).tolist()  # 3.5 of 4 pairs
    [[7, 0]]
    """
    group, score, hit = jax.lax.sort((group, score, positive.astype(jnp.int32)), num_keys=2)
    through = jnp.cumsum(1 - hit)  # negatives up to here, this one included
    before = through - (1 - hit)
    starts_group = jnp.concatenate([jnp.ones(1, bool), group[1:] != group[:-1]])
    starts_tie = starts_group | jnp.concatenate([jnp.ones(1, bool), score[1:] != score[:-1]])
    ends_tie = jnp.concatenate([starts_tie[1:], jnp.ones(1, bool)])
    lowest = jax.lax.cummax(jnp.where(starts_group, before, 0))
    below = jax.lax.cummax(jnp.where(starts_tie, before, 0))
    up_to = jax.lax.cummin(jnp.where(ends_tie, through, len(hit)), reverse=True)
    wins = (hit * (below + up_to - 2 * lowest)).astype(jnp.uint32)
    halves = (wins & jnp.uint32(2**WIN_BITS - 1), wins >> jnp.uint32(WIN_BITS))
    return jnp.stack([jax.ops.segment_sum(a, group, groups) for a in halves], axis=-1)
