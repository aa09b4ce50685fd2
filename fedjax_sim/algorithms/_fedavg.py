"""Federated averaging."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@part
def fedavg(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    equal_weights: bool = False,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedAvg: every round a uniform cohort trains the server model; the mean replaces it.

    .. math:: w_{t+1} = \sum_{k \in U_t} \frac{n_k}{\sum_{j \in U_t} n_j} w_k

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        equal_weights: weigh clients equally, not by n_k, their numbers of samples.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Source: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of
    deep networks from decentralized data", AISTATS 2017 <https://arxiv.org/abs/1602.05629>,
    Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedavg(local, clients_per_round=5)
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        weighting=weighting.equal if equal_weights else weighting.by_samples,
        execution=execution,
    )
