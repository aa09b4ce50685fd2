"""Methods that adapt the number of local steps during the run."""

from __future__ import annotations

from fedjax_sim.algorithms._method import method
from fedjax_sim.base import LocalUpdate, Model, Objective
from fedjax_sim.client import control, skew
from fedjax_sim.client.reports import accuracy, mean_loss
from fedjax_sim.round import Algorithm, compose

__all__ = ["adaptive_steps", "loadaboost", "skewscout"]


@method
def adaptive_steps(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    lr: float,
    objective: Objective,
    resource_budget: float = 10000.0,
    step_cost: float = 1.0,
    round_cost: float = 10.0,
    phi: float = 0.025,
    most_steps: int = 100,
) -> Algorithm:
    r"""Adaptive federated learning: the server sets the number of local steps τ of each round.

    .. math:: \tau^* = \arg\min_\tau \frac{1 + \sqrt{1 + 4 T^2 \varphi\rho\eta h(\tau) / \tau}}
              {2 T \eta \varphi} + \rho\,h(\tau), \qquad
              T = \frac{(R - b - c)\,\tau}{c\,\tau + b}

    h bounds how far the clients' models drift apart; see :class:`fedjax_sim.local.adaptive_steps`.
    In the paper, all clients participate, costs are measured in every round, the scarcest of
    several resources counts, and the result is the model with the least loss. Here, one resource
    has given costs, and the result is the last model. Once the budget is spent, clients stop
    training, although models are still exchanged until the run ends.

    Args:
        local: the local update; its epochs are overridden.
        clients_per_round: m: clients per round, sampled without replacement; the paper uses all.
        resource_budget: R: budget of the resource, in any unit.
        step_cost: c: cost of a local step.
        round_cost: b: cost of an aggregation.
        phi: φ: control parameter; in the authors' code 0.025 for a linear SVM, 0.00005 for a CNN.

    Returns:
        The algorithm; with ``most_steps=1`` it is parallel SGD while the budget lasts. Memory: one
        model per client. Traffic per round: m models and 8 bytes each down; m models, as many
        gradients and 8 bytes each up.

    Source: Wang, Tuor, Salonidis, Leung, Makaya, He, Chan, "Adaptive federated learning in resource
    constrained edge computing systems", IEEE JSAC 2019 <https://arxiv.org/abs/1804.05271>,
    Algorithms 2 and 3.

    Example:
        >>> algorithm = fs.algorithms.adaptive_steps(
        ...     local, clients_per_round=10, lr=0.1, objective=problem.objective
        ... )
        >>> problem.accuracy(algorithm, rounds=15) > 0.8
        True
    """
    return compose(
        control.adaptive_steps(
            local, objective, lr, resource_budget, step_cost, round_cost, phi, most_steps
        ),
        clients_per_round,
    )


@method
def skewscout(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    fewest_steps: int = 1,
    most_steps: int = 64,
    travel_rounds: int = 5,
    loss_weight: float = 50.0,
    allowed_loss: float = 0.05,
    traffic_weight: float = 1.0,
) -> Algorithm:
    r"""SkewScout: FedAvg whose local steps τ depend on the accuracy that models lose elsewhere.

    .. math:: \min_\tau\; \lambda_{AL} \max(0, AL(\tau) - \sigma_{AL}) +
              \lambda_C \frac{C(\tau)}{CM}, \qquad \frac{C(\tau)}{CM} = \frac{1}{\tau}

    Clients' models travel to the next cohort, which measures AL, the accuracy that they lose on its
    data. Hill climbing doubles or halves τ; see :class:`fedjax_sim.local.skewscout`. As in all
    methods, a round counts as one however many steps it has: compare by steps, or by simulated
    seconds.

    Args:
        local: the local update; its epochs are overridden.
        clients_per_round: m: clients per round, sampled without replacement; the paper uses all.
        fewest_steps: initial value and lower bound of τ.
        travel_rounds: rounds that measure AL before each change of τ.
        loss_weight: λ_AL: weight of the accuracy loss.
        allowed_loss: σ_AL: accuracy loss that is tolerated.
        traffic_weight: λ_C: weight of the traffic.

    Returns:
        The algorithm; with ``most_steps=1`` it is parallel SGD. Traffic per round: 2m models (m of
        them travelling) and 4 bytes each down; m models and 16 bytes each up.

    Source: Hsieh, Phanishayee, Mutlu, Gibbons, "The non-IID data quagmire of decentralized machine
    learning", ICML 2020 <https://arxiv.org/abs/1910.00189>, section 7.

    Example:
        >>> algorithm = fs.algorithms.skewscout(
        ...     local, clients_per_round=5, model=problem.model, fewest_steps=4
        ... )
        >>> problem.accuracy(algorithm, rounds=15) > 0.8
        True
    """
    return compose(
        skew.skewscout(
            local,
            accuracy(model, local.batch_size),
            fewest=fewest_steps,
            most=most_steps,
            rounds=travel_rounds,
            loss_weight=loss_weight,
            allowed=allowed_loss,
            traffic_weight=traffic_weight,
        ),
        clients_per_round,
    )


@method
def loadaboost(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
) -> Algorithm:
    r"""LoAdaBoost: FedAvg whose clients train longer while their loss exceeds the last median.

    .. math:: E_k \in [E/2,\, 3E/2], \qquad
              F_k(w_k) \le \operatorname{med}_{j \in U_{t-1}} F_j(w_j) \text{ or } E_k = 3E/2

    See :class:`fedjax_sim.local.loadaboost`. With one epoch it is FedAvg. The paper adds samples
    that all clients share, a hundredth of the total: ``--share-beta 0.01``.

    Args:
        local: the local update, with a whole number of epochs E.

    Returns:
        The algorithm. Traffic per round: m models and medians down, m models and losses up.

    Source: Huang, Yin, Fu, Zhang, Deng, Liu, "LoAdaBoost: loss-based AdaBoost federated machine
    learning with reduced computational complexity on IID and non-IID intensive care data", PLOS ONE
    2020 <https://arxiv.org/abs/1811.12629>, Algorithm 2.
    """
    return compose(
        control.loadaboost(local, mean_loss(objective, local.batch_size)), clients_per_round
    )
