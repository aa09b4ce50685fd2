"""A filter of the rows that stretch the spread of all."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Aggregator, Array, PyTree, part
from fedjax_sim.engine import tree
from fedjax_sim.engine.distances import squared_from
from fedjax_sim.server.aggregators._order import coordinate_median
from fedjax_sim.server.aggregators._rows import (
    check_share,
    counted,
    enough,
    in_floats,
    measured,
    needing,
)


@part
def caf(byzantine: float | Array = 0.2) -> Aggregator:
    r"""CAF: rows lose weight as they lie along the direction in which all spread most.

    .. math:: c_i \leftarrow c_i \Bigl(1 - \frac{\tau_i}{\max_j \tau_j}\Bigr), \qquad
              \tau_i = \langle w_i - \mu_c, v_c \rangle^2, \quad
              \mu_c = \frac{\sum_i c_i w_i}{\sum_i c_i}

    from :math:`c_i = 1` as long as :math:`\sum_i c_i > n - 2f`, with :math:`v_c` the eigenvector of
    the largest eigenvalue :math:`\lambda_c` of the covariance of the rows under the weights c. The
    aggregate is the :math:`\mu_c` whose :math:`\lambda_c` was the smallest on the way; n are the
    present rows, :math:`f = \lfloor \text{byzantine} \cdot n \rfloor`. No bound on the honest rows'
    spread is needed. Eigenvectors are over the trainable parameters; BatchNorm statistics are
    averaged by the same c. Every present row counts once, however large its weight. A row without a
    finite distance to the coordinate median starts with c = 0.

    ByzFL takes a step of the power method for :math:`v_c`, from a random vector; here it is exact:
    it follows from the [n, n] products of the rows, so that only these look at whole models. JAX
    refuses reverse mode through the loop.

    Args:
        byzantine: f/n, the share of the present rows that may be malicious; 0 is the unweighted
            mean.

    Returns:
        An aggregator.

    Raises:
        ValueError: if byzantine is not in [0, 0.5); by ``compose``, if byzantine of the models that
            meet is no model.

    Source: Allouah et al. 2025 <https://arxiv.org/abs/2505.01874>, the covariance-bound agnostic
    filter.

    >>> caf(0.25)(jnp.array([[1.0], [2.0], [3.0], [9e9]]), jnp.ones(4)).tolist()
    [2.0]
    """
    check_share("byzantine", byzantine)

    @in_floats
    def aggregate(stacked: PyTree, weights: Array, /) -> PyTree:
        present = weights > 0
        count = jnp.sum(present, dtype=jnp.int32)
        kept = (count - 2 * counted(byzantine, len(weights))(count)).astype(jnp.float32)
        # Offsets from a robust centre, not from the mean: beside the products of far rows those
        # of the others would cancel.
        centre = coordinate_median(stacked, weights)
        offset = jax.tree.map(lambda rows, a: rows - a[None], stacked, centre)
        finite = present & jnp.isfinite(squared_from(measured(stacked), measured(centre)))
        products = _products(tree.select_rows(finite, offset, jax.tree.map(jnp.zeros_like, offset)))

        def filtered(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            c, best, least = state
            spread, along = _widest(products, c)
            better = spread < least
            best, least = jnp.where(better, c, best), jnp.where(better, spread, least)
            tau = jnp.where(c > 0, jnp.square(along), 0)
            most = jnp.max(tau)
            return jnp.where(most > 0, c * (1 - tau / most), 0), best, least

        start = finite.astype(jnp.float32)
        _, best, _ = jax.lax.while_loop(
            lambda state: jnp.sum(state[0]) > kept, filtered, (start, start, jnp.float32(jnp.inf))
        )
        return tree.add(centre, tree.mean(offset, best))

    return needing(aggregate, *enough("byzantine", byzantine, lambda f: 2 * f + 1))


def _products(offset: PyTree) -> Array:
    """``f32[P, P]``, the inner products of the rows."""

    def leaf(rows: Array) -> Array:
        flat = rows.reshape(len(rows), -1)
        return jnp.dot(flat, flat.T, precision="highest").astype(jnp.float32)

    leaves = jax.tree.leaves(jax.tree.map(leaf, measured(offset)))
    return jnp.sum(jnp.stack(leaves), axis=0)


def _widest(products: Array, c: Array) -> tuple[Array, Array]:
    """λ_c, and the rows along v_c, of any length: ``f32[]``, ``f32[P]``.

    With D the rows less their mean, X = C^½ D / (Σ c)^½ has the covariance XᵀX; an eigenvector u of
    XXᵀ gives that of the covariance, Xᵀu, and the rows along it, D Xᵀu.
    """
    share = c / jnp.sum(c)
    mean = products @ share
    centred = products - mean[None] - mean[:, None] + share @ mean
    root = jnp.sqrt(share)
    values, vectors = jnp.linalg.eigh(root[:, None] * centred * root[None])
    along = centred @ (root * vectors[:, -1])
    # τ is a ratio; the square of a far row's could overflow.
    return values[-1], along / jnp.maximum(jnp.max(jnp.abs(along)), 1e-38)
