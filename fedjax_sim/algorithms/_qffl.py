"""q-FFL: fair federated learning."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, Objective, part
from fedjax_sim.client.reports import with_initial_loss
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import preaggregation, weighting


@part
def qffl(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    lr: float,
    momentum: float = 0.0,
    q: float = 1.0,
    execution: Execution | None = None,
) -> Algorithm:
    r"""q-FFL by q-FedAvg: clients count by a power of their loss.

    .. math:: \min_w \sum_k \frac{1}{q+1} F_k^{q+1}(w), \qquad
              w \leftarrow w - \frac{\sum_k F_k^q \Delta_k}
              {\sum_k \bigl( q F_k^{q-1} \lVert \Delta_k \rVert^2 + \frac{1}{\eta} F_k^q \bigr)},
              \qquad \Delta_k = \frac{w - w_k}{\eta}

    With momentum ρ the η of both is :math:`\eta / (1 - \rho)`, which a step of the local optimiser
    amounts to.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        objective: F, the objective of the local update.
        lr: η of the clients' SGD; that of local's optimiser.
        momentum: ρ of the clients' SGD; likewise.
        q: the power; the larger it is, the fairer. 0 is FedAvg with equal weights.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. A visit costs one forward pass more. Traffic per round: m models down, m up,
        and a number with each.

    Raises:
        ValueError: if a setting is out of range, or local's optimiser is another one.

    Source: Li, Sanjabi, Beirami, Smith, "Fair resource allocation in federated learning", ICLR
    2020 <https://arxiv.org/abs/1905.10497>, Algorithm 2.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.qffl(
        ...     local, clients_per_round=5, objective=problem.objective, lr=0.1, q=0.2
        ... )
        >>> problem.accuracy(algorithm, rounds=5) > 0.8
        True
    """
    return compose(
        with_initial_loss(local, objective),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        weighting=weighting.equal,
        preaggregation=(preaggregation.q_fair(q, lr, momentum),),
        execution=execution,
    )
