"""FedAvgM: momentum on the server."""

from __future__ import annotations

import optax

from fedjax_sim import server
from fedjax_sim.base import LocalUpdate, concrete, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose


@part
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
        server_momentum: β, the server's momentum; 0 is none.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; without momentum and with a server_lr of 1 it is FedAvg. Traffic per round: m
        models down, m up.

    Raises:
        ValueError: if server_lr is not positive or server_momentum not in [0, 1).

    Source: Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated
    visual classification", 2019 <https://arxiv.org/abs/1909.06335>; Ozdayi, Kantarcioglu, Iyer,
    "Improving accuracy of federated learning in non-IID settings", 2020
    <https://arxiv.org/abs/2010.15582>, eq. 2 and 3.

    Note:
        Ozdayi et al. print :math:`w \leftarrow v + \eta w`, a misprint. Momentum is plain, not
        Nesterov's as in Flower's baseline.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedavgm(local, clients_per_round=5, server_momentum=0.5)
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    if concrete(server_lr) and not server_lr > 0:
        raise ValueError(f"server_lr must be positive, got {server_lr}")
    if concrete(server_momentum) and not 0 <= server_momentum < 1:
        raise ValueError(f"server_momentum must be in [0, 1), got {server_momentum}")
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        server=server.optimizer(optax.sgd(server_lr, momentum=server_momentum)),
        execution=execution,
    )
