"""Krum and multi-Krum."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Aggregator, Array, PyTree, part
from fedjax_sim.engine import tree
from fedjax_sim.engine.distances import squared_between
from fedjax_sim.server.aggregators._rows import (
    check_share,
    counted,
    enough,
    in_floats,
    measured,
    needing,
)


@part
def krum(byzantine: float | Array = 0.2) -> Aggregator:
    r"""Krum: the row that lies nearest to its neighbours.

    .. math:: w = w_{k^*}, \quad k^* = \arg\min_k s(k), \quad
              s(k) = \sum_{j \in N_k} \lVert w_k - w_j \rVert^2

    with :math:`N_k` the n - f - 2 other rows nearest to row k (at least one of them), n the present
    rows, :math:`f = \lfloor \text{byzantine} \cdot n \rfloor`. Distances are over the trainable
    parameters; BatchNorm statistics follow the chosen row, undefended. Every present row counts
    once, however large its weight. Rows of equal score are averaged, so that their order cannot
    decide.

    The proof is about the rows that come. If clients sleep, are lost or miss a deadline, n is the
    rest and f a share of that: of few rows f is 0, and Krum withstands nobody. ``compose`` cannot
    know how many come; a cohort well above 2f + 3 leaves some to lose.

    Args:
        byzantine: f/n, the share of the present rows that may be malicious; the proof asks for
            n > 2f + 2.

    Returns:
        An aggregator.

    Raises:
        ValueError: if byzantine is not in [0, 0.5); by ``compose``, if fewer than 2f + 3 models
            meet (or are waited for), or byzantine of them is no model.

    Source: Blanchard et al. 2017
    <https://papers.nips.cc/paper/2017/hash/f4b9ec30ad9f68f89b29639786cb62ef-Abstract.html>, section
    4.

    >>> krum(0.2)(jnp.array([[1.0], [1.1], [1.3], [1.6], [9e9]]), jnp.ones(5)).tolist()
    [1.100000023841858]
    """
    return multi_krum(byzantine, keep=1)


@part
def multi_krum(byzantine: float | Array = 0.2, keep: int | None = None) -> Aggregator:
    """Multi-Krum: the mean of the rows with the smallest scores of :func:`krum`.

    Flower weighs the rows that are kept by their samples; here and in the paper each counts once.

    Args:
        byzantine: f/n, the share of the present rows that may be malicious.
        keep: how many rows are averaged; None: n - f.

    Returns:
        An aggregator; rows that tie with the last one kept are kept too.

    Raises:
        ValueError: if byzantine is not in [0, 0.5), or keep is less than 1.

    Source: Blanchard et al. 2017
    <https://papers.nips.cc/paper/2017/hash/f4b9ec30ad9f68f89b29639786cb62ef-Abstract.html>, where
    it is m-Krum.

    >>> rows = jnp.array([[1.0], [1.1], [1.3], [1.6], [9e9]])
    >>> multi_krum(0.2)(rows, jnp.ones(5)).tolist()
    [1.25]
    """
    check_share("byzantine", byzantine)
    if keep is not None and keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")

    @in_floats
    def aggregate(stacked: PyTree, weights: Array, /) -> PyTree:
        present = weights > 0
        count = jnp.sum(present, dtype=jnp.int32)
        malicious = counted(byzantine, len(weights))(count)
        neighbours = jnp.maximum(count - malicious - 2, 1)
        score = jnp.where(present, _scores(stacked, present, neighbours), jnp.inf)
        kept = count - malicious if keep is None else jnp.minimum(keep, count)
        chosen = present & (score <= jnp.sort(score)[kept - 1])
        # Offsets from one of them: the mean is exactly that row if it is alone or all are equal.
        one = tree.take(stacked, jnp.argmax(chosen))
        offset = jax.tree.map(lambda rows, a: rows - a[None], stacked, one)
        return tree.add(one, tree.mean(offset, chosen.astype(jnp.float32)))

    return needing(aggregate, *enough("byzantine", byzantine, lambda f: 2 * f + 3))


def _scores(stacked: PyTree, present: Array, neighbours: Array) -> Array:
    """``f32[P]``, sums of the smallest squared distances to other present rows."""
    distance = squared_between(measured(stacked))
    others = present[None] & ~jnp.eye(len(present), dtype=bool)
    ascending = jnp.sort(jnp.where(others, distance, jnp.inf), axis=1)
    near = jnp.arange(len(present), dtype=jnp.int32) < neighbours
    return jnp.sum(jnp.where(near[None], ascending, 0), axis=1)
