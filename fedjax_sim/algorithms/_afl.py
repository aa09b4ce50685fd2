"""AFL: agnostic federated learning."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, Objective, part
from fedjax_sim.client.reports import with_initial_loss
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import preaggregation, weighting


@part
def afl(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    step: float = 0.01,
    execution: Execution | None = None,
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
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        objective: F, the objective of the local update.
        step: γ, the step of λ, the clients' weights, per unit of loss; 0 weighs clients equally.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; with a step of 0 it is FedAvg with equal weights. A visit costs one forward
        pass more. Traffic per round: m models down, m up, and a number with each.

    Raises:
        ValueError: if step is negative.

    Source: Mohri, Sivek, Suresh, "Agnostic federated learning", ICML 2019
    <https://arxiv.org/abs/1902.00146>, section 4.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.afl(
        ...     local, clients_per_round=5, objective=problem.objective, step=0.1
        ... )
        >>> problem.accuracy(algorithm, rounds=3) > 0.75
        True
    """
    return compose(
        with_initial_loss(local, objective),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        weighting=weighting.equal,
        preaggregation=(preaggregation.agnostic(step),),
        execution=execution,
    )
