"""TiFL: tiers of clients that are equally fast."""

from __future__ import annotations

from fedjax_sim.base import Clock, LocalUpdate, Model, part
from fedjax_sim.client.reports import accuracy
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose


@part
def tifl(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    clock: Clock | None,
    tiers: int = 5,
    interval: int | None = None,
    credit: int | None = None,
    evaluated: int | None = None,
    execution: Execution | None = None,
) -> Algorithm:
    r"""TiFL: a round's clients are equally fast, and the worst tier comes most often.

    .. math:: w \leftarrow \sum_{k \in U} \frac{n_k}{\sum_{j \in U} n_j} w_k, \qquad
              U \subset \text{tier } t \sim P

    with P by the rank of the tiers' accuracies, see :func:`fedjax_sim.selection.tiers`.

    Args:
        local: the local update.
        clients_per_round: m, drawn uniformly from a tier; fewer if it has fewer.
        model: tells the accuracy of the clients' own samples.
        clock: gives the seconds.
        tiers: T, of equal size.
        interval: the rounds from one evaluation to the next; None for T.
        credit: the rounds of each tier at most; None for any number.
        evaluated: the clients that are evaluated; None for all.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up; in each that evaluates a model to
        each client that is, and a number back; before the first a model to all and back.

    Raises:
        ValueError: if there is no clock, or a number is out of range.

    Source: Chai, Ali, Zawad, Truex, Anwar, Baracaldo, Zhou, Ludwig, Yan, Cheng, "TiFL: a tier-based
    federated learning system", HPDC 2020 <https://arxiv.org/abs/2001.09249>, Algorithm 2.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> clock = fs.clock.simulated(fs.clock.tiers(1, 2, 10))
        >>> algorithm = fs.algorithms.tifl(
        ...     local, clients_per_round=5, model=problem.model, clock=clock, tiers=2
        ... )
        >>> problem.accuracy(algorithm, rounds=5) > 0.8
        True
    """
    score = accuracy(model, local.batch_size)
    return compose(
        local,
        selection=selection.tiers(
            tiers, score, interval=interval, credit=credit, evaluated=evaluated
        ),
        schedule=schedule.every_round(clients_per_round),
        clock=clock,
        execution=execution,
    )
