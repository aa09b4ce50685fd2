"""Adaptive federated learning: as many local steps as a budget makes worth while."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, Objective, part
from fedjax_sim.client.control import budgeted
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose


@part
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
    execution: Execution | None = None,
) -> Algorithm:
    r"""Adaptive federated learning: the server chooses the local steps τ of each round.

    .. math:: \tau^* = \arg\min_\tau \frac{1 + \sqrt{1 + 4 T^2 \varphi\rho\eta h(\tau) / \tau}}
              {2 T \eta \varphi} + \rho\,h(\tau), \qquad
              T = \frac{(R - b - c)\,\tau}{c\,\tau + b}

    Many steps save averages, whose cost is b; few keep the clients together, by h, which grows with
    the divergence of their gradients; see :func:`fedjax_sim.local.budgeted`. In the paper all
    clients take part, the costs are measured in every round, of several resources the scarcest
    counts, and the result is the model of least loss; here one resource has costs that are given,
    and the result is the last model. Once the budget is spent clients train no more, though models
    travel until the run ends.

    Args:
        local: the local update; its epochs are overridden.
        clients_per_round: m, the cohort drawn without replacement; the paper's is all.
        lr: η, the rate of the clients' SGD; that of local's optimiser.
        objective: F, what local minimises.
        resource_budget: R, of any one resource.
        step_cost: c, of the resource for a local step.
        round_cost: b, of the resource for an average.
        phi: φ, the control parameter; 0.025 for a linear SVM in the authors' code, 0.00005 for a
            CNN.
        most_steps: τ_max.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; with most_steps of 1 it is parallel SGD while the budget lasts. Memory: a
        model for every client. Traffic per round: m models and 8 bytes each down; m models, as many
        gradients and 8 bytes each up.

    Raises:
        ValueError: if a setting is out of range, or the budget does not pay for a round of a step.

    Source: Wang, Tuor, Salonidis, Leung, Makaya, He, Chan, "Adaptive federated learning in resource
    constrained edge computing systems", IEEE JSAC 2019 <https://arxiv.org/abs/1804.05271>,
    Algorithms 2 and 3.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.adaptive_steps(
        ...     local, clients_per_round=10, lr=0.1, objective=problem.objective
        ... )
        >>> problem.accuracy(algorithm, rounds=15) > 0.8
        True
    """
    return compose(
        budgeted(local, objective, lr, resource_budget, step_cost, round_cost, phi, most_steps),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        execution=execution,
    )
