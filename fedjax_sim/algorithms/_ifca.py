"""Iterative federated clustering."""

from __future__ import annotations

from fedjax_sim import clustering, personal
from fedjax_sim.base import LocalUpdate, Objective, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@part
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

    See :func:`fedjax_sim.clustering.ifca`. Pooled scores are those of the server model, which is
    the mean over the whole cohort; a client's personal model is the one that it would choose.

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
    learning", NeurIPS 2020 <https://arxiv.org/abs/2006.04088>, Algorithm 1 (model averaging).

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.ifca(
        ...     local, clients_per_round=5, objective=problem.objective, clusters=2
        ... )
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        broadcast=clustering.ifca(clusters, objective),
        weighting=weighting.equal if equal_weights else weighting.by_samples,
        diagnostics={"models_taken": clustering.models_taken()},
        personal=personal.as_received(),
        execution=execution,
    )
