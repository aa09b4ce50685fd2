"""Parallel SGD: one step on every client."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose


@part
def parallel_sgd(
    local: LocalUpdate, *, clients_per_round: int, execution: Execution | None = None
) -> Algorithm:
    r"""Parallel SGD: every client takes one step, then the models are averaged.

    .. math:: w_{t+1} = w_t - \eta \sum_{k \in U_t} \frac{n_k}{\sum_{j \in U_t} n_j}
              \nabla F_b^{(k)}(w_t)

    with one minibatch b of each client.

    Args:
        local: the local update, of which only the first step is taken.
        clients_per_round: m, the cohort drawn without replacement.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up (as many bytes as gradients).

    Source: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of
    deep networks from decentralized data", AISTATS 2017 <https://arxiv.org/abs/1602.05629>
    (FedSGD, whose minibatch is all that the client has); Vo, Rakotobe, "How to deal with non-IID
    data in federated learning", 2020 <vo2020how>, Table 3 (all N clients, E = 1).

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.5))
        >>> algorithm = fs.algorithms.parallel_sgd(local, clients_per_round=10)
        >>> problem.accuracy(algorithm, rounds=10) > 0.7
        True
    """
    return compose(
        local.change(max_steps=1),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        execution=execution,
    )
