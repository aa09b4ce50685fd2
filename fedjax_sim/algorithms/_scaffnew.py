"""Scaffnew: clients that skip averages, by common coins."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.client import corrections
from fedjax_sim.client.length import geometric
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@part
def scaffnew(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    lr: float,
    momentum: float,
    coin: float = 0.2,
    execution: Execution | None = None,
) -> Algorithm:
    r"""Scaffnew (ProxSkip): after every local step, a coin that all share says whether to average.

    .. math:: \hat x_{k,t+1} = x_{k,t} - \gamma\,(\nabla F_b(x_{k,t}) - h_{k,t}), \qquad
              x_{k,t+1} = \begin{cases} \frac1N \sum_j \hat x_{j,t+1} & \text{with probability } p
              \\ \hat x_{k,t+1} & \text{otherwise} \end{cases}, \qquad
              h_{k,t+1} = h_{k,t} + \frac p\gamma\,(x_{k,t+1} - \hat x_{k,t+1})

    A round is the steps from one average to the next, T of them for all clients, with
    :math:`P(T = t) = p (1 - p)^{t-1}`; only the average moves h_k. All N clients take part and
    count equally. If p is 1, it is parallel SGD. With whole gradients, strongly convex losses of
    condition number κ and :math:`p = 1/\sqrt\kappa`, a precision takes of the order of
    :math:`\sqrt\kappa` rounds, where gradient descent takes κ.

    Args:
        local: the local update, by SGD; its epochs and optimizer_state are overridden, so that its
          momentum restarts in every round.
        clients_per_round: N: all take part.
        lr: γ, the rate of the clients' SGD; that of local's optimiser.
        momentum: of the clients' SGD; likewise. The paper's have none; see
          :func:`fedjax_sim.corrections.scaffnew`.
        coin: p, the probability of an average after a step; a round has 1/p steps on average.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Memory: two models for every client. Traffic per round: N models down, N up.

    Raises:
        ValueError: if coin or momentum is out of range; if local's optimiser is another one; if
            clients_per_round is not N.

    Source: Mishchenko, Malinovsky, Stich, Richtárik, "ProxSkip: yes! Local gradient steps provably
    lead to communication acceleration! Finally!", ICML 2022 <https://arxiv.org/abs/2202.09357>,
    Algorithm 2.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.scaffnew(
        ...     local, clients_per_round=problem.data.clients, lr=0.1, momentum=0.0
        ... )
        >>> problem.accuracy(algorithm, rounds=5) > 0.8
        True
    """
    return compose(
        local.change(
            corrections=(corrections.scaffnew(coin, lr, momentum),),
            steps=geometric(coin),
            optimizer_state="reset",
        ),
        selection=selection.everyone(),
        schedule=schedule.every_round(clients_per_round),
        weighting=weighting.equal,
        execution=execution,
    )
