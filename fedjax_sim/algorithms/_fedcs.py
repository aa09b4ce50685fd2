"""FedCS: clients that meet the deadline."""

from __future__ import annotations

from fedjax_sim.base import Clock, LocalUpdate, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose


@part
def fedcs(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    clock: Clock | None,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedCS: of m random clients those train that the clock says will meet its deadline.

    .. math:: w \leftarrow \sum_{k \in U} \frac{n_k}{\sum_{j \in U} n_j} w_k, \qquad
              U = \{k \in A : s_k \le \text{deadline}\}, \quad |A| = m

    with s_k the seconds of a visit, see :func:`fedjax_sim.selection.within_deadline`.

    Args:
        local: the local update.
        clients_per_round: m, the candidates; the others are not asked.
        clock: gives the seconds; it needs a deadline.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: a model down and one up for each client that is chosen,
        and three numbers of each candidate.

    Raises:
        ValueError: if the clock has no deadline.

    Source: Nishio, Yonetani, "Client selection for federated learning with heterogeneous resources
    in mobile edge", ICC 2019 <https://arxiv.org/abs/1804.08333>, section IV.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> clock = fs.clock.simulated(fs.clock.tiers(1, 2, 10), deadline=30)
        >>> algorithm = fs.algorithms.fedcs(local, clients_per_round=5, clock=clock)
        >>> problem.accuracy(algorithm, rounds=5) > 0.8
        True
    """
    return compose(
        local,
        selection=selection.within_deadline(clients_per_round),
        schedule=schedule.every_round(clients_per_round),
        clock=clock,
        execution=execution,
    )
