"""Astraea: mediators whose models train on balanced groups of clients in sequence."""

from __future__ import annotations

import numpy as np

from fedjax_sim import schedule, weighting
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution
from fedjax_sim.mediators import mediators


def astraea(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    classes: int,
    mediator_size: int = 5,
    mediator_epochs: int = 1,
    execution: Execution | None = None,
) -> Algorithm:
    r"""Astraea's mediators: each model visits a group of clients whose labels are near uniform.

    .. math:: w_{t+1} = \sum_i \frac{n_i}{\sum_j n_j} w_i, \qquad
              w_i = \mathrm{train}_{k_\gamma} \circ \dots \circ \mathrm{train}_{k_1}(w_t), \quad
              n_i = \sum_{k \in \text{mediator } i} n_k

    The groups are made anew from a uniform cohort for every aggregation, greedily by their
    Kullback-Leibler divergence from the uniform distribution of labels. The other half of the
    method, :func:`fedjax_sim.data.rebalance`, changes the clients' data.

    Args:
        local: the local update.
        clients_per_round: m, the clients that take part in an aggregation.
        classes: M, the number of classes.
        mediator_size: γ, the clients of a mediator; must divide clients_per_round. 1 is FedAvg.
        mediator_epochs: how often a mediator's model goes round its clients before it is
          aggregated.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; one step is a visit of each mediator's model to one client, and a round of
        FedAvg is worth γ steps (``tempo``). Traffic per round: m/γ models down, m/γ up (a mediator
        is at the server's side); before the first, all clients' M counts of labels.

    Raises:
        ValueError: if mediator_size does not divide clients_per_round, or mediator_epochs is not
          positive.

    Source: Duan, Liu, Chen, Tan, Ren, Qiao, Liang, "Astraea: self-balancing federated learning for
    improving classification accuracy of mobile deep learning applications", ICCD 2019.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> astraea(local, clients_per_round=20, classes=10, mediator_size=5).slots
        4
    """
    if mediator_size < 1 or clients_per_round % mediator_size:
        allowed = [n for n in range(1, clients_per_round + 1) if clients_per_round % n == 0]
        raise ValueError(
            f"mediator_size must divide the {clients_per_round} clients_per_round: one of "
            f"{allowed}, got {mediator_size}"
        )
    if mediator_epochs < 1:
        raise ValueError(f"mediator_epochs must be at least 1, got {mediator_epochs}")
    slots = clients_per_round // mediator_size
    together = schedule.delayed(slots, mediator_size * mediator_epochs)
    return compose(
        local,
        selection=mediators(slots, mediator_size, classes),
        # Each slot a group of its own: a mediator's clients are no others' to visit.
        schedule=together._replace(group=np.arange(slots, dtype=np.int32)),
        weighting=weighting.by_seen,
        execution=execution,
    )._replace(tempo=float(mediator_size))
