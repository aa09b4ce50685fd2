"""Federated averaging whose model every client fine-tunes for itself."""

from __future__ import annotations

from fedjax_sim import personal, schedule, selection, weighting
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution


def fine_tuned(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    fine_tuning_epochs: float = 1.0,
    equal_weights: bool = False,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedAvg with fine-tuning: a client's own model is the server's, trained on by the client.

    .. math:: v_k = \mathrm{train}(w_t,\, k)

    The server model is FedAvg's, bit for bit. Every evaluation fine-tunes anew at all N clients,
    and nothing of it is kept.

    Args:
        local: the local update, uncompressed; fine-tuning differs in its epochs alone.
        clients_per_round: m, the cohort drawn without replacement.
        fine_tuning_epochs: epochs that a client fine-tunes for.
        equal_weights: weigh clients equally, not by n_k.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if fine_tuning_epochs is not positive; in the first evaluation, if local
            compresses.

    Source: Wang, Mathews, Kiddon, Eichner, Beaufays, Ramage, "Federated evaluation of on-device
    personalization", 2019.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> fine_tuned(local, clients_per_round=10, fine_tuning_epochs=2).slots
        10
    """
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        weighting=weighting.equal if equal_weights else weighting.by_samples,
        personal=personal.fine_tuned(local.change(epochs=fine_tuning_epochs)),
        execution=execution,
    )
