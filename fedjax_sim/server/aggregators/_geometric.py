"""The geometric median."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Aggregator, Array, PyTree, Variables, part
from fedjax_sim.engine import tree
from fedjax_sim.engine.distances import squared_from
from fedjax_sim.server.aggregators._order import coordinate_median
from fedjax_sim.server.aggregators._rows import in_floats, measured


@part
def geometric_median(iterations: int = 10, eps: float = 1e-6) -> Aggregator:
    r"""The point with the smallest weighted sum of distances to the rows (RFA).

    .. math:: \arg\min_z \sum_k a_k \lVert z - w_k \rVert, \qquad
              z \leftarrow z + \max\Bigl(0, 1 - \frac{\eta}{\lVert R \rVert}\Bigr)
              \frac{R}{\sum_k \beta_k}, \quad R = \sum_k \beta_k (w_k - z), \quad
              \beta_k = \frac{a_k}{\lVert z - w_k \rVert}

    over the rows farther than ε from z, where η is the weight of the others. It starts from the
    coordinate median, so that far rows cost no iterations. Distances are over the trainable
    parameters; for BatchNorm statistics the coordinate median is taken. A row at an infinite
    distance has no pull.

    Args:
        iterations: Weiszfeld steps.
        eps: ε, the distance at which z counts as lying on a row.

    Returns:
        An aggregator; ``weighting.equal`` makes it ignore the clients' sizes.

    Raises:
        ValueError: if iterations is less than 1 or eps is not positive.

    Source: Pillutla et al. 2022 <https://arxiv.org/abs/1912.13445>; Vardi, Zhang 2000
    <https://doi.org/10.1073/pnas.97.4.1423>, for the step at a row: RFA itself divides by
    max(ε, distance), and so hardly leaves a row that it meets.

    >>> rows = jnp.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [9e9, 9e9]])
    >>> median = geometric_median(30)(rows, jnp.array([1.0, 1.0, 1.0, 0.0]))
    >>> [round(float(v), 3) for v in median]
    [0.211, 0.211]
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    if not eps > 0:
        raise ValueError(f"eps must be positive, got {eps}")

    @in_floats
    def aggregate(stacked: PyTree, weights: Array, /) -> PyTree:
        rows, present = measured(stacked), weights > 0

        def step(_: Array, centre: PyTree) -> PyTree:
            distance = jnp.sqrt(squared_from(rows, centre))
            here = present & (distance <= eps)
            beta = jnp.where(present & ~here, weights / distance, 0)
            eta = tree.row_sum(jnp.where(here, weights, 0))
            towards = tree.subtract(tree.mean(rows, beta), centre)
            force = tree.row_sum(beta) * tree.norm(towards)
            # Without a row farther than ε the force is NaN, which is not greater than η either.
            share = jnp.where(force > eta, 1 - eta / force, 0)
            return jax.tree.map(
                lambda z, d: z + jnp.where(share > 0, share.astype(d.dtype) * d, 0), centre, towards
            )

        start = coordinate_median(stacked, weights)
        centre = jax.lax.fori_loop(0, iterations, step, measured(start))
        return Variables(centre, start.state) if isinstance(start, Variables) else centre

    return aggregate
