"""Push-sum: gossip over a graph whose edges have directions."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import redistribution, schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@part
def push_sum(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    links: int = 2,
    graph_seed: int = 0,
    execution: Execution | None = None,
) -> Algorithm:
    r"""Push-sum: gossip in which a client may send to one that does not send back.

    .. math:: x_i \leftarrow \sum_j W_{ij} x_j, \qquad \omega_i \leftarrow \sum_j W_{ij} \omega_j,
              \qquad z_i = x_i / \omega_i, \qquad
              x_i \leftarrow x_i + \mathrm{train}(z_i, i) - z_i

    A client sends equal shares of its model and of its weight to those that it trusts, and keeps
    one. Who receives from many has a weight above 1, by which its model is divided before it
    trains. The mean of the models by their weights, which is the model that is evaluated, is moved
    by training alone; see :func:`fedjax_sim.redistribution.push`.

    The graph is drawn once: every client sends to the next one, so that all hear of all, and to
    others at random. He et al. take one gradient of one new sample between two exchanges.

    Args:
        local: the local update.
        clients_per_round: m, the nodes: a client each, drawn once; usually all clients.
        links: the clients to which each sends.
        graph_seed: of the graph, the same for all runs.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; with one link, or m - 1, all weights are 1. A model between clients counts
        both as sent up and as sent down, with 4 bytes of its weight. Traffic per round: m times
        links models between clients.

    Raises:
        ValueError: if links is not in 1 .. m - 1.

    Source: He, Tan, Tang, Qiu, Liu, "Central server free federated learning over single-sided trust
    social networks", 2019 <https://arxiv.org/abs/1910.04956>, Algorithm 1, whose models are
    exchanged after the step; here before it, as in gossip.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.push_sum(local, clients_per_round=10, links=3)
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    graph = redistribution.one_sided(clients_per_round, links, graph_seed)
    return compose(
        local,
        selection=selection.uniform(sticky=True),
        schedule=schedule.serverless(clients_per_round),
        redistribution=redistribution.push(redistribution.outgoing(graph)),
        weighting=weighting.equal,
        execution=execution,
    )
