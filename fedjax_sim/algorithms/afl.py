"""AFL: agnostic federated learning."""

from __future__ import annotations

from fedjax_sim import schedule, screens, selection, weighting
from fedjax_sim.base import Algorithm, LocalUpdate, Objective
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution
from fedjax_sim.measured import with_initial_loss


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

    See :func:`fedjax_sim.screens.agnostic`. The paper takes single stochastic gradient steps of w
    over the clients; here each client runs its local update, and with a partial cohort the mixture
    is that of the cohort. FedJAX's agnostic averaging moves λ on the simplex by exponentiated
    gradients over given domains instead.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        objective: F, that of the local update.
        step: γ, the step of λ, the clients' weights, for each unit of loss; 0 is FedAvg with equal
          weights.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. A client's visit costs one forward pass more. Traffic per round: m models
        down, m up, and a number with each.

    Raises:
        ValueError: if step is negative.

    Source: Mohri, Sivek, Suresh, "Agnostic federated learning", ICML 2019, section 4.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> risk = empirical_risk(models.logistic((8, 8, 1), 10))
        >>> afl(local_sgd(risk, optax.sgd(0.1)), clients_per_round=10, objective=risk).slots
        10
    """
    return compose(
        with_initial_loss(local, objective),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        weighting=weighting.equal,
        screens=(screens.agnostic(step),),
        execution=execution,
    )
