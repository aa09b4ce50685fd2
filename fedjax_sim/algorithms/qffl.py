"""q-FFL: fair federated learning."""

from __future__ import annotations

from fedjax_sim import schedule, screens, selection, weighting
from fedjax_sim.base import Algorithm, LocalUpdate, Objective
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution
from fedjax_sim.measured import with_initial_loss


def qffl(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    lr: float,
    q: float = 1.0,
    execution: Execution | None = None,
) -> Algorithm:
    r"""q-FFL by q-FedAvg: clients count by a power of their loss.

    .. math:: \min_w \sum_k \frac{1}{q+1} F_k^{q+1}(w), \qquad
              w \leftarrow w - \frac{\sum_k F_k^q \Delta_k}
              {\sum_k \bigl( q F_k^{q-1} \lVert \Delta_k \rVert^2 + \frac{1}{\eta} F_k^q \bigr)},
              \qquad \Delta_k = \frac{w - w_k}{\eta}

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        objective: F, that of the local update.
        lr: η of the clients' SGD; must be that of local's optimiser, which cannot be checked (the
            command gives its --lr to both).
        q: the power; 0 is FedAvg with equal weights, the larger the fairer.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. A client's visit costs one forward pass more. Traffic per round: m models
        down, m up, and a number with each.

    Raises:
        ValueError: if q or lr is out of range.

    Source: Li, Sanjabi, Beirami, Smith, "Fair resource allocation in federated learning", ICLR
    2020, Algorithm 2.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> risk = empirical_risk(models.logistic((8, 8, 1), 10))
        >>> local = local_sgd(risk, optax.sgd(0.1))
        >>> qffl(local, clients_per_round=10, objective=risk, lr=0.1, q=2.0).slots
        10
    """
    return compose(
        with_initial_loss(local, objective),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        weighting=weighting.equal,
        screens=(screens.q_fair(q, lr),),
        execution=execution,
    )
