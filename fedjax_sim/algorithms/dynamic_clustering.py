"""Dynamic clustering."""

from __future__ import annotations

from fedjax_sim import clustering, personal, schedule, selection, weighting
from fedjax_sim.base import Algorithm, LocalUpdate, Objective
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution


def dynamic_clustering(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    cluster_by: clustering.By = "angle",
    cluster_limit: float | None = None,
    equal_weights: bool = False,
    execution: Execution | None = None,
) -> Algorithm:
    r"""Dynamic clustering: every round the fewest groups of clients that agree, a model for each.

    .. math:: w_k^0 = \arg\min_{w \in W} F_k(w), \qquad
              W \leftarrow \Bigl\{ \sum_{k \in G} \frac{n_k}{\sum_{i \in G} n_i} w_k :
              G \in \mathrm{Cluster}_C(U_t) \Bigr\}

    See :func:`fedjax_sim.clustering.dynamic`: the number of groups is provably the smallest for
    cohorts of up to 12 clients. The server model, which pooled scores are of, is the mean over the
    whole cohort; a client's personal model is the one of W that it would choose.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement; W has room for so many models.
        objective: F_k, by which clients choose.
        cluster_by: what is within the limit for every pair of a group: the "angle" between updates,
          or the "distance" between weights.
        cluster_limit: C, the limit; of angles in degrees, where 180 is FedAvg (None: 90); of
          distances it must be given.
        equal_weights: weigh clients equally, not by n_k, their numbers of samples.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m copies of W, the groups' models, down, m models up, and
        a number with each.

    Raises:
        ValueError: if cluster_limit or cluster_by is out of range.

    Source: Vo, Rakotobe, "How to deal with non-IID data in federated learning", Algorithm 4.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> risk = empirical_risk(model)
        >>> local = local_sgd(risk, optax.sgd(0.1))
        >>> dynamic_clustering(local, clients_per_round=10, objective=risk).slots
        10
    """
    if cluster_limit is None and cluster_by == "distance":
        raise ValueError("cluster_limit must be given where cluster_by is 'distance', got None")
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        dispatch=clustering.dynamic(cluster_limit, cluster_by, clients_per_round, objective),
        weighting=weighting.equal if equal_weights else weighting.by_samples,
        probes={"models_taken": clustering.models_taken()},
        personal=personal.received(),
        execution=execution,
    )
