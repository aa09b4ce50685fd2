"""Decentralised methods: models are averaged among neighbours."""

from __future__ import annotations

from typing import Literal

from fedjax_sim.algorithms._method import method
from fedjax_sim.base import LocalUpdate, Objective
from fedjax_sim.client.reports import with_final_loss
from fedjax_sim.personal import as_received
from fedjax_sim.plan import flight, redistribution, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting

__all__ = ["dada", "gossip", "push_sum"]

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
    if topology not in GRAPHS:
        raise ValueError(f"topology must be one of {', '.join(GRAPHS)}, got {topology!r}")
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
    keeps one share. A client that receives from many has a weight above 1, by which its model is
    divided before it trains. The weighted mean of the models, which is evaluated, is moved by
    training alone; see :class:`fedjax_sim.redistribution.push`.

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
    r"""Dada: clients train personal models and learn the graph of whom to collaborate with.

    .. math:: \min_{w \ge 0,\, \theta} \sum_k d_k c_k L_k(\theta_k)
              + \frac{\mu_1}{2} \sum_{k<l} w_{kl} \lVert \theta_k - \theta_l \rVert^2
              + \mu_2 \Bigl( \lambda \sum_{k<l} w_{kl}^2 - \sum_k \log(d_k + \delta) \Bigr)

    Models train independently within a round; between two rounds, clients meet in pairs, which set
    the weight :math:`w_{kl}` of their edge, and every client moves towards its neighbours; see
    :class:`fedjax_sim.redistribution.learned`. The paper's models are weights of given classifiers,
    which it boosts one by one; here, they are networks of any kind trained by the local update,
    like the linear models that the paper compares with. Pooled scores evaluate the mean of the
    models: use the personal scores.

    Args:
        clients_per_round: m: nodes, one client each, sampled once; usually all clients.
        objective: L, the objective of the local update.
        mu_1: μ₁: weight of the distances between models.
        mu_2: μ₂: weight of the graph regulariser.
        penalty: λ: cost of large edge weights; a smaller λ gives a sparser graph.
        peers: κ: clients that each client meets between two rounds.
        mixing_lr: η: step towards the neighbours; 0 trains every client alone.

    Returns:
        The algorithm; :func:`fedjax_sim.simulate` returns the graph, in ``state.redistribution``. A
        local update costs one more forward pass. A model sent between clients counts as upload and
        as download, with 12 bytes of losses, degrees and weights. Traffic per round: one model for
        each of the m clients from each of its neighbours, and at most m κ / 2 from other clients
        that it meets.

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
