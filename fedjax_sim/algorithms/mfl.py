"""MFL: momentum federated learning."""

from __future__ import annotations

from fedjax_sim import schedule, selection
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution


def mfl(
    local: LocalUpdate, *, clients_per_round: int, execution: Execution | None = None
) -> Algorithm:
    r"""MFL: the clients' momenta are averaged and sent on, like their models.

    .. math:: d_k \leftarrow \rho\, d_k + \nabla F_b(w_k), \quad w_k \leftarrow w_k - \eta\, d_k,
              \qquad (w, d)_{t+1} = \sum_{k \in U_t} \frac{n_k}{\sum_{j \in U_t} n_j} (w_k, d_k)

    Args:
        local: the local update, whose optimiser has momentum; of any other its state is averaged.
        clients_per_round: m, the cohort drawn without replacement.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; without momentum FedAvg, bit for bit. Traffic per round: m models and m
        momenta down, as many up: twice FedAvg's.

    Source: Liu, Chen, Chen, Zhang, "Accelerating federated learning via momentum gradient descent",
    IEEE TPDS 2020, Algorithm 1.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1, momentum=0.9), batch_size=16)
        >>> mfl(local, clients_per_round=10).slots
        10
    """
    return compose(
        local.change(optimizer_state="average"),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        execution=execution,
    )
