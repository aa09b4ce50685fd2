"""Rules that compare rows by distance: Krum, the geometric median and a spectral filter."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Count, Minority, Need, Positive, PyTree, Variables
from fedjax_sim.engine import tree
from fedjax_sim.server.aggregators._order import coordinate_median
from fedjax_sim.server.aggregators._rows import Rule, enough, share_of, trainable


class _Krum(Rule):
    """The mean of the rows with the smallest scores."""

    byzantine: Minority | Array = 0.2

    @property
    def needs(self) -> tuple[Need, ...]:
        return enough("byzantine", self.byzantine, lambda f: 2 * f + 3)

    @property
    def keep(self) -> int | None:  # the number of rows to average; None: n - f
        return 1

    def _reduce(self, stacked: PyTree, weights: Array, /) -> PyTree:
        present = weights > 0
        count = jnp.sum(present, dtype=jnp.int32)
        malicious = share_of(count, self.byzantine, len(weights))
        neighbours = jnp.maximum(count - malicious - 2, 1)
        score = jnp.where(present, _scores(stacked, present, neighbours), jnp.inf)
        kept = count - malicious if self.keep is None else jnp.minimum(self.keep, count)
        chosen = present & (score <= jnp.sort(score)[kept - 1])
        # Offsets from one of them: the mean is exactly that row if it is alone or all are equal.
        one = tree.take(stacked, jnp.argmax(chosen))
        offset = jax.tree.map(lambda rows, a: rows - a[None], stacked, one)
        return tree.add(one, tree.mean(offset, chosen.astype(jnp.float32)))


class krum(_Krum):
    r"""Krum: the row with the smallest distances to its nearest neighbours.

    .. math:: w = w_{k^*}, \quad k^* = \arg\min_k s(k), \quad
              s(k) = \sum_{j \in N_k} \lVert w_k - w_j \rVert^2

    with :math:`N_k` the n - f - 2 other rows nearest to row k (at least one of them), n the present
    rows, :math:`f = \lfloor \text{byzantine} \cdot n \rfloor`. Distances are over the trainable
    parameters; BatchNorm statistics are those of the selected row, undefended. Every present row
    counts once, whatever its weight. Rows of equal score are averaged, so the result does not
    depend on their order.

    The proof is about the rows that arrive. If clients sleep, are lost or miss a deadline, n counts
    only the others and f is a share of them: if they are few, f is 0 and Krum withstands no
    malicious row. ``compose`` cannot know how many will arrive; choose a cohort well above 2f + 3.

    Args:
        byzantine: f/n, the share of the present rows that may be malicious; the proof requires
            n > 2f + 2.

    Raises:
        ValueError: if byzantine is not in [0, 0.5); by ``compose``, if fewer than 2f + 3 models
            are aggregated (or awaited), or byzantine of them is less than one model.

    Source: Blanchard et al. 2017
    <https://papers.nips.cc/paper/2017/hash/f4b9ec30ad9f68f89b29639786cb62ef-Abstract.html>, section
    4.

    >>> krum(0.2)(jnp.array([[1.0], [1.1], [1.3], [1.6], [9e9]]), jnp.ones(5)).tolist()
    [1.100000023841858]
    """


class multi_krum(_Krum):
    """Multi-Krum: the mean of the rows with the smallest scores of :func:`krum`.

    Rows that tie with the last one kept are kept too. Flower weights the kept rows by their
    samples; here and in the paper each counts once.

    Args:
        byzantine: f/n, the share of the present rows that may be malicious.
        keep: the number of rows to average; None: n - f.

    Raises:
        ValueError: if byzantine is not in [0, 0.5), or keep is less than 1; by ``compose``, as of
            :func:`krum`.

    Source: Blanchard et al. 2017
    <https://papers.nips.cc/paper/2017/hash/f4b9ec30ad9f68f89b29639786cb62ef-Abstract.html>, where
    it is m-Krum.

    >>> rows = jnp.array([[1.0], [1.1], [1.3], [1.6], [9e9]])
    >>> multi_krum(0.2)(rows, jnp.ones(5)).tolist()
    [1.25]
    """

    keep: Count | None = None


def _scores(stacked: PyTree, present: Array, neighbours: Array) -> Array:
    """Returns ``f32[P]``, the sums of the smallest squared distances to other present rows."""
    distance = tree.pairwise_squared_distances(trainable(stacked))
    others = present[None] & ~jnp.eye(len(present), dtype=bool)
    ascending = jnp.sort(jnp.where(others, distance, jnp.inf), axis=1)
    near = jnp.arange(len(present), dtype=jnp.int32) < neighbours
    return jnp.sum(jnp.where(near[None], ascending, 0), axis=1)


class geometric_median(Rule):
    r"""The point with the smallest weighted sum of distances to the rows (RFA).

    .. math:: \arg\min_z \sum_k a_k \lVert z - w_k \rVert, \qquad
              z \leftarrow z + \max\Bigl(0, 1 - \frac{\eta}{\lVert R \rVert}\Bigr)
              \frac{R}{\sum_k \beta_k}, \quad R = \sum_k \beta_k (w_k - z), \quad
              \beta_k = \frac{a_k}{\lVert z - w_k \rVert}

    over the rows farther than ε from z, where η is the weight of the others. It starts from the
    coordinate-wise median, so outliers cost no iterations. Distances are over the trainable
    parameters; BatchNorm statistics are their coordinate-wise median. Rows at an infinite distance
    have no influence. ``weighting.equal`` makes it ignore the clients' sizes.

    Args:
        iterations: the number of Weiszfeld steps.
        eps: ε, the distance below which z counts as lying on a row.

    Raises:
        ValueError: if iterations is less than 1 or eps is not positive.

    Source: Pillutla et al. 2022 <https://arxiv.org/abs/1912.13445>; Vardi, Zhang 2000
    <https://doi.org/10.1073/pnas.97.4.1423>, for the step at a row: RFA itself divides by
    max(ε, distance), and so hardly moves away from a row that it reaches.

    >>> rows = jnp.array([[0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [9e9, 9e9]])
    >>> median = geometric_median(30)(rows, jnp.array([1.0, 1.0, 1.0, 0.0]))
    >>> [round(float(v), 3) for v in median]
    [0.211, 0.211]
    """

    iterations: Count = 10
    eps: Positive = 1e-6

    def _reduce(self, stacked: PyTree, weights: Array, /) -> PyTree:
        rows, present = trainable(stacked), weights > 0

        def step(_: Array, centre: PyTree) -> PyTree:
            distance = jnp.sqrt(tree.squared_distances(rows, centre))
            at_centre = present & (distance <= self.eps)
            beta = jnp.where(present & ~at_centre, weights / distance, 0)
            eta = tree.row_sum(jnp.where(at_centre, weights, 0))
            towards = tree.subtract(tree.mean(rows, beta), centre)
            force = tree.row_sum(beta) * tree.norm(towards)
            # Without a row farther than ε the force is NaN, which is not greater than η either.
            share = jnp.where(force > eta, 1 - eta / force, 0)
            return jax.tree.map(
                lambda z, d: z + jnp.where(share > 0, share.astype(d.dtype) * d, 0), centre, towards
            )

        start = coordinate_median(stacked, weights)
        centre = jax.lax.fori_loop(0, self.iterations, step, trainable(start))
        return Variables(centre, start.state) if isinstance(start, Variables) else centre


class caf(Rule):
    r"""CAF: reduces the weights of rows along the direction of the largest variance.

    .. math:: c_i \leftarrow c_i \Bigl(1 - \frac{\tau_i}{\max_j \tau_j}\Bigr), \qquad
              \tau_i = \langle w_i - \mu_c, v_c \rangle^2, \quad
              \mu_c = \frac{\sum_i c_i w_i}{\sum_i c_i}

    from :math:`c_i = 1` as long as :math:`\sum_i c_i > n - 2f`, with :math:`v_c` the eigenvector of
    the largest eigenvalue :math:`\lambda_c` of the covariance of the rows under the weights c. The
    aggregate is the :math:`\mu_c` whose :math:`\lambda_c` was the smallest; n are the present rows,
    :math:`f = \lfloor \text{byzantine} \cdot n \rfloor`. It needs no bound on the honest rows'
    variance. Eigenvectors are over the trainable parameters; BatchNorm statistics are averaged with
    the same c. Every present row counts once, whatever its weight. A row starts with c = 0 if 8
    times its squared distance from the coordinate-wise median is beyond float32.

    ByzFL approximates :math:`v_c` by one step of the power method from a random vector; here it is
    exact, computed from the [n, n] products of the rows, which alone read whole models. JAX has no
    reverse-mode derivative of the loop.

    Args:
        byzantine: f/n, the share of the present rows that may be malicious; 0 is the unweighted
            mean.

    Raises:
        ValueError: if byzantine is not in [0, 0.5); by ``compose``, if byzantine of the models is
            less than one model.

    Source: Allouah et al. 2025 <https://arxiv.org/abs/2505.01874>, the covariance-bound agnostic
    filter.

    >>> caf(0.25)(jnp.array([[1.0], [2.0], [3.0], [9e9]]), jnp.ones(4)).tolist()
    [2.0]
    """

    byzantine: Minority | Array = 0.2

    @property
    def needs(self) -> tuple[Need, ...]:
        return enough("byzantine", self.byzantine, lambda f: 2 * f + 1)

    def _reduce(self, stacked: PyTree, weights: Array, /) -> PyTree:
        present = weights > 0
        count = jnp.sum(present, dtype=jnp.int32)
        malicious = share_of(count, self.byzantine, len(weights))
        kept = (count - 2 * malicious).astype(jnp.float32)
        # Offsets from a robust centre, not from the mean: next to the products of outliers those
        # of the others would cancel.
        centre = coordinate_median(stacked, weights)
        offset = jax.tree.map(lambda rows, a: rows - a[None], stacked, centre)
        # Entries of the centred products may be four times the largest squared distance.
        square = tree.squared_distances(trainable(stacked), trainable(centre))
        finite = present & jnp.isfinite(8 * square)
        products = _products(tree.select_rows(finite, offset, jax.tree.map(jnp.zeros_like, offset)))

        def filtered(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            c, best, least = state
            spread, along = _principal(products, c)
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


def _products(offset: PyTree) -> Array:
    """Returns the inner products of the rows, ``f32[P, P]``."""

    def leaf(rows: Array) -> Array:
        flat = rows.reshape(len(rows), -1)
        return jnp.dot(flat, flat.T, precision="highest").astype(jnp.float32)

    leaves = jax.tree.leaves(jax.tree.map(leaf, trainable(offset)))
    return jnp.sum(jnp.stack(leaves), axis=0)


def _principal(products: Array, c: Array) -> tuple[Array, Array]:
    """Returns λ_c ``f32[]`` and the rows' components along v_c, up to a factor, ``f32[P]``.

    With D the rows minus their mean, X = C^½ D / (Σ c)^½ has the covariance XᵀX; an eigenvector u
    of XXᵀ yields the covariance's eigenvector Xᵀu, and the rows' components along it, D Xᵀu.
    """
    share = c / jnp.sum(c)
    mean = products @ share
    centred = products - mean[None] - mean[:, None] + share @ mean
    root = jnp.sqrt(share)
    values, vectors = jnp.linalg.eigh(root[:, None] * centred * root[None])
    along = centred @ (root * vectors[:, -1])
    # τ is a ratio; the square of an outlier's component could overflow.
    return values[-1], along / jnp.maximum(jnp.max(jnp.abs(along)), 1e-38)
