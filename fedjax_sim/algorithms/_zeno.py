"""Zeno: the server drops updates that do not lower the loss of its own samples."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, Objective, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import preaggregation, weighting


@part
def zeno(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    dropped: float = 0.5,
    rho: float = 1e-3,
    zeno_batch_size: int = 128,
    equal_weights: bool = True,
    execution: Execution | None = None,
) -> Algorithm:
    r"""Zeno: the mean of the updates that lower the loss of the server's own samples most.

    .. math:: w \leftarrow w + \frac{1}{|R|} \sum_{k \in R} \Delta_k, \qquad
              R = \text{the largest } m - b \text{ of }
              s_k = F_r(w) - F_r(w + \Delta_k) - \rho \lVert \Delta_k \rVert^2

    with F_r the loss of r samples of the server's, drawn anew in every round; see
    :func:`fedjax_sim.preaggregation.suspicion`.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        objective: what it minimises, and F_r is the value of.
        dropped: b/m, the share of the cohort that is dropped; 0 is FedAvg.
        rho: ρ, against long steps.
        zeno_batch_size: r, samples of the server's in a round; all, if there are no more.
        equal_weights: weigh clients equally, as in the paper, not by n_k, which clients claim
          themselves.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm, for data with ``root`` samples. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range.

    Source: Xie, Koyejo, Gupta, "Zeno: distributed stochastic gradient descent with suspicion-based
    fault-tolerance", ICML 2019 <https://arxiv.org/abs/1805.10032>, Algorithm 1.

    Note:
        The authors' workers send gradients of one minibatch, ``max_steps=1`` of the local update,
        and their server has 4 samples a round.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.zeno(
        ...     local, clients_per_round=10, objective=problem.objective
        ... )
        >>> attack = fs.attacks.sign_flip(fs.attacks.byzantine(10, 0.4))
        >>> problem.accuracy(algorithm.replace(sending=(attack,)), rounds=3) > 0.8
        True
    """
    screen = preaggregation.suspicion(objective, dropped, rho, batch_size=zeno_batch_size)
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        weighting=weighting.equal if equal_weights else weighting.by_samples,
        preaggregation=(screen,),
        execution=execution,
    )
