"""FedProx: a proximal term holds the local models to what they received."""

from __future__ import annotations

from fedjax_sim import drift, schedule, selection
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution


def fedprox(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    mu: float | None = None,
    adaptive: bool = False,
    inexactness: float | None = None,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedProx: FedAvg on local objectives with a proximal term.

    .. math:: h_k(w) = F_k(w) + \frac{\mu}{2} \lVert w - w_t \rVert^2

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        mu: μ of the proximal term; if adaptive that of the first round. None: 0.01, or 0 if
          adaptive.
        adaptive: μ rises by 0.1 when the training loss rises and sinks by 0.1 after 5 falls in a
          row, see :func:`fedjax_sim.drift.adaptive_proximal`.
        inexactness: γ; a client stops after the epoch that brings the gradient of its h, the loss
          with the proximal term, to γ times its norm at the start, or less. None: what the local
          update has.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; mu = 0 is FedAvg, bit for bit. Traffic per round: m models down, m up; if
        adaptive, 12 bytes more down and 8 up for each.

    Raises:
        ValueError: if mu or inexactness is out of range.

    Source: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous
    networks", MLSys 2020, Algorithm 2 and section 5.3; Vo, Rakotobe, Table 2 (γ).

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> fedprox(local, clients_per_round=10, mu=0.1).slots
        10
    """
    fixed = 0.01 if mu is None else mu
    term = drift.adaptive_proximal(mu or 0.0) if adaptive else drift.proximal(fixed)
    stop = {} if inexactness is None else {"inexactness": inexactness}
    return compose(
        local.change(drift=(term,), **stop),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        execution=execution,
    )
