"""Sums by group, and the ratios of scores."""

from __future__ import annotations

from typing import Any

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
