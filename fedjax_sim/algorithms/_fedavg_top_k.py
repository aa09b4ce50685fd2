"""FedAvg whose clients send the largest entries of their updates."""

from __future__ import annotations

from fedjax_sim import compression
from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose


@part
def fedavg_top_k(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    sparsity: float = 1 / 100,
    feedback: bool = True,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedAvg with uploads of the k largest entries, and error feedback.

    .. math:: w_{t+1} = w_t + \sum_{k \in U_t} \frac{n_k}{\sum_j n_j} C(\Delta_k + r_k), \qquad
              r_k \leftarrow \Delta_k + r_k - C(\Delta_k + r_k)

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        sparsity: p, the share of an update's entries that is sent.
        feedback: keep what was not sent for the client's next visit, rather than lose it.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; a sparsity of 1 is FedAvg, to rounding. Traffic per round: m models down, m
        messages up (32 bits and a position for each entry that is sent).

    Raises:
        ValueError: if sparsity is out of range.

    Source: Aji, Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017
    <https://arxiv.org/abs/1704.05021>, which sends gradients, not updates.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedavg_top_k(local, clients_per_round=5, sparsity=0.1)
        >>> problem.accuracy(algorithm, rounds=3) > 0.7
        True
    """
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        sending=(compression.compressed(compression.top_k(sparsity), feedback=feedback),),
        execution=execution,
    )
