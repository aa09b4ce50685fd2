"""Fairness: clients with a high loss count more."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    Cohort,
    Decay,
    Need,
    NonNegative,
    Positive,
    PreAggregation,
    PyTree,
    Variables,
    concrete,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.matching import sgd_of
from fedjax_sim.engine.needs import NO_FLIGHT, ONE_MODEL, SYNCHRONOUS
from fedjax_sim.engine.order import keep_whole

SMALLEST = 1e-10  # a loss of 0 has no power of a negative exponent


class q_fair(PreAggregation):
    r"""q-FFL: a step on :math:`\sum_k \frac{p_k}{q+1} F_k^{q+1}`, divided by a curvature bound.

    .. math:: w \leftarrow w - \frac{\sum_k a_k F_k^q(w)\, \Delta_k}
              {\sum_k a_k \bigl( q F_k^{q-1}(w) \lVert \Delta_k \rVert^2
              + \frac{1}{\eta} F_k^q(w) \bigr)}, \qquad \Delta_k = \frac{w - w_k}{\eta}

    where a_k are the input weights, 1 in the paper. With momentum ρ a client moves :math:`1 / (1 -
    \rho)` times as far for the same gradients, so η is replaced by :math:`\eta / (1 - \rho)`. The
    updates are scaled so that their mean is this step. The clients must report :math:`F_k(w)`
    (:func:`fedjax_sim.local.with_initial_loss`); a loss below 1e-10 counts as 1e-10. The state
    (BatchNorm statistics) is averaged unscaled.

    Args:
        q: the exponent; 0 changes nothing; larger values put more weight on the worst clients.
        lr: η of the clients' SGD; 1/η stands for the Lipschitz constant.
        momentum: ρ of the clients' SGD.

    Raises:
        ValueError: if a setting is out of range; in the first round, if the loss is not reported.

    Source: Li et al. 2020 <https://arxiv.org/abs/1905.10497>, Algorithm 2 (q-FedAvg).

    Example:
        >>> from fedjax_sim.base import LocalInfo
        >>> k = jnp.arange(2)
        >>> info = LocalInfo(k, k, k, {"initial_loss": jnp.array([1.0, 3.0])})
        >>> w = Variables(jnp.zeros(1), ())
        >>> cohort = Cohort(w, tree.stack_copies(w, 1), k, k >= 0, k, info, (), None)
        >>> updates = Variables(jnp.array([[-1.0], [1.0]]), ())
        >>> updates, weights, _ = q_fair(1.0, 1.0).apply(None, (), updates, jnp.ones(2), cohort)
        >>> round(float(tree.mean(updates, weights).params[0]), 4)  # (3 - 1) / (1 + 1 + 1 + 3)
        0.3333
    """

    q: NonNegative
    lr: Positive
    momentum: Decay = 0.0

    reads = ("initial_loss",)

    @property
    def needs(self) -> tuple[Need, ...]:
        return (ONE_MODEL, NO_FLIGHT, SYNCHRONOUS, sgd_of("lr", self.lr, self.momentum))

    def apply(
        self, key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        q, rate, present = self.q, self.lr / (1 - self.momentum), weights > 0
        loss = jnp.where(
            present, jnp.maximum(cohort.info.extra["initial_loss"], SMALLEST), SMALLEST
        )
        # Both sums are divided by the largest F^q: powers of the loss can leave the range of f32.
        largest = jnp.max(loss)
        power = (loss / largest) ** q
        scale = power / rate
        if not concrete(q) or q > 0:
            square = jnp.square(tree.norms(updates.params) / rate)
            scale = scale + q * power / loss * square
        total = tree.row_sum(jnp.where(present, weights * scale, 0))
        factor = tree.row_sum(weights) * power / rate / total
        params = jax.vmap(tree.scale)(factor, updates.params)
        return Variables(params, updates.state), weights, state


class agnostic(PreAggregation):
    r"""AFL: trains the clients' weights too, for the worst mixture of clients.

    .. math:: w \leftarrow \frac{\sum_k \lambda_k w_k}{\sum_k \lambda_k}, \qquad
              \lambda \leftarrow \Pi_\Delta \bigl( \lambda + \gamma \nabla_\lambda
              \sum_k \lambda_k F_k(w) \bigr)

    over the cohort; λ lies on the simplex of all N clients and starts at 1/N. Π is the Euclidean
    projection; the gradient is :math:`F_k(w)` for the clients that trained and 0 for the others. A
    round uses the λ from before it, as in the paper. If λ is 0 for the whole cohort, the model is
    unchanged. The clients must report :math:`F_k(w)`
    (:func:`fedjax_sim.local.with_initial_loss`). The state is λ, ``f32[N]``.

    Args:
        step: γ, the step size of λ per unit of loss; 0 weights clients equally.

    Raises:
        ValueError: if step is negative; in the first round, if the loss is not reported.

    Source: Mohri et al. 2019 <https://arxiv.org/abs/1902.00146>, section 4 (stochastic AFL).
    """

    step: NonNegative

    reads = ("initial_loss",)
    weighs = True
    needs = (ONE_MODEL, NO_FLIGHT, SYNCHRONOUS)

    def init(self, variables: Variables, data: ClientData) -> Array:
        return jnp.full(data.clients, 1 / data.clients, jnp.float32)

    def apply(
        self, key: Array, mixture: Array, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, Array]:
        present = weights > 0
        new = jnp.where(present, mixture[cohort.client], 0)
        counts = new > 0
        # If λ is 0 for all, no update counts.
        rows = tree.select_rows(counts, updates, jax.tree.map(jnp.zeros_like, updates))
        ascent = jnp.where(present, self.step * cohort.info.extra["initial_loss"], 0)
        client, ascent = keep_whole((cohort.client, ascent))
        moved = mixture.at[client].add(ascent, mode="drop")
        after = _onto_simplex(moved)
        return rows, jnp.where(jnp.any(counts), new, weights), after


def _onto_simplex(v: Array) -> Array:
    """Projects a vector onto the simplex.

    optax's projection promotes dtypes implicitly, which strict JAX rejects.
    """
    falling = jnp.sort(v, descending=True)
    excess = jnp.cumsum(falling) - 1
    count = jnp.arange(1, len(v) + 1, dtype=v.dtype)
    last = jnp.sum(falling * count > excess) - 1  # of those that stay positive
    return jnp.maximum(v - excess[last] / count[last], 0)
