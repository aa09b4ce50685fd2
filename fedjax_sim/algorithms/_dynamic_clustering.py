"""Dynamic clustering."""

from __future__ import annotations

from fedjax_sim import clustering, personal
from fedjax_sim.base import LocalUpdate, Objective, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@part
def dynamic_clustering(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    cluster_by: clustering.By = "angle",
    cluster_limit: float | None = None,
    equal_weights: bool = True,
    execution: Execution | None = None,
) -> Algorithm:
    r"""Dynamic clustering: every round the fewest groups of clients that agree, a model for each.

    .. math:: w_k^0 = \arg\min_{w \in W} F_k(w), \qquad
              W \leftarrow \Bigl\{ \frac{1}{|G|} \sum_{k \in G} w_k :
              G \in \mathrm{Cluster}_C(U_t) \Bigr\}

    See :func:`fedjax_sim.clustering.dynamic`: for cohorts of up to 12 clients the number of groups
    is provably the smallest. W has room for m models. Pooled scores are those of the server model,
    which is the mean over the whole cohort; a client's personal model is the one of W that it would
    choose.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        objective: F_k, by which clients choose.
        cluster_by: what is within the limit for every pair of clients in a group: the "angle"
          between their updates, or the "distance" between their weights.
        cluster_limit: C, the limit; for "angle" in degrees, where 180 is FedAvg (None: 90); for
          "distance" it must be given.
        equal_weights: weigh clients equally, as in the paper, not by n_k, their numbers of samples.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m copies of W, the groups' models, down, m models up, and
        a number with each.

    Raises:
        ValueError: if cluster_limit or cluster_by is out of range.

    Source: Vo, Rakotobe, "How to deal with non-IID data in federated learning", 2020 <vo2020how>,
    Algorithm 4.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.dynamic_clustering(
        ...     local, clients_per_round=5, objective=problem.objective, cluster_limit=60.0
        ... )
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    if cluster_limit is None and cluster_by == "distance":
        raise ValueError("cluster_limit must be given if cluster_by is 'distance', got None")
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        broadcast=clustering.dynamic(cluster_limit, cluster_by, clients_per_round, objective),
        weighting=weighting.equal if equal_weights else weighting.by_samples,
        diagnostics={"models_taken": clustering.models_taken()},
        personal=personal.as_received(),
        execution=execution,
    )
