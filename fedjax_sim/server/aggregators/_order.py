"""Coordinate-wise rules: the median and the trimmed mean."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Minority, Need, PyTree
from fedjax_sim.engine import tree
from fedjax_sim.server.aggregators._rows import Rule, enough, in_floats, share_of


@in_floats
def coordinate_median(stacked: PyTree, weights: Array, /) -> PyTree:
    r"""Returns the median of every coordinate, :math:`w_i = \mathrm{med}_k\, (w_k)_i`.

    For an even number of rows it is the mean of the middle two. Every present row counts once,
    whatever its weight: the number of samples is a client's own claim.

    Args:
        stacked: ``[P, *p]``; NaN counts as infinity.
        weights: ``f32[P]``; a row of weight 0 is absent.

    Returns:
        ``[*p]``, within the range of the honest rows if fewer than half of the present rows are
        malicious.

    Source: Yin et al. 2018 <https://arxiv.org/abs/1803.01498>, Definition 1.

    >>> coordinate_median(jnp.array([1.0, 9e9, 2.0, jnp.nan]), jnp.array([1.0, 1.0, 5.0, 0.0]))
    Array(2., dtype=float32)
    """
    return _trimmed(stacked, weights, lambda present: (present - 1) // 2)


class trimmed_mean(Rule):
    r"""The mean of every coordinate without its smallest and its largest values.

    .. math:: w_i = \frac{1}{n - 2t} \sum_{j=t+1}^{n-t} (w_{(j)})_i, \qquad
              t = \lfloor \beta n \rfloor

    with the values of the n present rows in ascending order, separately for each coordinate. Every
    present row counts once, whatever its weight. NaN counts as infinity. t is rounded down as in
    ``scipy.stats.trim_mean``.

    Args:
        beta: β, the share of the present rows that is cut off at each end; the mean withstands
            that share of malicious rows. 0 is the unweighted mean.

    Raises:
        ValueError: if beta is not in [0, 0.5); by ``compose``, if beta of the models is less than
            one model.

    Source: Yin et al. 2018 <https://arxiv.org/abs/1803.01498>, Definition 2.

    >>> rows = jnp.array([1.0, 9e9, 2.0, 4.0, jnp.nan])
    >>> trimmed_mean(0.25)(rows, jnp.array([1.0, 1.0, 5.0, 1.0, 0.0]))
    Array(3., dtype=float32)
    """

    beta: Minority | Array = 0.2

    @property
    def needs(self) -> tuple[Need, ...]:
        return enough("beta", self.beta, lambda trimmed: 2 * trimmed + 1)

    def _reduce(self, stacked: PyTree, weights: Array, /) -> PyTree:
        rows = len(weights)
        return _trimmed(stacked, weights, lambda present: share_of(present, self.beta, rows))


def _trimmed(stacked: PyTree, weights: Array, cut: Callable[[Array], Array]) -> PyTree:
    """Returns the mean of each coordinate without ``cut(n)`` values at each end."""
    present = weights > 0
    count = jnp.sum(present, dtype=jnp.int32)
    first = cut(count)

    def leaf(rows: Array) -> Array:
        # A present infinity and an absent row may swap ranks: they have the same value.
        rows = jnp.where(tree.expand(present, rows) & ~jnp.isnan(rows), rows, jnp.inf)
        rank = _ranks(rows)
        lowest = tree.row_sum(jnp.where(rank == first, rows, 0))
        kept = (rank >= first) & (rank < count - first)
        above = tree.row_sum(jnp.where(kept, rows - lowest[None], 0))  # 0 if all are equal
        return lowest + above / (count - 2 * first).astype(rows.dtype)

    return jax.tree.map(leaf, stacked)


def _ranks(rows: Array) -> Array:
    """Returns the rank of every value in the ascending order of its coordinate, ``int32[P, *p]``.

    It counts smaller values: for 20 rows of 200,000 float32 this takes a 14th of the time of XLA's
    sort along the leading axis on CPU (17 ms and 242 ms), for 100 rows a third.
    """
    number = jnp.arange(len(rows), dtype=jnp.int32)

    def count(j: Array, rank: Array) -> Array:
        other = rows[j][None]
        tie = (other == rows) & tree.expand(j < number, rows)
        return rank + ((other < rows) | tie).astype(jnp.int32)

    return jax.lax.fori_loop(0, len(rows), count, jnp.zeros(rows.shape, jnp.int32))
