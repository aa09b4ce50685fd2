"""FedNova: normalised averaging of clients that took unequal steps."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.client import corrections
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import preaggregation


@part
def fednova(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    lr: float,
    momentum: float,
    mu: float = 0.0,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedNova: FedAvg with every client's update normalised by its accumulated steps.

    .. math:: w_{t+1} = w_t - \tau_{eff} \sum_{k \in U_t} p_k \frac{w_t - w_k}{a_k}, \qquad
              \tau_{eff} = \sum_{k \in U_t} p_k a_k, \quad p_k = \frac{n_k}{\sum_j n_j}

    with a_k after T_k local steps as in :func:`fedjax_sim.preaggregation.normalise`: T_k for plain
    SGD. It is known for momentum or for a proximal term, not for both together.

    Args:
        local: the local update, by SGD; its optimizer_state is overridden, so that its momentum
          restarts in every round, as a_k assumes.
        clients_per_round: m, the cohort drawn without replacement.
        lr: η of the clients' SGD; that of local's optimiser.
        momentum: ρ of the clients' SGD; likewise.
        mu: μ of the proximal term; 0 is none.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up, and T_k with each.

    Raises:
        ValueError: if momentum or mu is out of range, or both are positive; if local's optimiser is
          another one, or it has corrections.

    Source: Wang, Liu, Liang, Joshi, Poor, "Tackling the objective inconsistency problem in
    heterogeneous federated optimization", NeurIPS 2020 <https://arxiv.org/abs/2007.07481>, sections
    3 and 4.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.05, momentum=0.9))
        >>> algorithm = fs.algorithms.fednova(local, clients_per_round=5, lr=0.05, momentum=0.9)
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    return compose(
        local.change(
            optimizer_state="reset", corrections=(corrections.proximal(mu),) if mu else ()
        ),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        preaggregation=(preaggregation.normalise(lr, momentum, mu),),
        execution=execution,
    )
