"""RADFed: redistribution and delayed aggregation."""

from __future__ import annotations

from fedjax_sim import receive, redistribution, schedule, selection, weighting
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution


def radfed(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    redistribution_rounds: int = 5,
    execution: Execution | None = None,
) -> Algorithm:
    r"""RADFed: m models wander among the clients for S rounds, then are averaged once.

    .. math:: w_{t+1} = \frac1m \sum_{i=1}^m w_i^{(S)}, \qquad
              w_i^{(s+1)} = \mathrm{train}\bigl(w_{\pi_s(i)}^{(s)},\, U_i^{(s)}\bigr)

    with a random permutation :math:`\pi_s` and a fresh uniform cohort :math:`U^{(s)}` each round.

    Args:
        local: the local update.
        clients_per_round: m, the models in flight.
        redistribution_rounds: S; 1 is FedAvg with equal weights, bit for bit.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; one step is one local (inner) round. Traffic per round: m models down, m up
        (a redistributed model travels as the server model would).

    Source: Xue, Klabjan, Luo, "Aggregation delayed federated learning", 2021, Algorithm 1.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> radfed(local, clients_per_round=10, redistribution_rounds=5).slots
        10
    """
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.delayed(clients_per_round, redistribution_rounds),
        redistribution=redistribution.permute,
        receive=receive.nothing(),
        weighting=weighting.equal,
        execution=execution,
    )
