"""Gossip: decentralised SGD, without a server."""

from __future__ import annotations

from typing import Literal

from fedjax_sim import redistribution, schedule, selection, weighting
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution

Topology = Literal["ring", "complete"]
GRAPHS = {"ring": redistribution.ring, "complete": redistribution.complete}


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

    W is symmetric with rows of sum 1, so that the mean of the models is moved by training alone; it
    is the model that is evaluated. With activity below 1 the edges are switched on at random, one
    matching at a time, as in MATCHA; see :func:`fedjax_sim.redistribution.matchings`.

    Args:
        local: the local update.
        clients_per_round: m, the nodes: a client each, drawn once; all clients, as a rule.
        topology: who is whose neighbour.
        activity: the probability with which the edges of a matching are on in a round.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; the complete graph with all edges on is FedAvg with equal weights. A model
        between clients counts as sent up and as sent down. Traffic per round: 2m models between
        clients on the ring, m (m - 1) on the complete graph, times activity.

    Raises:
        ValueError: if topology or activity is out of range.

    Source: Lian, Zhang, Zhang, Hsieh, Zhang, Liu, "Can decentralized algorithms outperform
    centralized algorithms?", NeurIPS 2017; their Algorithm 1 takes the gradient at the model before
    it is averaged. Here the averaged model is trained, for a whole local update: the order of Wang,
    Sahu, Yang, Joshi, Kar, "MATCHA: speeding up decentralized SGD via matching decomposition
    sampling", 2019, which also has activity.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> gossip(local, clients_per_round=10).slots
        10
    """
    if topology not in GRAPHS:
        raise ValueError(f"topology must be one of {', '.join(GRAPHS)}, got {topology!r}")
    return compose(
        local,
        selection=selection.uniform(held=True),
        schedule=schedule.never(clients_per_round),
        redistribution=redistribution.matchings(GRAPHS[topology](clients_per_round), activity),
        weighting=weighting.equal,
        execution=execution,
    )
