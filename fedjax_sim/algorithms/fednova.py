"""FedNova: normalised averaging of clients that took unequal steps."""

from __future__ import annotations

from fedjax_sim import drift, schedule, screens, selection
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution


def fednova(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    lr: float,
    momentum: float,
    mu: float = 0.0,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedNova: FedAvg with every client's change normalised by its accumulated steps.

    .. math:: w_{t+1} = w_t - \tau_{eff} \sum_{k \in U_t} p_k \frac{w_t - w_k}{a_k}, \qquad
              \tau_{eff} = \sum_{k \in U_t} p_k a_k, \quad p_k = \frac{n_k}{\sum_j n_j}

    with a_k after T_k local steps as in :func:`fedjax_sim.screens.normalise`: T_k for plain SGD.

    Args:
        local: the local update; SGD, whose momentum starts anew in every round (a_k counts on it),
            whatever its optimizer_state.
        clients_per_round: m, the cohort drawn without replacement.
        lr: η of the clients' SGD; must be that of local's optimiser, which cannot be checked (the
            command gives its --lr to both).
        momentum: ρ of the clients' SGD; likewise (--momentum).
        mu: μ of a proximal term, without momentum only; 0: none.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up, and T_k with each.

    Raises:
        ValueError: if momentum or mu is out of range, or both are positive.

    Source: Wang, Liu, Liang, Joshi, Poor, "Tackling the objective inconsistency problem in
    heterogeneous federated optimization", NeurIPS 2020, sections 3 and 4.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1, momentum=0.9), batch_size=16)
        >>> fednova(local, clients_per_round=10, lr=0.1, momentum=0.9).slots
        10
    """
    return compose(
        local.change(optimizer_state="reset", drift=(drift.proximal(mu),) if mu else ()),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        screens=(screens.normalise(lr, momentum, mu),),
        execution=execution,
    )
