"""Methods that balance skewed labels: groups of clients, mixed samples."""

from __future__ import annotations

from fedjax_sim.algorithms._method import method
from fedjax_sim.base import Count, LocalUpdate, Objective
from fedjax_sim.client import mixup
from fedjax_sim.plan import flight
from fedjax_sim.plan.mediators import mediators
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting

__all__ = ["astraea", "fedmix"]


@method
def astraea(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    classes: int,
    mediator_size: int = 5,
    mediator_epochs: Count = 1,
) -> Algorithm:
    r"""Astraea: trains each model sequentially on a group of clients with balanced joint labels.

    .. math:: w_{t+1} = \sum_i \frac{n_i}{\sum_j n_j} w_i, \qquad
              w_i = \mathrm{train}_{k_\gamma} \circ \dots \circ \mathrm{train}_{k_1}(w_t), \quad
              n_i = \sum_{k \in \text{mediator } i} n_k

    Each aggregation regroups a uniform cohort, greedily, by the Kullback-Leibler divergence of a
    group's labels from the uniform distribution. The other half of the method,
    :func:`fedjax_sim.data.rebalance`, changes the clients' data.

    Args:
        clients_per_round: m: clients per aggregation.
        mediator_size: γ: clients per mediator (group); must divide clients_per_round. 1 is FedAvg.
        mediator_epochs: passes of a mediator's model over its clients before each aggregation.

    Returns:
        The algorithm. In a round, each mediator's model trains at one client, so γ rounds count as
        one of FedAvg (``round_factor``). Traffic per round: m/γ models down, m/γ up (mediators are
        part of the server); before the first round, M label counts from every client.

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
    slots = clients_per_round // mediator_size
    rounds, factor = mediator_size * mediator_epochs, float(mediator_size)
    return compose(
        local,
        slots,
        selection=mediators(slots, mediator_size, classes),
        flight=flight.delayed(rounds, apart=True, round_factor=factor),
        weighting=weighting.by_samples_visited,
    )


@method
def fedmix(
    local: LocalUpdate,
    *,
    objective: Objective,
    clients_per_round: int,
    mix_ratio: float = 0.05,
    mix_samples: int = 16,
) -> Algorithm:
    r"""FedMix: FedAvg with approximate mixup of local samples and other clients' averages.

    .. math:: (1 - \lambda)\,\ell\bigl(f((1-\lambda)x), y\bigr)
              + \lambda\,\ell\bigl(f((1-\lambda)x), \bar y\bigr)
              + \lambda\,\frac{\partial \ell}{\partial x} \cdot \bar x

    is the loss of a sample (x, y), where :math:`(\bar x, \bar y)` is the mean of a block of M_k
    samples of another client, resampled in each step.

    Args:
        objective: ℓ, the objective of the local update.
        mix_ratio: λ: weight of the other clients' averages; 0 is FedAvg.
        mix_samples: M_k: samples per average; the more, the less an average reveals of each.

    Returns:
        The algorithm. Traffic per round: m models down, m up; before the first round, every client
        sends its ⌈n_k / M_k⌉ averages, each an input with its labels, to all others
        (:class:`fedjax_sim.mixup.peer_means`).

    Source: Yoon, Shin, Hwang, Yang, "FedMix: approximation of mixup under mean augmented federated
    learning", ICLR 2021 <https://arxiv.org/abs/2107.00233>, Algorithm 2.
    """
    return compose(
        local.change(
            objective=mixup.mixed_objective(objective, mix_ratio),
            transforms=(mixup.peer_means(mix_samples),),
            peers=True,
        ),
        clients_per_round,
    )
