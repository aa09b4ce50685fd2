"""FedBuff: the server moves by the updates of the clients that come back first."""

from __future__ import annotations

import optax

from fedjax_sim import server
from fedjax_sim.algorithms._fedasync import arriving
from fedjax_sim.base import Clock, LocalUpdate, concrete, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import preaggregation, weighting
from fedjax_sim.server.preaggregation._staleness import Decay


@part
def fedbuff(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    buffer_size: int = 1,
    server_lr: float = 1.0,
    decay: Decay = "polynomial",
    slope: float | None = None,
    grace: float = 4.0,
    max_staleness: int | None = None,
    clock: Clock | None = None,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedBuff: the server waits for the first K of m clients, and adds their updates.

    .. math:: w_{t+1} = w_t + \frac{\eta}{K} \sum_{k} s(d_k)
              \left(\mathrm{train}(w_{t-d_k}) - w_{t-d_k}\right)

    A client that comes back is replaced at once, so that m are always at work; d is the server's
    moves since it was sent its model. Without a clock d is drawn, as FedAsync's is.

    Args:
        local: the local update.
        clients_per_round: m, the concurrency: clients at work at once on a clock. So many arrive
          for each round that the user budgets.
        buffer_size: K, the updates that move the server together, at most m; 10 in the paper.
        server_lr: η.
        decay: s, how an update shrinks with its staleness: "constant", not at all; "polynomial", as
          (d + 1)^-a; "hinge", 1 up to b and 1 / (a (d - b) + 1) from there.
        slope: a of the decay; None: 0.5 for the polynomial, the paper's; 10 for the hinge. The
          constant has none.
        grace: b of the hinge, the staleness that is forgiven.
        max_staleness: the oldest that a drawn model can be, in updates; the server keeps so many.
          None: 16, without a clock.
        clock: by which clients come back; None: their staleness is drawn.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; one of its rounds is one move of the server, so that its ``round_factor`` is
        m / K. With K = m and clients that are equally fast it is FedAvg with equal weights. Traffic
        per round: K models down, K up.

    Raises:
        ValueError: if a setting is out of range, or there is a max_staleness beside a clock.

    Source: Nguyen et al., "Federated learning with buffered asynchronous aggregation", AISTATS 2022
    <https://arxiv.org/abs/2106.06639>, Algorithm 1; its secure aggregation is not simulated.

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
    if concrete(server_lr) and not server_lr > 0:
        raise ValueError(f"server_lr must be positive, got {server_lr}")
    when, sent = arriving(clients_per_round, buffer_size, max_staleness, clock)
    return compose(
        local,
        selection=selection.uniform(),
        schedule=when,
        broadcast=sent,
        weighting=weighting.equal,
        preaggregation=(preaggregation.discounted(decay, slope, grace),),
        server=server.optimizer(optax.sgd(server_lr)),
        clock=clock,
        execution=execution,
    )
