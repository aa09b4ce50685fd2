"""CMFL: clients whose update goes another way than the server do not send it."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.client import sending
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@part
def cmfl(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    relevance: float = 0.5,
    equal_weights: bool = False,
    execution: Execution | None = None,
) -> Algorithm:
    r"""CMFL: FedAvg of the updates whose signs agree enough with the server's last step.

    .. math:: w \leftarrow w + \sum_{k \in R} p_k \Delta_k, \qquad
              R = \Bigl\{ k \in U : \frac1n \sum_{i=1}^n \bigl[ \operatorname{sgn}(\Delta_{k,i}) =
              \operatorname{sgn}(\bar u_i) \bigr] \ge v \Bigr\}

    with :math:`\bar u` the server's last step, or what a client that has not come since can know of
    it: see :func:`fedjax_sim.sending.relevant_only`. If nobody sends, w stays.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement; in the paper all clients.
        relevance: v, the share of an update's signs that must agree; 0 is FedAvg. Of updates along
            random directions one half agree.
        equal_weights: weigh clients equally, not by n_k, their numbers of samples.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Memory: a model and the signs of one for every client. Traffic per round: m
        models down, at most m up.

    Raises:
        ValueError: if relevance is not in [0, 1].

    Source: Wang, Wang, Li, "CMFL: mitigating communication overhead for federated learning", ICDCS
    2019 <https://doi.org/10.1109/ICDCS.2019.00099>.

    Note:
        The threshold is the same in all rounds.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.cmfl(local, clients_per_round=5)
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        sending=(sending.relevant_only(relevance),),
        weighting=weighting.equal if equal_weights else weighting.by_samples,
        execution=execution,
    )
