"""Asynchronous methods: the server updates with stale models."""

from __future__ import annotations

from fedjax_sim.algorithms._method import method, server_sgd
from fedjax_sim.base import Broadcast, Clock, Flight, LocalUpdate, Natural, Positive
from fedjax_sim.client import corrections
from fedjax_sim.plan import flight
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import broadcast, preaggregation, weighting
from fedjax_sim.server.preaggregation._staleness import StalenessDecay

__all__ = ["fedasync", "fedbuff"]

MAX_STALENESS = 16
"""Default bound on the sampled staleness."""


@method
def fedasync(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    buffer_size: int = 1,
    alpha: float = 0.6,
    max_staleness: Natural | None = None,
    decay: StalenessDecay = "polynomial",
    slope: float | None = None,
    grace: float = 4.0,
    mu: float = 0.005,
    clock: Clock | None = None,
) -> Algorithm:
    r"""FedAsync: the server mixes in client models trained from a server model d updates old.

    .. math:: w_{t+1} = (1 - \alpha s(d))\, w_t + \alpha s(d)\, \mathrm{train}(w_{t-d}), \qquad
              d \sim U\{0, \dots, \min(d_{max}, t)\}

    .. math:: s(d) = 1, \quad (d+1)^{-a}, \quad \text{or}\quad
              1 \text{ if } d \le b \text{ else } \frac{1}{a (d-b) + 1}

    Clients minimise :math:`F_k(w) + \frac{\mu}{2} \lVert w - w_{t-d} \rVert^2` (the paper writes ρ
    for μ). In the paper, each arrival updates the server. If several arrive together, each has its
    own staleness, and the server moves once, by the mean of their individual moves. With a clock,
    the staleness is not sampled: m clients train concurrently, the server updates when buffer_size
    of them have returned, and d counts the server updates since a client received its model.

    Args:
        clients_per_round: m: arrivals per round of FedAvg's budget; with a clock, also the clients
          that train concurrently.
        buffer_size: arrivals whose mean makes one server update; 1 in the paper.
        clock: the simulated clock that decides who returns first; None: the staleness is sampled.

    Returns:
        The algorithm; a round is one server update, so its ``round_factor`` is m / buffer_size.
        Traffic per round: buffer_size models down, as many up.

    Raises:
        ValueError: if a setting is out of range, or both max_staleness and a clock are given.

    Source: Xie, Koyejo, Gupta, "Asynchronous federated optimization", 2019
    <https://arxiv.org/abs/1903.03934>, Algorithm 1 and sections 5.2 and 6; Xue, Klabjan, Luo,
    "Aggregation delayed federated learning", 2021 <https://arxiv.org/abs/2108.07433>, section IV-E,
    which uses 18 to 31 for as many parallel clients as in FedAvg (max_staleness).
    """
    active, arrivals, sent = _arrivals(clients_per_round, buffer_size, max_staleness, clock)
    return compose(
        local.change(corrections=(corrections.proximal(mu),)),
        active,
        flight=arrivals,
        broadcast=sent,
        weighting=weighting.equal,
        preaggregation=(preaggregation.staleness(alpha, decay, slope, grace),),
        clock=clock,
    )


def _arrivals(
    clients_per_round: int, buffer_size: int, max_staleness: int | None, clock: Clock | None
) -> tuple[int, Flight, Broadcast]:
    """Returns how many clients train at once, when models arrive, and which model they receive."""
    if not 1 <= buffer_size <= clients_per_round:
        raise ValueError(
            f"buffer_size must be in 1..{clients_per_round}, the clients of a round, got "
            f"{buffer_size}"
        )
    if clock is not None and max_staleness is not None:
        raise ValueError(
            f"max_staleness must be None with a clock, which determines the staleness, got "
            f"{max_staleness}"
        )
    if clock is None:
        oldest = MAX_STALENESS if max_staleness is None else max_staleness
        factor = clients_per_round / buffer_size
        when = flight.every_round(round_factor=factor)
        return buffer_size, when, broadcast.stale(oldest)
    return clients_per_round, flight.buffered(buffer_size), broadcast.latest()


@method
def fedbuff(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    buffer_size: int = 1,
    server_lr: Positive = 1.0,
    decay: StalenessDecay = "polynomial",
    slope: float | None = None,
    grace: float = 4.0,
    max_staleness: Natural | None = None,
    clock: Clock | None = None,
) -> Algorithm:
    r"""FedBuff: the server updates as soon as K of m concurrent clients have returned.

    .. math:: w_{t+1} = w_t + \frac{\eta}{K} \sum_{k} s(d_k)
              \left(\mathrm{train}(w_{t-d_k}) - w_{t-d_k}\right)

    A client that returns is replaced at once, so m clients are always training; d counts the server
    updates since it received its model. Without a clock, d is sampled as in FedAsync. The paper's s
    is the polynomial with a = 0.5.

    Args:
        clients_per_round: m: arrivals per round of FedAvg's budget; with a clock, also the clients
          that train concurrently.
        buffer_size: K: updates per server step, at most m; 10 in the paper.
        clock: the simulated clock that decides who returns first; None: the staleness is sampled.

    Returns:
        The algorithm; a round is one server update, so its ``round_factor`` is m / K. With K = m
        and equally fast clients it is FedAvg with equal weights. Traffic per round: K models down,
        K up.

    Raises:
        ValueError: if a setting is out of range, or both max_staleness and a clock are given.

    Source: Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022
    <https://arxiv.org/abs/2106.06639>, Algorithm 1, without its secure aggregation.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> devices = fs.clock.simulated(fs.clock.tiers(1, 2, 10))
        >>> algorithm = fs.algorithms.fedbuff(
        ...     local, clients_per_round=4, buffer_size=2, clock=devices
        ... )
        >>> problem.accuracy(algorithm, rounds=10) > 0.8
        True
    """
    active, arrivals, sent = _arrivals(clients_per_round, buffer_size, max_staleness, clock)
    return compose(
        local,
        active,
        flight=arrivals,
        broadcast=sent,
        weighting=weighting.equal,
        preaggregation=(preaggregation.discounted(decay, slope, grace),),
        server=server_sgd(server_lr),
        clock=clock,
    )
