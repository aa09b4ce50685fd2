"""Sign agreement: a learning rate of 0 where the clients pull in different directions."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Cohort, PreAggregation, PyTree, Variables, part
from fedjax_sim.engine import tree


@part
def sign_agreement(threshold: float, *, literal: bool = False) -> PreAggregation:
    r"""Keeps the coordinates in which enough clients agree on the sign of the update.

    .. math:: w_{k,i} \leftarrow \begin{cases}
              w_{k,i} & \bigl| \sum_j \operatorname{sgn}(\Delta_j)_i \bigr| \ge \theta \\
              w_i & \text{otherwise}
              \end{cases}
              \qquad \Delta_j = w_j - w

    so that the server's learning rate is 0 in the other coordinates. Every model counts once,
    however large its weight. The state (BatchNorm statistics) is left as it is. A server optimiser
    with momentum adds up the updates that are kept, and a coordinate that it once moved goes on.

    Args:
        threshold: θ; as many as there are models, all must agree. 0 changes nothing, bit for bit.
        literal: as printed, without the absolute value: this also stops every coordinate in which
            the clients agree on a negative step. The paper's own source (robust learning rate) has
            the absolute value.

    Returns:
        A pre-aggregation without state.

    Raises:
        ValueError: if threshold is negative.

    Source: Ozdayi et al. 2020 <https://arxiv.org/abs/2010.15582>, section 3.4; Ozdayi et al. 2021
    <https://arxiv.org/abs/2007.03767>, which goes backwards where the signs disagree.

    Example:
        >>> w, k = Variables(jnp.zeros(3), ()), jnp.arange(2)
        >>> rows = Variables(jnp.array([[1.0, -1.0, 2.0], [3.0, -5.0, -2.0]]), ())
        >>> cohort = Cohort(w, tree.stack_copies(w, 1), k, k >= 0, k, None, (), None)
        >>> sign_agreement(2).apply(None, (), rows, jnp.ones(2), cohort)[0].params.tolist()
        [[1.0, -1.0, 0.0], [3.0, -5.0, 0.0]]
    """
    if not threshold >= 0:
        raise ValueError(f"threshold must be at least 0, got {threshold}")

    def apply(
        key: Array, state: PyTree, models: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        del key

        def agreed(rows: Array, start: Array) -> Array:
            signs = jnp.sign(rows - start)
            total = jnp.sum(jnp.where(tree.expand(weights, rows) > 0, signs, 0), axis=0)
            enough = (total if literal else jnp.abs(total)) >= threshold
            return jnp.where(enough[None], rows, start)

        params = jax.tree.map(agreed, models.params, cohort.received.params)
        return Variables(params, models.state), weights, state

    return PreAggregation(init=lambda variables, data: (), apply=apply)
