"""SCAFFOLD: control variates against client drift."""

from __future__ import annotations

import optax

from fedjax_sim import drift, schedule, selection, server, weighting
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution


def scaffold(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    option: drift.Option = 2,
    server_lr: float = 1.0,
    execution: Execution | None = None,
) -> Algorithm:
    r"""SCAFFOLD: every local step is corrected by what the clients do on average.

    .. math:: w_k \leftarrow w_k - \eta\,(\nabla F_b(w_k) - c_k + c), \qquad
              w \leftarrow w + \frac{\eta_g}{m} \sum_{k \in U} (w_k - w), \qquad
              c \leftarrow c + \frac1N \sum_{k \in U} (c_k^+ - c_k)

    Clients count equally, whatever their sizes, as in the paper: c is a plain mean, so that the
    method minimises the plain mean of the clients' losses under any weights.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        option: what a client's new control variate is: 1, its whole gradient at the model that it
          received; 2, the mean of the gradients along its steps (see
          :func:`fedjax_sim.drift.scaffold`).
        server_lr: η_g, the server's learning rate.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models and m variates down, as many up: twice FedAvg's.

    Raises:
        ValueError: if the option is neither, or server_lr is not positive.

    Source: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic controlled
    averaging for federated learning", ICML 2020, Algorithm 1.

    Example:
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> scaffold(local, clients_per_round=10, option=1).slots
        10
    """
    if not server_lr > 0:
        raise ValueError(f"server_lr must be positive, got {server_lr}")
    return compose(
        local.change(drift=(drift.scaffold(option),)),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        weighting=weighting.equal,
        server=server.optimizer(optax.sgd(server_lr)),
        execution=execution,
    )
