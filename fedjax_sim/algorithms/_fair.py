"""Methods that weigh clients by their losses."""

from __future__ import annotations

from fedjax_sim.algorithms._method import method
from fedjax_sim.base import LocalUpdate, Objective
from fedjax_sim.client.reports import with_initial_loss
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import preaggregation, weighting


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
    r"""q-FFL by q-FedAvg: clients count by a power of their loss.

    .. math:: \min_w \sum_k \frac{1}{q+1} F_k^{q+1}(w), \qquad
              w \leftarrow w - \frac{\sum_k F_k^q \Delta_k}
              {\sum_k \bigl( q F_k^{q-1} \lVert \Delta_k \rVert^2 + \frac{1}{\eta} F_k^q \bigr)},
              \qquad \Delta_k = \frac{w - w_k}{\eta}

    With momentum ρ the η of both is :math:`\eta / (1 - \rho)`, which a step of the local optimiser
    amounts to.

    Args:
        objective: F, the objective of the local update.
        lr: η of the clients' SGD; that of local's optimiser.
        momentum: ρ of the clients' SGD; likewise.
        q: the power; the larger it is, the fairer. 0 is FedAvg with equal weights.

    Returns:
        The algorithm. A visit costs one forward pass more. Traffic per round: m models down, m up,
        and a number with each.

    Raises:
        ValueError: if a setting is out of range, or local's optimiser is another one.

    Source: Li, Sanjabi, Beirami, Smith, "Fair resource allocation in federated learning", ICLR
    2020 <https://arxiv.org/abs/1905.10497>, Algorithm 2.
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
    r"""AFL: trains for the worst mixture of clients.

    .. math:: \min_w \max_{\lambda \in \Delta_N} \sum_k \lambda_k F_k(w), \qquad
              w \leftarrow \frac{\sum_k \lambda_k w_k}{\sum_k \lambda_k}, \qquad
              \lambda \leftarrow \Pi_\Delta (\lambda + \gamma \nabla_\lambda)

    See :func:`fedjax_sim.preaggregation.agnostic`. In the paper w takes single stochastic gradient
    steps over the clients; here each client runs its local update, and with a partial cohort the
    mixture is that of the cohort. FedJAX's agnostic averaging instead moves λ on the simplex by
    exponentiated gradients, over domains that are given.

    Args:
        objective: F, the objective of the local update.
        step: γ, the step of λ, the clients' weights, per unit of loss; 0 weighs clients equally.

    Returns:
        The algorithm; with a step of 0 it is FedAvg with equal weights. A visit costs one forward
        pass more. Traffic per round: m models down, m up, and a number with each.

    Raises:
        ValueError: if step is negative.

    Source: Mohri, Sivek, Suresh, "Agnostic federated learning", ICML 2019
    <https://arxiv.org/abs/1902.00146>, section 4.
    """
    return compose(
        with_initial_loss(local, objective),
        clients_per_round,
        weighting=weighting.equal,
        preaggregation=(preaggregation.agnostic(step),),
    )
