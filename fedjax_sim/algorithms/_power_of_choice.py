"""Power of choice: clients with large losses train."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, Objective, part
from fedjax_sim.client.reports import mean_loss
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@part
def power_of_choice(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    candidates: int | None = None,
    known_losses: bool = False,
    execution: Execution | None = None,
) -> Algorithm:
    r"""Power of choice: of d clients drawn by their samples, the m with the largest losses train.

    .. math:: w \leftarrow \frac{1}{m} \sum_{k \in U} w_k, \qquad
              U = \text{the } m \text{ of } A \text{ with the largest } F_k(w), \quad |A| = d

    Args:
        local: the local update.
        clients_per_round: m.
        objective: F.
        candidates: d; None for 2m; all clients if there are fewer.
        known_losses: choose by the losses of the clients' last visits, and ask nobody (π_rpow-d).
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: d models down, m up, and d losses; with known losses m
        models down, m up, and m losses.

    Raises:
        ValueError: if candidates is below m.

    Source: Cho, Wang, Joshi, "Towards understanding biased client selection in federated
    learning", AISTATS 2022 <https://arxiv.org/abs/2010.01243>, section 4.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.power_of_choice(
        ...     local, clients_per_round=5, objective=problem.objective
        ... )
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    among = 2 * clients_per_round if candidates is None else candidates
    if among < clients_per_round:
        raise ValueError(
            f"candidates must be at least the {clients_per_round} clients of a round, got {among}"
        )
    score = None if known_losses else mean_loss(objective, local.batch_size)
    return compose(
        local,
        selection=selection.power_of_choice(among, score),
        schedule=schedule.every_round(clients_per_round),
        weighting=weighting.equal,
        execution=execution,
    )
