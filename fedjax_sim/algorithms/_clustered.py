"""Clustered methods: several models, one for each group of clients."""

from __future__ import annotations

from fedjax_sim import clustering, personal
from fedjax_sim.algorithms._method import client_weights, method
from fedjax_sim.base import LocalUpdate, Objective
from fedjax_sim.round import Algorithm, compose

__all__ = ["dynamic_clustering", "ifca"]


@method
def ifca(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    clusters: int = 2,
    equal_weights: bool = False,
) -> Algorithm:
    r"""IFCA: trains K cluster models; each client trains the one with the lowest loss on its data.

    .. math:: \hat\jmath_k = \arg\min_j F_k(\theta_j), \qquad
              \theta_j \leftarrow
              \sum_{k \in U_t: \hat\jmath_k = j} \frac{n_k}{\sum_{i: \hat\jmath_i = j} n_i} w_k

    See :class:`fedjax_sim.broadcast.ifca`. Pooled scores evaluate the server model, the average
    over the whole cohort; a client's personal model is the cluster model that it would choose.

    Args:
        clusters: K: cluster models at the server; 1 is FedAvg.

    Returns:
        The algorithm. Traffic per round: K m models down, m up, and one number with each.

    Source: Ghosh, Chung, Yin, Ramchandran, "An efficient framework for clustered federated
    learning", NeurIPS 2020 <https://arxiv.org/abs/2006.04088>, Algorithm 1 (model averaging).
    """
    return compose(
        local,
        clients_per_round,
        broadcast=clustering.ifca(clusters, objective),
        weighting=client_weights(equal_weights),
        diagnostics={"models_taken": clustering.models_taken()},
        personal=personal.as_received(),
    )


@method
def dynamic_clustering(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    cluster_by: clustering.By = "angle",
    cluster_limit: float | None = None,
    equal_weights: bool = True,
) -> Algorithm:
    r"""Dynamic clustering: splits each cohort into the fewest groups of similar clients.

    .. math:: w_k^0 = \arg\min_{w \in W} F_k(w), \qquad
              W \leftarrow \Bigl\{ \frac{1}{|G|} \sum_{k \in G} w_k :
              G \in \mathrm{Cluster}_C(U_t) \Bigr\}

    Each group trains its own model. See :class:`fedjax_sim.broadcast.dynamic`: for cohorts of up
    to 12 clients, the number of groups is provably minimal. W holds up to m models. Pooled scores
    evaluate the server model, the average over the whole cohort; a client's personal model is the
    one in W that it would choose. Clients are weighted equally by default, as in the paper.

    Args:
        cluster_by: limit, for every pair of clients in a group, the "angle" between their updates
          or the "distance" between their weights.
        cluster_limit: C: in degrees for "angle" (None: 90; 180 is FedAvg); required for "distance".

    Returns:
        The algorithm. Traffic per round: m copies of W (all group models) down; m models up, and
        one number with each.

    Source: Vo, Rakotobe, "How to deal with non-IID data in federated learning", 2020 <vo2020how>,
    Algorithm 4.
    """
    if cluster_limit is None and cluster_by == "distance":
        raise ValueError("cluster_limit must be given if cluster_by is 'distance', got None")
    limit = 90.0 if cluster_limit is None else cluster_limit
    return compose(
        local,
        clients_per_round,
        broadcast=clustering.dynamic(limit, cluster_by, clients_per_round, objective),
        weighting=client_weights(equal_weights),
        diagnostics={"models_taken": clustering.models_taken()},
        personal=personal.as_received(),
    )
