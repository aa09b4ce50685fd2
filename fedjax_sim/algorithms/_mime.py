"""Mime and MimeLite: local steps that follow the server's momentum, which they do not move."""

from __future__ import annotations

from fedjax_sim.algorithms._fedavg import fedavg
from fedjax_sim.base import LocalUpdate, part, plain_sgd
from fedjax_sim.client import corrections
from fedjax_sim.engine.execution import Execution
from fedjax_sim.round import Algorithm


@part
@plain_sgd
def mime(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    beta: float = 0.9,
    equal_weights: bool = False,
    execution: Execution | None = None,
) -> Algorithm:
    r"""Mime: MimeLite whose local gradients are anchored at the mean gradient of the cohort.

    .. math:: w_k \leftarrow w_k - \eta \Bigl(\beta m + (1 - \beta) \bigl(\nabla F_b(w_k)
              - \nabla F_b(w_t) + c\bigr)\Bigr), \qquad
              c = \sum_k p_k \nabla F_k(w_t), \qquad m \leftarrow \beta m + (1 - \beta)\, c

    A round has two exchanges: the cohort's clients send their whole gradients at w_t, all of them
    are sent the mean c, and then they train.

    Args:
        local: the local update; its own optimiser should be plain SGD.
        clients_per_round: m, the cohort drawn without replacement.
        beta: β; 0 is SVRG on every client, around the cohort's gradient.
        equal_weights: weigh clients equally, as in the paper, not by n_k, their numbers of samples.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models, m momenta and m gradients down, m gradients and
        m models up.

    Raises:
        ValueError: if beta is out of range.

    Source: Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh, "Breaking the centralized barrier
    for cross-device federated learning", NeurIPS 2021 <https://arxiv.org/abs/2008.03606>,
    Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.mime(local, clients_per_round=5, beta=0.5)
        >>> problem.accuracy(algorithm, rounds=3) > 0.7
        True
    """
    return fedavg(
        local.change(corrections=(corrections.mime(beta),)),
        clients_per_round=clients_per_round,
        equal_weights=equal_weights,
        execution=execution,
    )


@part
@plain_sgd
def mimelite(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    beta: float = 0.9,
    equal_weights: bool = False,
    execution: Execution | None = None,
) -> Algorithm:
    r"""MimeLite: all local steps follow one momentum, which the server alone moves.

    .. math:: w_k \leftarrow w_k - \eta \bigl(\beta m + (1 - \beta) \nabla F_b(w_k)\bigr), \qquad
              m \leftarrow \beta m + (1 - \beta) \sum_k p_k \nabla F_k(w_t)

    with the same weights :math:`p_k` for the momentum as for the models.

    Args:
        local: the local update; its own optimiser should be plain SGD.
        clients_per_round: m, the cohort drawn without replacement.
        beta: β; 0 is FedAvg.
        equal_weights: weigh clients equally, as in the paper, not by n_k, their numbers of samples.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models and m momenta down, m models and m gradients up.

    Raises:
        ValueError: if beta is out of range.

    Source: Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh, "Breaking the centralized barrier
    for cross-device federated learning", NeurIPS 2021 <https://arxiv.org/abs/2008.03606>,
    Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.mimelite(local, clients_per_round=5, beta=0.5)
        >>> problem.accuracy(algorithm, rounds=3) > 0.7
        True
    """
    changed = local.change(corrections=(corrections.global_momentum(beta),))
    return fedavg(
        changed,
        clients_per_round=clients_per_round,
        equal_weights=equal_weights,
        execution=execution,
    )
