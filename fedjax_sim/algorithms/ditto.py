"""Ditto."""

from __future__ import annotations

from fedjax_sim import personal, schedule, selection, weighting
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution


def ditto(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    lam: float = 0.1,
    equal_weights: bool = False,
    execution: Execution | None = None,
) -> Algorithm:
    r"""Ditto: FedAvg, and at every client a model of its own that stays near the shared one.

    .. math:: v_k \leftarrow v_k - \eta \bigl( \nabla F_k(v_k) + \lambda (v_k - w_t) \bigr)

    for as many minibatch steps as w_k takes; see :func:`fedjax_sim.personal.ditto`. The server
    model is FedAvg's, bit for bit; a client's personal model is v_k, as its last visit left it.

    Args:
        local: the local update, of w_k and, without its drift terms, of v_k; uncompressed.
        clients_per_round: m, the cohort drawn without replacement.
        lam: λ, the pull of the shared model; 0 is training alone.
        equal_weights: weigh clients equally, not by n_k.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up. Memory: a model for every client.

    Raises:
        ValueError: if lam is negative, or local compresses.

    Source: Li, Hu, Beirami, Smith, "Ditto: fair and robust federated learning through
    personalization", ICML 2021, Algorithm 1.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> ditto(local, clients_per_round=10, lam=0.5).slots
        10
    """
    return compose(
        personal.ditto(local, lam),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        weighting=weighting.equal if equal_weights else weighting.by_samples,
        personal=personal.kept(),
        execution=execution,
    )
