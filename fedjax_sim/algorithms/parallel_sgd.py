"""Parallel SGD: one step on every client."""

from __future__ import annotations

from fedjax_sim import schedule, selection
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution


def parallel_sgd(
    local: LocalUpdate, *, clients_per_round: int, execution: Execution | None = None
) -> Algorithm:
    r"""Parallel SGD: every client takes one step, then the models are averaged.

    .. math:: w_{t+1} = w_t - \eta \sum_{k \in U_t} \frac{n_k}{\sum_{j \in U_t} n_j}
              \nabla F_b^{(k)}(w_t)

    with one minibatch b of each client.

    Args:
        local: the local update; of its epochs only the first step is taken.
        clients_per_round: m, the cohort drawn without replacement.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up (as many bytes as gradients).

    Source: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, AISTATS 2017 (FedSGD, where the
    minibatch is all that the client has); Vo, Rakotobe, Table 3 (all N clients, E = 1).

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> parallel_sgd(local, clients_per_round=10).slots
        10
    """
    return compose(
        local.change(max_steps=1),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        execution=execution,
    )
