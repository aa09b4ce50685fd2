"""MFL: momentum federated learning."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose


@part
def mfl(
    local: LocalUpdate, *, clients_per_round: int, execution: Execution | None = None
) -> Algorithm:
    r"""MFL: the clients' momenta are averaged and sent on, like their models.

    .. math:: d_k \leftarrow \rho\, d_k + \nabla F_b(w_k), \quad w_k \leftarrow w_k - \eta\, d_k,
              \qquad (w, d)_{t+1} = \sum_{k \in U_t} \frac{n_k}{\sum_{j \in U_t} n_j} (w_k, d_k)

    Args:
        local: the local update; its optimiser has momentum (or another state, which is averaged in
          the same way).
        clients_per_round: m, the cohort drawn without replacement.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; without momentum it is FedAvg, bit for bit. Traffic per round: m models and m
        momenta down, as many up: twice FedAvg's.

    Source: Liu, Chen, Chen, Zhang, "Accelerating federated learning via momentum gradient descent",
    IEEE TPDS 2020 <https://arxiv.org/abs/1910.03197>, Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.05, momentum=0.9))
        >>> algorithm = fs.algorithms.mfl(local, clients_per_round=5)
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    return compose(
        local.change(optimizer_state="average"),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        execution=execution,
    )
