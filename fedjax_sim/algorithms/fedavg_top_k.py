"""FedAvg whose clients send the largest entries of their updates."""

from __future__ import annotations

from fedjax_sim import compression, schedule, selection
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution


def fedavg_top_k(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    sparsity: float = 1 / 100,
    feedback: bool = True,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedAvg with uploads of the k largest entries, and error feedback.

    .. math:: w_{t+1} = w_t + \sum_{k \in U_t} \frac{n_k}{\sum_j n_j} C(\Delta_k + r_k), \qquad
              r_k \leftarrow \Delta_k + r_k - C(\Delta_k + r_k)

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        sparsity: p, the share of a change's entries that is sent; 1 is FedAvg, to rounding.
        feedback: keep what was not sent for the next visit; else it is lost.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m messages up (32 bits and a position for
        each entry that is sent).

    Raises:
        ValueError: if sparsity is out of range.

    Source: Aji, Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017, on
    updates instead of gradients.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> fedavg_top_k(local, clients_per_round=10, sparsity=0.1).slots
        10
    """
    return compose(
        compression.compressed(local, compression.top_k(sparsity), feedback=feedback),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        execution=execution,
    )
