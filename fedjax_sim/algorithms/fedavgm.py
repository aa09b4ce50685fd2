"""FedAvgM: momentum on the server."""

from __future__ import annotations

import optax

from fedjax_sim import schedule, selection, server
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution


def fedavgm(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    server_lr: float = 1.0,
    server_momentum: float = 0.9,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedAvgM: FedAvg with momentum on the server.

    .. math:: v \leftarrow \beta v + \sum_{k \in U_t} \frac{n_k}{\sum_j n_j} (w_k - w), \qquad
              w \leftarrow w + \eta v

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        server_lr: η, the server's learning rate.
        server_momentum: β, the server's momentum; 0 with a server_lr of 1 is FedAvg.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if server_lr is not positive or server_momentum not in [0, 1).

    Source: Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated
    visual classification", 2019; Ozdayi, Kantarcioglu, Iyer, "Improving accuracy of federated
    learning in non-IID settings", eq. 2 and 3.

    Note:
        Ozdayi et al. print :math:`w \leftarrow v + \eta w`, a misprint. Momentum is plain, not
        Nesterov's as in Flower's baseline.

    Example:
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> fedavgm(local, clients_per_round=10, server_momentum=0.5).slots
        10
    """
    if not server_lr > 0:
        raise ValueError(f"server_lr must be positive, got {server_lr}")
    if not 0 <= server_momentum < 1:
        raise ValueError(f"server_momentum must be in [0, 1), got {server_momentum}")
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        server=server.optimizer(optax.sgd(server_lr, momentum=server_momentum)),
        execution=execution,
    )
