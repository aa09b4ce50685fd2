"""Astraea: mediators, whose models visit balanced groups of clients one after another."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule
from fedjax_sim.plan.mediators import mediators
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@part
def astraea(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    classes: int,
    mediator_size: int = 5,
    mediator_epochs: int = 1,
    execution: Execution | None = None,
) -> Algorithm:
    r"""Astraea: each model visits a group of clients whose labels together are near uniform.

    .. math:: w_{t+1} = \sum_i \frac{n_i}{\sum_j n_j} w_i, \qquad
              w_i = \mathrm{train}_{k_\gamma} \circ \dots \circ \mathrm{train}_{k_1}(w_t), \quad
              n_i = \sum_{k \in \text{mediator } i} n_k

    For every aggregation the groups are formed afresh from a uniform cohort, greedily by the
    Kullback-Leibler divergence of their labels from the uniform distribution. The other half of
    the method, :func:`fedjax_sim.data.rebalance`, changes the clients' data.

    Args:
        local: the local update.
        clients_per_round: m, the clients that take part in an aggregation.
        classes: M, the number of classes.
        mediator_size: γ, the clients of a mediator; must divide clients_per_round. 1 is FedAvg.
        mediator_epochs: how often a mediator's model visits each of its clients before it is
          aggregated.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. In a round each mediator's model visits one client, so that γ rounds are
        worth one of FedAvg's (``round_factor``). Traffic per round: m/γ models down, m/γ up (a
        mediator is on the server's side); before the first, all clients' M counts of labels.

    Raises:
        ValueError: if mediator_size does not divide clients_per_round, or mediator_epochs is not
          positive.

    Source: Duan, Liu, Chen, Tan, Ren, Qiao, Liang, "Astraea: self-balancing federated learning for
    improving classification accuracy of mobile deep learning applications", ICCD 2019
    <https://arxiv.org/abs/1907.01132>.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.astraea(
        ...     local, clients_per_round=10, classes=problem.classes, mediator_size=5
        ... )
        >>> algorithm.slots, algorithm.round_factor
        (2, 5.0)
        >>> problem.accuracy(algorithm, rounds=5) > 0.8  # one aggregation
        True
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
    rounds, factor = mediator_size * mediator_epochs, float(mediator_size)
    return compose(
        local,
        selection=mediators(slots, mediator_size, classes),
        schedule=schedule.delayed(slots, rounds, apart=True, round_factor=factor),
        weighting=weighting.by_samples_visited,
        execution=execution,
    )
