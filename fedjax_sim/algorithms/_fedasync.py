"""FedAsync: the server mixes in models that were trained from older server models."""

from __future__ import annotations

from fedjax_sim.base import Broadcast, Clock, LocalUpdate, Schedule, part
from fedjax_sim.client import corrections
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import broadcast, preaggregation, weighting
from fedjax_sim.server.preaggregation._staleness import Decay

DRAWN = 16
"""The most updates by which a model is drawn to be old."""


@part
def fedasync(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    buffer_size: int = 1,
    alpha: float = 0.6,
    max_staleness: int | None = None,
    decay: Decay = "polynomial",
    slope: float | None = None,
    grace: float = 4.0,
    mu: float = 0.005,
    clock: Clock | None = None,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedAsync: the server mixes in models that clients trained from its model of d updates ago.

    .. math:: w_{t+1} = (1 - \alpha s(d))\, w_t + \alpha s(d)\, \mathrm{train}(w_{t-d}), \qquad
              d \sim U\{0, \dots, \min(d_{max}, t)\}

    .. math:: s(d) = 1, \quad (d+1)^{-a}, \quad \text{or}\quad
              1 \text{ if } d \le b \text{ else } \frac{1}{a (d-b) + 1}

    The client minimises :math:`F_k(w) + \frac{\mu}{2} \lVert w - w_{t-d} \rVert^2` (the paper
    writes ρ for μ). In the paper a round is one arrival: m = 1. With more, each arrival has its own
    staleness, and the server moves once, by the mean of the moves that each alone would cause. On a
    clock nothing is drawn: m clients are at work at once, the server moves when buffer_size of them
    have come back, and d is the moves since a client was sent its model.

    Args:
        local: the local update.
        clients_per_round: m, how many clients FedAvg would visit in a round: so many arrive for
          each round that the user budgets, and so many are at work at once on a clock.
        buffer_size: how many arrivals move the server together, by their mean; 1 in the paper.
        alpha: α, how far the server moves towards the clients' models; 1 is all the way.
        max_staleness: the oldest that a drawn model can be, in updates; the server keeps so many.
          None: 16, without a clock.
        decay: how the move shrinks with the staleness d: "constant", not at all; "polynomial", as
          (d + 1)^-a; "hinge", 1 up to b and 1 / (a (d - b) + 1) from there.
        slope: a of the decay; None: 0.5 for the polynomial, 10 for the hinge. The constant has
          none.
        grace: b of the hinge, the staleness that is forgiven.
        mu: μ of the proximal term; 0 is none.
        clock: by which clients come back; None: their staleness is drawn.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; one of its rounds is one move of the server, so that its ``round_factor`` is
        m / buffer_size. Traffic per round: buffer_size models down, as many up.

    Raises:
        ValueError: if a setting is out of range, or there is a max_staleness beside a clock.

    Source: Xie, Koyejo, Gupta, "Asynchronous federated optimization", 2019
    <https://arxiv.org/abs/1903.03934>, Algorithm 1 and sections 5.2 and 6; Xue, Klabjan, Luo,
    "Aggregation delayed federated learning", 2021 <https://arxiv.org/abs/2108.07433>, section IV-E,
    which takes 18 to 31 to have as many clients in parallel as FedAvg (max_staleness).

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedasync(
        ...     local, clients_per_round=5, max_staleness=4, decay="hinge"
        ... )
        >>> problem.accuracy(algorithm, rounds=20) > 0.8
        True
    """
    when, sent = arriving(clients_per_round, buffer_size, max_staleness, clock)
    return compose(
        local.change(corrections=(corrections.proximal(mu),)),
        selection=selection.uniform(),
        schedule=when,
        broadcast=sent,
        weighting=weighting.equal,
        preaggregation=(preaggregation.staleness(alpha, decay, slope, grace),),
        clock=clock,
        execution=execution,
    )


def arriving(
    clients_per_round: int, buffer_size: int, max_staleness: int | None, clock: Clock | None
) -> tuple[Schedule, Broadcast]:
    """When models arrive, and which they are: by the clock, or drawn without one.

    Raises:
        ValueError: if buffer_size is not in 1 .. clients_per_round, or there is a max_staleness
            beside a clock.
    """
    if not 1 <= buffer_size <= clients_per_round:
        raise ValueError(
            f"buffer_size must be in 1..{clients_per_round}, the clients of a round, got "
            f"{buffer_size}"
        )
    if clock is not None and max_staleness is not None:
        raise ValueError(
            f"max_staleness must be None on a clock, by which models are as old as they are, got "
            f"{max_staleness}"
        )
    if max_staleness is not None and max_staleness < 0:
        raise ValueError(f"max_staleness must be at least 0, got {max_staleness}")
    if clock is None:
        drawn = DRAWN if max_staleness is None else max_staleness
        factor = clients_per_round / buffer_size
        return schedule.every_round(buffer_size, round_factor=factor), broadcast.stale(drawn)
    return schedule.buffered(buffer_size, at_work=clients_per_round), broadcast.latest()
