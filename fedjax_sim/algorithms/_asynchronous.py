"""Methods without synchronous rounds, and methods without a server."""

from __future__ import annotations

from typing import Literal

from fedjax_sim.algorithms._method import method, server_sgd
from fedjax_sim.base import Broadcast, Clock, Flight, LocalUpdate, Natural, Objective, Positive
from fedjax_sim.client import corrections
from fedjax_sim.client.reports import with_final_loss
from fedjax_sim.personal import as_received
from fedjax_sim.plan import flight, redistribution, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import broadcast, preaggregation, weighting
from fedjax_sim.server.preaggregation._staleness import StalenessDecay

__all__ = ["dada", "fedasync", "fedbuff", "gossip", "push_sum"]


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

    Source: Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022
    <https://arxiv.org/abs/2106.06639>, Algorithm 1, without its secure aggregation.
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


Topology = Literal["ring", "complete"]


GRAPHS = {"ring": redistribution.ring, "complete": redistribution.complete}


@method
def gossip(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    topology: Topology = "ring",
    activity: float = 1.0,
) -> Algorithm:
    r"""Gossip: clients train their own models and average them with their neighbours' models.

    .. math:: w_i \leftarrow \mathrm{train}\Bigl( \sum_j W_{ij} w_j,\, i \Bigr), \qquad
              W_{ij} = \frac{1}{1 + \max(\deg_i, \deg_j)} \text{ for neighbours}

    W is symmetric and its rows sum to 1, so only training moves the mean of the models, which is
    evaluated. With activity below 1, edges are switched on at random, one matching at a time, as in
    MATCHA; see :class:`fedjax_sim.redistribution.matchings`.

    Args:
        clients_per_round: m: nodes, one client each, sampled once; usually all clients.
        topology: communication graph: "ring" gives each node two neighbours, "complete" all others.
        activity: probability that the edges of a matching are on in a round.

    Returns:
        The algorithm; the complete graph with all edges on is FedAvg with equal weights. A model
        sent between clients counts as upload and as download. Traffic per round: 2m models between
        clients on the ring, m (m - 1) on the complete graph, times activity.

    Source: Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can decentralized algorithms outperform
    centralized algorithms? A case study for decentralized parallel stochastic gradient descent",
    NeurIPS 2017 <https://arxiv.org/abs/1705.09056>, whose Algorithm 1 takes the gradient at the
    model before it is averaged; Wang, Sahu, Yang, Joshi, Kar, "MATCHA: speeding up decentralized
    SGD via matching decomposition sampling", 2019 <https://arxiv.org/abs/1905.09435>, for activity,
    and for the order used here: the averaged model is trained, for a whole local update.
    """
    return compose(
        local,
        clients_per_round,
        selection=selection.uniform(sticky=True),
        flight=flight.serverless(
            redistribution.matchings(GRAPHS[topology](clients_per_round), activity)
        ),
        weighting=weighting.equal,
    )


@method
def push_sum(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    links: int = 2,
    graph_seed: int = 0,
) -> Algorithm:
    r"""Push-sum: gossip on a directed graph, where links need not be reciprocal.

    .. math:: x_i \leftarrow \sum_j W_{ij} x_j, \qquad \omega_i \leftarrow \sum_j W_{ij} \omega_j,
              \qquad z_i = x_i / \omega_i, \qquad
              x_i \leftarrow x_i + \mathrm{train}(z_i, i) - z_i

    A client sends equal shares of its model and of its weight to the clients that it trusts, and
    keeps one share. The weighted mean of the models is evaluated; see
    :class:`fedjax_sim.redistribution.push`.

    The graph is drawn once: every client sends to the next one, which makes the graph strongly
    connected, and to others at random. He et al. take one gradient of one new sample between two
    exchanges.

    Args:
        clients_per_round: m: nodes, one client each, sampled once; usually all clients.
        links: clients that each client sends to.
        graph_seed: seed of the graph, which is the same for all runs.

    Returns:
        The algorithm; with 1 or m - 1 links, all weights are 1. A model sent between clients counts
        as upload and as download, with 4 bytes for its weight. Traffic per round: m times links
        models between clients.

    Source: He, Tan, Tang, Qiu, Liu, "Central server free federated learning over single-sided trust
    social networks", 2019 <https://arxiv.org/abs/1910.04956>, Algorithm 1, whose models are
    exchanged after the step; here before it, as in gossip.
    """
    graph = redistribution.one_sided(clients_per_round, links, graph_seed)
    return compose(
        local,
        clients_per_round,
        selection=selection.uniform(sticky=True),
        flight=flight.serverless(redistribution.push(redistribution.outgoing(graph))),
        weighting=weighting.equal,
    )


@method
def dada(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    mu_1: float = 1.0,
    mu_2: float = 0.5,
    penalty: float = 1.0,
    peers: int = 5,
    mixing_lr: float = 0.5,
) -> Algorithm:
    r"""Dada: clients train personal models and learn a graph of collaborators.

    .. math:: \min_{w \ge 0,\, \theta} \sum_k d_k c_k L_k(\theta_k)
              + \frac{\mu_1}{2} \sum_{k<l} w_{kl} \lVert \theta_k - \theta_l \rVert^2
              + \mu_2 \Bigl( \lambda \sum_{k<l} w_{kl}^2 - \sum_k \log(d_k + \delta) \Bigr)

    Models train independently within a round; between two rounds, clients are paired, each pair
    sets the weight :math:`w_{kl}` of its edge, and every client moves towards its neighbours; see
    :class:`fedjax_sim.redistribution.learned`. The paper's models are weights of given classifiers;
    here, they are networks of any kind. Pooled scores evaluate the mean of the models: use the
    personal scores.

    Args:
        clients_per_round: m: nodes, one client each, sampled once; usually all clients.
        objective: L, the objective of the local update.
        mu_1: μ₁: weight of the distances between models.
        mu_2: μ₂: weight of the graph regulariser.
        penalty: λ: cost of large edge weights; a smaller λ gives a sparser graph.
        peers: κ: clients with which each client is paired between two rounds.
        mixing_lr: η: step towards the neighbours; 0 trains every client alone.

    Returns:
        The algorithm; :func:`fedjax_sim.simulate` returns the graph, in ``state.redistribution``. A
        local update costs one more forward pass. A model sent between clients counts as upload and
        as download, with 12 bytes of losses, degrees and weights. Traffic per round: one model for
        each of the m clients from each of its neighbours, and at most m κ / 2 from other clients of
        its pairs.

    Source: Zantedeschi, Bellet, Tommasi, "Fully decentralized joint learning of personalized models
    and collaboration graphs", AISTATS 2020 <https://arxiv.org/abs/1901.08460>; its authors' code
    2020 <https://github.com/vzantedeschi/Dada>, for the linear models and for the defaults of μ₁,
    μ₂ and κ.
    """
    return compose(
        with_final_loss(local, objective),
        clients_per_round,
        selection=selection.uniform(sticky=True),
        flight=flight.serverless(
            redistribution.learned(mu_1, mu_2, penalty, peers=peers, lr=mixing_lr)
        ),
        weighting=weighting.equal,
        personal=as_received(),
    )
