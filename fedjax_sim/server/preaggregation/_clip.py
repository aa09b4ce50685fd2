"""Clipping of the clients' updates."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Cohort, PreAggregation, PyTree, Variables, part
from fedjax_sim.engine import tree


@part
def clip_norm(limit: float) -> PreAggregation:
    r"""Scales every client's update down to a norm.

    .. math:: w_k \leftarrow w + \min\Bigl(1, \frac{C}{\lVert w_k - w \rVert}\Bigr) (w_k - w)

    The norm is over the trainable parameters; the state (BatchNorm statistics) is left as it is. A
    row without a finite norm becomes w.

    Args:
        limit: C.

    Returns:
        A pre-aggregation without state.

    Raises:
        ValueError: if limit is not positive.

    Source: Sun et al. 2019 <https://arxiv.org/abs/1911.07963>, section 4.

    >>> w, k = Variables(jnp.zeros(2), ()), jnp.zeros(1, jnp.int32)
    >>> cohort = Cohort(w, tree.stack_copies(w, 1), k, k >= 0, k, None, (), None)
    >>> rows = Variables(jnp.array([[3.0, 4.0]]), ())
    >>> clip_norm(1.0).apply(None, (), rows, jnp.ones(1), cohort)[0].params.round(3).tolist()
    [[0.6000000238418579, 0.800000011920929]]
    """
    if not limit > 0:
        raise ValueError(f"limit must be positive, got {limit}")

    def apply(
        key: Array, state: PyTree, models: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        del key
        change = jax.tree.map(jnp.subtract, models.params, cohort.received.params)
        norm = jax.vmap(tree.norm)(change)
        factor = jnp.minimum(1, limit / norm)  # 1 for an unchanged row: C / 0 is infinite

        def clipped(w: Array, delta: Array) -> Array:
            by = tree.expand(factor, delta).astype(delta.dtype)
            return w + jnp.where(tree.expand(jnp.isfinite(norm), delta), by * delta, 0)

        params = jax.tree.map(clipped, cohort.received.params, change)
        return Variables(params, models.state), weights, state

    return PreAggregation(init=lambda variables, data: (), apply=apply)
