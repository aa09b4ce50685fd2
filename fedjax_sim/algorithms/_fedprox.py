"""FedProx: a proximal term holds each local model near the one that the client received."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.client import corrections
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose


@part
def fedprox(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    mu: float | None = None,
    adaptive: bool = False,
    inexactness: float | None = None,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedProx: FedAvg on local objectives with a proximal term.

    .. math:: h_k(w) = F_k(w) + \frac{\mu}{2} \lVert w - w_t \rVert^2

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        mu: μ of the proximal term; if adaptive, that of the first round. None: 0.01, or 0 if
          adaptive.
        adaptive: let μ rise by 0.1 when the training loss rises, and fall by 0.1 after the loss has
          fallen 5 times in a row, see :func:`fedjax_sim.corrections.adaptive_proximal`.
        inexactness: γ; a client stops after the epoch that brings the norm of the gradient of h_k
          down to γ times what it was at the start. None: as the local update has it.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; with μ = 0 it is FedAvg, bit for bit. Traffic per round: m models down, m up;
        if adaptive, 12 bytes more down and 8 up for each.

    Raises:
        ValueError: if mu or inexactness is out of range.

    Source: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous
    networks", MLSys 2020 <https://arxiv.org/abs/1812.06127>, Algorithm 2 and section 5.3; Vo,
    Rakotobe, "How to deal with non-IID data in federated learning", 2020 <vo2020how>, Table 2
    (inexactness).

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedprox(local, clients_per_round=5, mu=0.1)
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    fixed = 0.01 if mu is None else mu
    term = corrections.adaptive_proximal(mu or 0.0) if adaptive else corrections.proximal(fixed)
    stop = {} if inexactness is None else {"inexactness": inexactness}
    return compose(
        local.change(corrections=(term,), **stop),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        execution=execution,
    )
