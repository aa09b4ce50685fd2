"""Server steps that look at the updates behind the aggregate, or remember earlier ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Gathered, PyTree, Server, Variables, concrete, part
from fedjax_sim.engine import tree
from fedjax_sim.engine.matching import dual_clients
from fedjax_sim.engine.needs import ONE_MODEL, OWN_ROWS, PLAIN_MEAN


@part
def dynamic(alpha: float) -> Server:
    r"""FedDyn's server: the mean model, less what the clients' regularisers add up to.

    .. math:: h \leftarrow h - \alpha\, \frac{m}{N} \bar\Delta, \qquad
              w \leftarrow w + \bar\Delta - \frac{h}{\alpha}

    :math:`\bar\Delta` is the aggregate of the m updates, a plain mean in the paper; h starts at 0.
    The state (BatchNorm statistics) takes the aggregate's step. The clients' side is
    :func:`fedjax_sim.corrections.dynamic` with the same α.

    Args:
        alpha: α.

    Returns:
        A server with h, as large as the parameters.

    Raises:
        ValueError: if alpha is not positive.

    Source: Acar et al. 2021 <https://arxiv.org/abs/2111.04263>, Algorithm 1.
    """
    if concrete(alpha) and not alpha > 0:
        raise ValueError(f"alpha must be positive, got {alpha}")

    def update(
        key: Array, step: Variables, server: Variables, h: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        del key, server
        h = tree.subtract(h, tree.scale(alpha * _share(gathered), step.params))
        return step._replace(params=tree.subtract(step.params, tree.scale(1 / alpha, h))), h

    return Server(
        init=lambda variables: jax.tree.map(jnp.zeros_like, variables.params),
        update=update,
        needs=(dual_clients(alpha),),
        reads_updates=False,
        dual=alpha,
    )


@part
def participation() -> Server:
    r"""The mean over all clients, of which those that did not take part send nothing.

    .. math:: w_{t+1} = w_t + \frac{m}{N} \bar\Delta

    Here m updates meet, and :math:`\bar\Delta` is their aggregate. The state (BatchNorm statistics)
    takes the aggregate's step.

    Returns:
        A server; if all clients take part it is :func:`fedjax_sim.server.replace`.

    Source: Gong et al. 2022 <https://arxiv.org/abs/2204.03529>, its
    :math:`\eta = \lvert S_t \rvert / m`.
    """

    def update(
        key: Array, step: Variables, server: Variables, state: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        del key, server
        return step._replace(params=tree.scale(_share(gathered), step.params)), state

    return Server(init=lambda variables: (), update=update, needs=(OWN_ROWS,), reads_updates=False)


def _share(gathered: Gathered) -> Array:
    """The part of the clients that sent, m / N."""
    m = jnp.sum(gathered.weights > 0, dtype=jnp.int32)
    return m.astype(jnp.float32) / gathered.cohort.data.clients


@part
def extrapolated(eps: float = 1e-3) -> Server:
    r"""FedExP's server: the more the updates differ, the longer its step.

    .. math:: w \leftarrow w + \eta_g \bar\Delta, \qquad \eta_g = \max\left(1,
              \frac{\sum_k p_k \lVert \Delta_k \rVert^2}{2\,(\lVert \bar\Delta \rVert^2 +
              \varepsilon)}\right)

    p_k are the weights of the updates, 1/m in the paper. Norms are over parameters; the state
    (BatchNorm statistics) takes the aggregate's step. The authors evaluate the mean of the last two
    models.

    Args:
        eps: ε.

    Returns:
        A server.

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
    if concrete(eps) and not eps >= 0:
        raise ValueError(f"eps must be at least 0, got {eps}")

    def update(
        key: Array, step: Variables, server: Variables, state: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        del key, server
        weights = gathered.weights
        squares = tree.norms(gathered.updates.params) ** 2.0
        mean = tree.row_sum(jnp.where(weights > 0, weights * squares, 0)) / tree.row_sum(weights)
        rate = jnp.maximum(1, mean / (2 * (tree.norm(step.params) ** 2.0 + eps)))
        return step._replace(params=tree.scale(rate, step.params)), state

    return Server(init=lambda variables: (), update=update, needs=(ONE_MODEL, PLAIN_MEAN))
