"""Methods that draw clients with stated probabilities, or balance skewed labels."""

from __future__ import annotations

from fedjax_sim.algorithms._method import client_weights, method
from fedjax_sim.base import Count, LocalUpdate, Objective
from fedjax_sim.client import mixup, sending
from fedjax_sim.client.reports import gradient_norm, with_importance
from fedjax_sim.plan import flight, selection
from fedjax_sim.plan.mediators import mediators
from fedjax_sim.plan.selection import InitialScores
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting

__all__ = ["astraea", "fedmix", "isfedavg", "ocs"]


@method
def isfedavg(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    gamma: float = 1.0,
    initial_scores: InitialScores = "gradient",
) -> Algorithm:
    r"""ISFedAvg: samples clients by their gradient norms, and weights them by 1 / p.

    .. math:: w \leftarrow w + \frac1m \sum_{k \in U} \frac{1}{N p_k} \Delta_k, \qquad
              \mathrm{P}(k \in U) = m p_k = \min(1, c\, q_k), \qquad
              q_k = \Bigl( \frac{1}{\lceil n_k/B \rceil} \sum_b \lVert \nabla F_b(w)
              \rVert^2 \Bigr)^{1/2}

    The expectation is the mean update of all N clients. A client reports q_k at the model that it
    receives; the server uses q_k of its last visit. The paper weights every local step by 1 / p_k
    instead of the update, which is the same for one step, and also samples the minibatches by their
    gradients; here, they are uniform.

    Args:
        gamma: γ: weight of a client's newest q_k in its running average.

    Returns:
        The algorithm. Traffic per round: m models down, m up, and one number with each; before the
        first round, with initial scores "gradient", one model to each of the N clients and one
        number up.

    Source: Rizk, Vlaski, Sayed, "Federated learning under importance sampling", 2020
    <https://arxiv.org/abs/2012.07383>.
    """
    score = gradient_norm(objective, local.batch_size)
    return compose(
        with_importance(local, score, received=True),
        clients_per_round,
        selection=selection.importance(score, gamma, initial=initial_scores, exact=True),
        weighting=weighting.unbiased(weighting.equal),
    )


@method
def ocs(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    senders: float | None = None,
    iterations: int | None = None,
    equal_weights: bool = False,
) -> Algorithm:
    r"""Optimal client sampling: all of a cohort train, and mostly the large updates are sent.

    .. math:: w \leftarrow w + \frac{1}{\sum_{j \in U} n_j} \sum_{k \text{ sends}}
              \frac{n_k}{p_k} \Delta_k, \qquad
              p_k = \min(1, c\, n_k \lVert \Delta_k \rVert), \quad \sum_{k \in U} p_k = m

    where each of the n clients of U sends with its own probability p_k, independently. The
    expectation is FedAvg's step; no other p_k with this sum have a smaller variance.

    Args:
        clients_per_round: n: clients that train in a round, sampled without replacement.
        senders: m: expected number of clients that send their update; None: n/10, at least 1. The
          authors take 3 of 32.
        iterations: j_max: rounds in which p is computed only by sums, for secure aggregation
          (AOCS); the authors take 4. None: exactly.

    Returns:
        The algorithm; with m of at least n it is FedAvg. Traffic per round: n models down, m up on
        average, and one number from each client, with AOCS 1 + 2 j_max.

    Source: Chen, Horváth, Richtárik, "Optimal client sampling for federated learning", TMLR 2022
    <https://arxiv.org/abs/2010.13723>, Algorithms 1 and 2; their code, 2020
    <https://github.com/SamuelHorvath/FL-optimal-client-sampling>, for the weights of a cohort.
    """
    expected = max(1.0, clients_per_round / 10) if senders is None else senders
    return compose(
        local,
        clients_per_round,
        sending=(sending.by_norm(expected, iterations),),
        weighting=client_weights(equal_weights),
    )


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

    Source: Duan, Liu, Chen, Tan, Ren, Qiao, Liang, "Astraea: self-balancing federated learning for
    improving classification accuracy of mobile deep learning applications", ICCD 2019
    <https://arxiv.org/abs/1907.01132>.
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
