"""Clients that share means of features, and no model."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, Model, Objective, part
from fedjax_sim.client import terms
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import exchange, schedule, selection
from fedjax_sim.round import Algorithm, compose


@part
def fedproto(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    objective: Objective,
    classes: int,
    lam: float = 1.0,
    equal_clients: bool = False,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedProto: clients share the mean features of each class, and keep their models.

    .. math:: F_b(w_k) + \frac{\lambda}{|b|} \sum_{i \in b} \frac1D \lVert z_i - \bar C_{y_i}
              \rVert^2, \qquad
              \bar C_j = \frac{\sum_{k \in U} n_{k,j} C_{k,j}}{\sum_{k \in U} n_{k,j}}

    The features z are the inputs of the model's last dense layer, and C_{k,j} their mean over the
    client's samples of class j; see :func:`fedjax_sim.terms.prototypes`. A client predicts by its
    own model. (The paper's clients take the class of the nearest prototype; the authors' code
    reports both.) What is evaluated for all is the initial model: look at the personal scores.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement; the authors take all.
        model: the model that it trains; the same for all clients.
        objective: what it minimises, an ``empirical_risk``.
        classes: M.
        lam: λ, the pull towards the prototypes; the paper takes 1, and 0.1 on CIFAR-10.
        equal_clients: weigh clients equally in a prototype, as in the authors' code, not by their
            samples of its class.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Memory: a model for every client. Traffic per round: 4 M (D + 1) bytes down
        to each of m clients, as many up.

    Raises:
        ValueError: if the model has no features or no head, the objective is no ``empirical_risk``,
            lam is negative, or local shares anything as large as the model.

    Source: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, "FedProto: federated prototype learning across
    heterogeneous clients", AAAI 2022 <https://arxiv.org/abs/2105.00243>, Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedproto(
        ...     local, clients_per_round=5, model=problem.model, objective=problem.objective,
        ...     classes=problem.classes,
        ... )
        >>> algorithm.parts.exchange
        nothing()
    """
    changed = local.change(
        objective=terms.remade(objective, term=terms.near_prototypes(lam)),
        shared=terms.prototypes(model, classes, equal_clients=equal_clients),
    )
    return compose(
        changed,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        exchange=exchange.nothing(),
        execution=execution,
    )
