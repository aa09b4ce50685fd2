"""Methods that balance skewed labels: groups of clients, mixed samples."""

from __future__ import annotations

import numpy as np

from fedjax_sim.algorithms._method import method
from fedjax_sim.base import LocalUpdate, Objective
from fedjax_sim.client import mixup
from fedjax_sim.plan import schedule
from fedjax_sim.plan.mediators import mediators
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@method
def astraea(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    classes: int,
    mediator_size: int = 5,
    mediator_epochs: int = 1,
) -> Algorithm:
    r"""Astraea: each model visits a group of clients whose labels together are near uniform.

    .. math:: w_{t+1} = \sum_i \frac{n_i}{\sum_j n_j} w_i, \qquad
              w_i = \mathrm{train}_{k_\gamma} \circ \dots \circ \mathrm{train}_{k_1}(w_t), \quad
              n_i = \sum_{k \in \text{mediator } i} n_k

    For every aggregation the groups are formed afresh from a uniform cohort, greedily by the
    Kullback-Leibler divergence of their labels from the uniform distribution. The other half of
    the method, :func:`fedjax_sim.data.rebalance`, changes the clients' data.

    Args:
        clients_per_round: m, the clients that take part in an aggregation.
        classes: M, the number of classes.
        mediator_size: γ, the clients of a mediator; must divide clients_per_round. 1 is FedAvg.
        mediator_epochs: how often a mediator's model visits each of its clients before it is
          aggregated.

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
    together = schedule.delayed(slots, mediator_size * mediator_epochs)
    return compose(
        local,
        selection=mediators(slots, mediator_size, classes),
        # Each slot is a group of its own: no other slot may visit a mediator's clients.
        schedule=together._replace(
            group=np.arange(slots, dtype=np.int32), round_factor=float(mediator_size)
        ),
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
    r"""FedMix: FedAvg whose clients mix their samples with means that others have sent.

    .. math:: (1 - \lambda)\,\ell\bigl(f((1-\lambda)x), y\bigr)
              + \lambda\,\ell\bigl(f((1-\lambda)x), \bar y\bigr)
              + \lambda\,\frac{\partial \ell}{\partial x} \cdot \bar x

    is the loss of a sample (x, y), with the mean :math:`(\bar x, \bar y)` of a block of M_k samples
    of another client, drawn afresh in every step.

    Args:
        objective: ℓ of the model, the objective of the local update.
        mix_ratio: λ of FedMix; 0 is FedAvg.
        mix_samples: M_k, the samples behind a mean that a client sends; the more they are, the less
          the mean reveals of one of them.

    Returns:
        The algorithm. Traffic per round: m models down, m up; before the first, every client sends
        its ⌈n_k / M_k⌉ means, each an input and the labels behind it, to all others
        (:class:`fedjax_sim.mixup.peer_means`).

    Raises:
        ValueError: if mix_ratio or mix_samples is out of range.

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
