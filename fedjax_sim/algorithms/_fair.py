"""Methods that weight clients by their losses."""

from __future__ import annotations

from fedjax_sim.algorithms._method import method
from fedjax_sim.base import LocalUpdate, Objective
from fedjax_sim.client.reports import with_initial_loss
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import preaggregation, weighting

__all__ = ["afl", "qffl"]


@method
def qffl(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    lr: float,
    momentum: float = 0.0,
    q: float = 1.0,
) -> Algorithm:
    r"""q-FFL (q-FedAvg): weights clients by a power of their loss, for more uniform accuracy.

    .. math:: \min_w \sum_k \frac{1}{q+1} F_k^{q+1}(w), \qquad
              w \leftarrow w - \frac{\sum_k F_k^q \Delta_k}
              {\sum_k \bigl( q F_k^{q-1} \lVert \Delta_k \rVert^2 + \frac{1}{\eta} F_k^q \bigr)},
              \qquad \Delta_k = \frac{w - w_k}{\eta}

    With momentum ρ, both η are :math:`\eta / (1 - \rho)`, the effective learning rate of the local
    optimiser.

    Args:
        q: exponent of the losses; a larger q is fairer. 0 is FedAvg with equal weights.

    Returns:
        The algorithm. A local update costs one more forward pass. Traffic per round: m models down,
        m up, and one number with each.

    Raises:
        ValueError: if a setting is out of range, or the local update's optimiser is not SGD with lr
            and momentum.

    Source: Li, Sanjabi, Beirami, Smith, "Fair resource allocation in federated learning", ICLR 2020
    <https://arxiv.org/abs/1905.10497>, Algorithm 2.
    """
    return compose(
        with_initial_loss(local, objective),
        clients_per_round,
        weighting=weighting.equal,
        preaggregation=(preaggregation.q_fair(q, lr, momentum),),
    )


@method
def afl(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    step: float = 0.01,
) -> Algorithm:
    r"""AFL: minimises the loss of the worst-case mixture of clients.

    .. math:: \min_w \max_{\lambda \in \Delta_N} \sum_k \lambda_k F_k(w), \qquad
              w \leftarrow \frac{\sum_k \lambda_k w_k}{\sum_k \lambda_k}, \qquad
              \lambda \leftarrow \Pi_\Delta (\lambda + \gamma \nabla_\lambda)

    See :class:`fedjax_sim.preaggregation.agnostic`. In the paper, w takes single stochastic
    gradient steps over the clients; here each client runs its local update, and with partial
    participation the mixture covers the cohort. FedJAX's agnostic averaging instead updates λ on
    the simplex by exponentiated gradients, over given domains.

    Args:
        step: γ: step of the client weights λ per unit of loss; 0 keeps them equal.

    Returns:
        The algorithm; with ``step=0`` it is FedAvg with equal weights. A local update costs one
        more forward pass. Traffic per round: m models down, m up, and one number with each.

    Source: Mohri, Sivek, Suresh, "Agnostic federated learning", ICML 2019
    <https://arxiv.org/abs/1902.00146>, section 4.
    """
    return compose(
        with_initial_loss(local, objective),
        clients_per_round,
        weighting=weighting.equal,
        preaggregation=(preaggregation.agnostic(step),),
    )
