"""Coordinate by coordinate: the median and the trimmed mean."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim import tree
from fedjax_sim.aggregators.rows import counted, in_floats
from fedjax_sim.base import Aggregator, Array, PyTree


@in_floats
def coordinate_median(stacked: PyTree, weights: Array, /) -> PyTree:
    r"""The median of every coordinate, :math:`w_i = \mathrm{med}_k\, (w_k)_i`.

    Of an even number of rows the mean of the middle two. Every present row counts once, whatever
    its weight: the number of samples is a client's own claim.

    Args:
        stacked: ``[P, *p]``; NaN counts as infinity.
        weights: ``f32[P]``; a row of weight 0 is absent.

    Returns:
        ``[*p]``, bounded by the honest rows while fewer than half of the present ones are not.

    Source: Yin, Chen, Ramchandran, Bartlett, "Byzantine-robust distributed learning: towards
    optimal statistical rates", ICML 2018, Definition 1.

    >>> coordinate_median(jnp.array([1.0, 9e9, 2.0, jnp.nan]), jnp.array([1.0, 1.0, 5.0, 0.0]))
    Array(2., dtype=float32)
    """
    return _trimmed(stacked, weights, lambda present: (present - 1) // 2)


def trimmed_mean(beta: float = 0.2) -> Aggregator:
    r"""The mean of every coordinate without its smallest and its largest values.

    .. math:: w_i = \frac{1}{n - 2t} \sum_{j=t+1}^{n-t} (w_{(j)})_i, \qquad
              t = \lfloor \beta n \rfloor

    with the values of the n present rows in ascending order, for each coordinate its own. Every
    present row counts once, whatever its weight.

    Args:
        beta: β, the part of the present rows that is cut off at either side; it withstands as many
            malicious ones. 0 is the unweighted mean.

    Returns:
        An aggregator; NaN counts as infinity.

    Raises:
        ValueError: if beta is not in [0, 0.5).

    Source: Yin et al. 2018, Definition 2; t is rounded down as in ``scipy.stats.trim_mean``.

    >>> rows = jnp.array([1.0, 9e9, 2.0, 4.0, jnp.nan])
    >>> trimmed_mean(0.25)(rows, jnp.array([1.0, 1.0, 5.0, 1.0, 0.0]))
    Array(3., dtype=float32)
    """
    if not 0 <= beta < 0.5:
        raise ValueError(f"beta must be in [0, 0.5), got {beta}")

    @in_floats
    def aggregate(stacked: PyTree, weights: Array, /) -> PyTree:
        return _trimmed(stacked, weights, counted(beta, len(weights)))

    return aggregate


def _trimmed(stacked: PyTree, weights: Array, cut: Callable[[Array], Array]) -> PyTree:
    """The mean of the coordinates' values without ``cut(n)`` at either side."""
    present = weights > 0
    count = jnp.sum(present, dtype=jnp.int32)
    first = cut(count)

    def leaf(rows: Array) -> Array:
        # A present infinity and an absent row may change ranks: their value is the same.
        rows = jnp.where(tree.expand(present, rows) & ~jnp.isnan(rows), rows, jnp.inf)
        rank = _ranks(rows)
        lowest = jnp.sum(jnp.where(rank == first, rows, 0), axis=0)
        kept = (rank >= first) & (rank < count - first)
        above = jnp.sum(jnp.where(kept, rows - lowest[None], 0), axis=0)  # 0 where all are equal
        return lowest + above / (count - 2 * first).astype(rows.dtype)

    return jax.tree.map(leaf, stacked)


def _ranks(rows: Array) -> Array:
    """The place of every value in the ascending order of its coordinate, ``int32[P, *p]``.

    By counting: of 20 rows of 200,000 float32 it takes a 14th of the time of XLA's sort along the
    leading axis on CPU (17 ms and 242 ms), of 100 rows a third.
    """
    number = jnp.arange(len(rows), dtype=jnp.int32)

    def count(j: Array, rank: Array) -> Array:
        other = rows[j][None]
        tie = (other == rows) & tree.expand(j < number, rows)
        return rank + ((other < rows) | tie).astype(jnp.int32)

    return jax.lax.fori_loop(0, len(rows), count, jnp.zeros(rows.shape, jnp.int32))
