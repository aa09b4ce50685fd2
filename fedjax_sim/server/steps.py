"""Server updates that read the clients' updates, or remember earlier ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    Gathered,
    Need,
    NonNegative,
    Positive,
    PyTree,
    Server,
    Variables,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.matching import FROM_NEWEST, dual_clients
from fedjax_sim.engine.needs import ONE_MODEL, OWN_ROWS, PLAIN_MEAN, SYNCHRONOUS


class dynamic(Server):
    r"""FedDyn's server: the mean model minus the sum of the clients' regularisers.

    .. math:: h \leftarrow h - \alpha\, \frac{m}{N} \bar\Delta, \qquad
              w \leftarrow w + \bar\Delta - \frac{h}{\alpha}

    :math:`\bar\Delta` is the aggregate of the m updates, a plain mean in the paper; h starts at 0
    and is as large as the parameters. The state (BatchNorm statistics) takes the aggregate's step.
    The clients' side is :func:`fedjax_sim.corrections.dynamic` with the same α.

    Args:
        alpha: α.

    Raises:
        ValueError: if alpha is not positive.

    Source: Acar et al. 2021 <https://arxiv.org/abs/2111.04263>, Algorithm 1.
    """

    alpha: Positive

    reads_updates = False

    @property
    def needs(self) -> tuple[Need, ...]:
        return (dual_clients(self.alpha),)

    @property
    def dual(self) -> float | Array:
        return self.alpha

    def init(self, variables: Variables) -> PyTree:
        return jax.tree.map(jnp.zeros_like, variables.params)

    def update(
        self, key: Array, step: Variables, server: Variables, h: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        h = tree.subtract(h, tree.scale(self.alpha * _participating(gathered), step.params))
        return step._replace(params=tree.subtract(step.params, tree.scale(1 / self.alpha, h))), h


class participation(Server):
    r"""Averages over all clients, as if the clients outside the cohort had sent zero updates.

    .. math:: w_{t+1} = w_t + \frac{m}{N} \bar\Delta

    :math:`\bar\Delta` is the aggregate of the m updates. The state (BatchNorm statistics) takes the
    aggregate's step. If all clients take part it is :func:`fedjax_sim.server.replace`.

    Source: Gong et al. 2022 <https://arxiv.org/abs/2204.03529>, its
    :math:`\eta = \lvert S_t \rvert / m`.
    """

    reads_updates = False
    needs = (OWN_ROWS,)

    def update(
        self, key: Array, step: Variables, server: Variables, state: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        return step._replace(params=tree.scale(_participating(gathered), step.params)), state


def _participating(gathered: Gathered) -> Array:
    """Returns the fraction of clients that sent an update, m / N."""
    m = jnp.sum(gathered.weights > 0, dtype=jnp.int32)
    return m.astype(jnp.float32) / gathered.cohort.data.clients


class extrapolated(Server):
    r"""FedExP's server: a longer step the more the updates differ.

    .. math:: w \leftarrow w + \eta_g \bar\Delta, \qquad \eta_g = \max\left(1,
              \frac{\sum_k p_k \lVert \Delta_k \rVert^2}{2\,(\lVert \bar\Delta \rVert^2 +
              \varepsilon)}\right)

    p_k are the weights of the updates, 1/m in the paper. Norms are over parameters; the state
    (BatchNorm statistics) takes the aggregate's step. The authors evaluate the mean of the last two
    models.

    Args:
        eps: ε.

    Raises:
        ValueError: if eps is negative.

    Source: Jhunjhunwala et al. 2023 <https://arxiv.org/abs/2301.09604>, Algorithm 1.

    Example:
        >>> w, updates = Variables(jnp.zeros(2), ()), Variables(jnp.array([[3.0, 1], [-1, 1]]), ())
        >>> gathered = Gathered(updates, jnp.ones(2), None)
        >>> step = tree.mean(updates, jnp.ones(2))  # (1, 1): (10 + 2) / 2 over 2 · 2
        >>> step, _ = extrapolated(0.0).update(None, step, w, (), gathered)
        >>> [round(float(s), 3) for s in step.params]
        [1.5, 1.5]
    """

    eps: NonNegative = 1e-3

    needs = (ONE_MODEL, SYNCHRONOUS, FROM_NEWEST, PLAIN_MEAN)

    def update(
        self, key: Array, step: Variables, server: Variables, state: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        weights = gathered.weights
        squares = tree.norms(gathered.updates.params) ** 2.0
        mean = tree.row_sum(jnp.where(weights > 0, weights * squares, 0)) / tree.row_sum(weights)
        rate = jnp.maximum(1, mean / (2 * (tree.norm(step.params) ** 2.0 + self.eps)))
        return step._replace(params=tree.scale(rate, step.params)), state
