"""FedAsync: the server mixes in models that were trained from older server models."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.client import corrections
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import broadcast, preaggregation, weighting
from fedjax_sim.server.preaggregation._staleness import Decay


@part
def fedasync(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    buffer_size: int = 1,
    alpha: float = 0.6,
    max_staleness: int = 16,
    decay: Decay = "polynomial",
    slope: float | None = None,
    grace: float = 4.0,
    mu: float = 0.005,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedAsync: the server mixes in models that clients trained from its model of d updates ago.

    .. math:: w_{t+1} = (1 - \alpha s(d))\, w_t + \alpha s(d)\, \mathrm{train}(w_{t-d}), \qquad
              d \sim U\{0, \dots, \min(d_{max}, t)\}

    .. math:: s(d) = 1, \quad (d+1)^{-a}, \quad \text{or}\quad
              1 \text{ if } d \le b \text{ else } \frac{1}{a (d-b) + 1}

    The client minimises :math:`F_k(w) + \frac{\mu}{2} \lVert w - w_{t-d} \rVert^2` (the paper
    writes ρ for μ). In the paper a round is one arrival: m = 1. With more, each arrival has its own
    staleness, and the server moves once, by the mean of the moves that each alone would cause.

    Args:
        local: the local update.
        clients_per_round: m, how many clients FedAvg would visit in a round: so many arrive for
          each round that the user budgets.
        buffer_size: how many arrivals move the server together, by their mean; 1 in the paper.
        alpha: α, how far the server moves towards the clients' models; 1 is all the way.
        max_staleness: the oldest that a model can be, in updates; the server keeps so many.
        decay: how the move shrinks with the staleness d: "constant", not at all; "polynomial", as
          (d + 1)^-a; "hinge", 1 up to b and 1 / (a (d - b) + 1) from there.
        slope: a of the decay; None: 0.5 for the polynomial, 10 for the hinge. The constant has
          none.
        grace: b of the hinge, the staleness that is forgiven.
        mu: μ of the proximal term; 0 is none.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; one of its rounds is one move of the server, so that its ``round_factor`` is
        m / buffer_size. Traffic per round: buffer_size models down, as many up.

    Raises:
        ValueError: if a setting is out of range, or buffer_size does not divide the clients of a
          round.

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
    if max_staleness < 0:
        raise ValueError(f"max_staleness must be at least 0, got {max_staleness}")
    if buffer_size < 1 or clients_per_round % buffer_size:
        raise ValueError(
            f"buffer_size must divide the {clients_per_round} clients of a round, got {buffer_size}"
        )
    arrival = schedule.every_round(buffer_size)
    return compose(
        local.change(corrections=(corrections.proximal(mu),)),
        selection=selection.uniform(),
        schedule=arrival._replace(round_factor=clients_per_round / buffer_size),
        broadcast=broadcast.stale(max_staleness),
        weighting=weighting.equal,
        preaggregation=(preaggregation.staleness(alpha, decay, slope, grace),),
        execution=execution,
    )
