"""Methods that draw clients with stated probabilities, and divide their weights by them."""

from __future__ import annotations

from fedjax_sim.algorithms._method import method
from fedjax_sim.algorithms._options import client_weights
from fedjax_sim.base import LocalUpdate, Objective
from fedjax_sim.client import sending
from fedjax_sim.client.reports import gradient_norm, with_importance
from fedjax_sim.plan import selection
from fedjax_sim.plan.selection import InitialScores
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting

__all__ = ["isfedavg", "ocs"]


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
    receives; the server knows that of its last visit. The paper weights every local step by 1 / p_k
    instead of the update, which is the same for one step, and also samples the minibatches by their
    gradients; here, they are uniform.

    Args:
        gamma: γ: weight of a client's newest q_k in its running average.

    Returns:
        The algorithm. Traffic per round: m models down, m up, and one number with each; before the
        first round, with initial scores "gradient", one model to each of the N clients and one
        number up.

    Raises:
        ValueError: if gamma is out of range.

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
        iterations: j_max: rounds in which p is computed by sums alone, for secure aggregation
          (AOCS); the authors take 4. None: exactly.

    Returns:
        The algorithm; with m of at least n it is FedAvg. Traffic per round: n models down, m up on
        average, and one number from each client, with AOCS 1 + 2 j_max.

    Raises:
        ValueError: if a setting is out of range.

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
