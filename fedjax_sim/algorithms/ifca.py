"""Iterative federated clustering."""

from __future__ import annotations

from fedjax_sim import clustering, personal, schedule, selection, weighting
from fedjax_sim.base import Algorithm, LocalUpdate, Objective
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution


def ifca(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    clusters: int = 2,
    equal_weights: bool = False,
    execution: Execution | None = None,
) -> Algorithm:
    r"""IFCA: K models; a client trains the one that fits it best, each becomes its clients' mean.

    .. math:: \hat\jmath_k = \arg\min_j F_k(\theta_j), \qquad
              \theta_j \leftarrow
              \sum_{k \in U_t: \hat\jmath_k = j} \frac{n_k}{\sum_{i: \hat\jmath_i = j} n_i} w_k

    See :func:`fedjax_sim.clustering.ifca`. The server model, which pooled scores are of, is the
    mean over the whole cohort; a client's personal model is the one it would choose.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        objective: F_k, by which clients choose.
        clusters: K, the models at the server; 1 is FedAvg.
        equal_weights: weigh clients equally, not by n_k, their numbers of samples.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: K m models down, m up, and a number with each.

    Source: Ghosh, Chung, Yin, Ramchandran, "An efficient framework for clustered federated
    learning", NeurIPS 2020, Algorithm 1 (model averaging).

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> risk = empirical_risk(model)
        >>> ifca(local_sgd(risk, optax.sgd(0.1)), clients_per_round=10, objective=risk).slots
        10
    """
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        dispatch=clustering.ifca(clusters, objective),
        weighting=weighting.equal if equal_weights else weighting.by_samples,
        probes={"models_taken": clustering.models_taken()},
        personal=personal.received(),
        execution=execution,
    )
