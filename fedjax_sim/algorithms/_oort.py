"""Oort: clients by what they teach, and how fast."""

from __future__ import annotations

from fedjax_sim.base import Clock, LocalUpdate, Objective, part
from fedjax_sim.client.reports import with_utility
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose


@part
def oort(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    clock: Clock | None,
    explore: float = 0.9,
    explore_decay: float = 0.98,
    explore_least: float = 0.2,
    penalty: float = 2.0,
    pace: float = 0.3,
    pace_step: float = 0.05,
    pace_rounds: int = 20,
    execution: Execution | None = None,
) -> Algorithm:
    r"""Oort: clients with large losses that are fast enough train, and some that never did.

    .. math:: w \leftarrow \sum_{k \in U} \frac{n_k}{\sum_{j \in U} n_j} w_k

    with U by utility and seconds, see :func:`fedjax_sim.selection.guided`.

    Args:
        local: the local update.
        clients_per_round: m.
        objective: its loss of a sample makes the utility.
        clock: gives the seconds.
        explore: ε, the share of clients that have not trained yet.
        explore_decay: δ, by which ε shrinks in every round.
        explore_least: the least ε.
        penalty: α; 0 for clients of any speed.
        pace: the share of the clients known that are not too slow, at the start.
        pace_step: Δ, by which it grows if the utility shrinks.
        pace_rounds: W, the rounds whose utility is compared.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up, and m numbers.

    Raises:
        ValueError: if there is no clock, or a number is out of range.

    Source: Lai, Zhu, Madhyastha, Chowdhury, "Oort: efficient federated learning via guided
    participant selection", OSDI 2021 <https://arxiv.org/abs/2010.06081>, Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> clock = fs.clock.simulated(fs.clock.tiers(1, 2, 10))
        >>> algorithm = fs.algorithms.oort(
        ...     local, clients_per_round=5, objective=problem.objective, clock=clock
        ... )
        >>> problem.accuracy(algorithm, rounds=5) > 0.8
        True
    """
    return compose(
        with_utility(local, objective),
        selection=selection.guided(
            explore=explore,
            decay=explore_decay,
            least=explore_least,
            penalty=penalty,
            share=pace,
            step=pace_step,
            window=pace_rounds,
        ),
        schedule=schedule.every_round(clients_per_round),
        clock=clock,
        execution=execution,
    )
