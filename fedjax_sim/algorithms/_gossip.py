"""Gossip: decentralised SGD, without a server."""

from __future__ import annotations

from typing import Literal

from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import redistribution, schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting

Topology = Literal["ring", "complete"]
GRAPHS = {"ring": redistribution.ring, "complete": redistribution.complete}


@part
def gossip(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    topology: Topology = "ring",
    activity: float = 1.0,
    execution: Execution | None = None,
) -> Algorithm:
    r"""Gossip: every client trains a model of its own and averages it with its neighbours'.

    .. math:: w_i \leftarrow \mathrm{train}\Bigl( \sum_j W_{ij} w_j,\, i \Bigr), \qquad
              W_{ij} = \frac{1}{1 + \max(\deg_i, \deg_j)} \text{ for neighbours}

    W is symmetric and its rows sum to 1, so that only training moves the mean of the models, which
    is the model that is evaluated. With an activity below 1 the edges are switched on at random,
    one matching at a time, as in MATCHA; see :func:`fedjax_sim.redistribution.matchings`.

    Args:
        local: the local update.
        clients_per_round: m, the nodes: a client each, drawn once; usually all clients.
        topology: the graph: "ring" gives every node two neighbours, "complete" all others.
        activity: the probability with which the edges of a matching are on in a round.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; the complete graph with all edges on is FedAvg with equal weights. A model
        between clients counts both as sent up and as sent down. Traffic per round: 2m models
        between clients on the ring, m (m - 1) on the complete graph, times activity.

    Raises:
        ValueError: if topology or activity is out of range.

    Source: Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can decentralized algorithms outperform
    centralized algorithms? A case study for decentralized parallel stochastic gradient descent",
    NeurIPS 2017 <https://arxiv.org/abs/1705.09056>, whose Algorithm 1 takes the gradient at the
    model before it is averaged; Wang, Sahu, Yang, Joshi, Kar, "MATCHA: speeding up decentralized
    SGD via matching decomposition sampling", 2019 <https://arxiv.org/abs/1905.09435>, for activity,
    and for the order used here: the averaged model is trained, for a whole local update.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.gossip(local, clients_per_round=10, activity=0.5)
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    if topology not in GRAPHS:
        raise ValueError(f"topology must be one of {', '.join(GRAPHS)}, got {topology!r}")
    return compose(
        local,
        selection=selection.uniform(sticky=True),
        schedule=schedule.serverless(clients_per_round),
        redistribution=redistribution.matchings(GRAPHS[topology](clients_per_round), activity),
        weighting=weighting.equal,
        execution=execution,
    )
