"""Ditto."""

from __future__ import annotations

from fedjax_sim import personal
from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@part
def ditto(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    lam: float = 0.1,
    equal_weights: bool = False,
    execution: Execution | None = None,
) -> Algorithm:
    r"""Ditto: FedAvg, and at every client a personal model that stays near the shared one.

    .. math:: v_k \leftarrow v_k - \eta \bigl( \nabla F_k(v_k) + \lambda (v_k - w_t) \bigr)

    for as many minibatch steps as w_k takes; see :func:`fedjax_sim.personal.ditto`. The server
    model is FedAvg's, bit for bit. A client's personal model is v_k as its last visit left it.

    Args:
        local: the local update, of w_k and, without its corrections, of v_k; it must not compress.
        clients_per_round: m, the cohort drawn without replacement.
        lam: λ, the pull towards the shared model; 0 trains each v_k alone.
        equal_weights: weigh clients equally, not by n_k, their numbers of samples.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Memory: a model for every client. Traffic per round: m models down, m up.

    Raises:
        ValueError: if lam is negative, or local compresses.

    Source: Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through
    personalization", ICML 2021 <https://arxiv.org/abs/2012.04221>, Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.ditto(local, clients_per_round=5, lam=0.5)
        >>> problem.accuracy(algorithm, rounds=3) > 0.8  # of the shared model
        True
    """
    return compose(
        personal.ditto(local, lam),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        weighting=weighting.equal if equal_weights else weighting.by_samples,
        personal=personal.stored(),
        execution=execution,
    )
