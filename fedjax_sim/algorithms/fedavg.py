"""Federated averaging."""

from __future__ import annotations

from fedjax_sim import schedule, selection, weighting
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution


def fedavg(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    equal_weights: bool = False,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedAvg: every round a uniform cohort trains the server model; the mean replaces it.

    .. math:: w_{t+1} = \sum_{k \in U_t} \frac{n_k}{\sum_{j \in U_t} n_j} w_k

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        equal_weights: weigh clients equally, not by n_k, their numbers of samples.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Source: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of
    deep networks from decentralized data", AISTATS 2017, Algorithm 1.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> fedavg(local, clients_per_round=10).slots
        10
    """
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        weighting=weighting.equal if equal_weights else weighting.by_samples,
        execution=execution,
    )
