"""FedAvg whose clients send quantised updates."""

from __future__ import annotations

from fedjax_sim import compression, schedule, selection
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution


def fedavg_qsgd(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    levels: int = 127,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedAvg with uploads rounded by chance to s levels, without bias (QSGD, FedPAQ).

    .. math:: w_{t+1} = w_t + \sum_{k \in U_t} \frac{n_k}{\sum_j n_j} Q_s(\Delta_k), \qquad
              \mathbb{E}\,Q_s(\Delta_k) = \Delta_k

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        levels: s, the levels between 0 and the norm of an update; 127 take 8 bits with the sign.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m messages up of ⌈log2(2s + 1)⌉ bits for
        each entry.

    Raises:
        ValueError: if levels is out of range.

    Source: Reisizadeh, Mokhtari, Hassani, Jadbabaie, Pedarsani, "FedPAQ", AISTATS 2020,
    Algorithm 1, with equal n_k; the quantiser is QSGD's (Alistarh et al. 2017, section 3.1).

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> fedavg_qsgd(local, clients_per_round=10).slots
        10
    """
    return compose(
        compression.compressed(local, compression.stochastic_quantisation(levels), feedback=False),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        execution=execution,
    )
