"""Federated averaging whose model every client fine-tunes for itself."""

from __future__ import annotations

from fedjax_sim import personal
from fedjax_sim.base import LocalUpdate, part
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@part
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

    The server model is FedAvg's, bit for bit. Every evaluation fine-tunes again at all N clients,
    and nothing of it is kept.

    Args:
        local: the local update, which must not compress; fine-tuning differs from it in its epochs
          alone.
        clients_per_round: m, the cohort drawn without replacement.
        fine_tuning_epochs: the epochs for which a client fine-tunes.
        equal_weights: weigh clients equally, not by n_k, their numbers of samples.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if fine_tuning_epochs is not positive; in the first evaluation, if local
          compresses.

    Source: Wang, Mathews, Kiddon, Eichner, Beaufays, Ramage, "Federated evaluation of on-device
    personalization", 2019 <https://arxiv.org/abs/1910.10252>.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fine_tuned(
        ...     local, clients_per_round=5, fine_tuning_epochs=2
        ... )
        >>> problem.accuracy(algorithm, rounds=3) > 0.8  # of the shared model
        True
    """
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        weighting=weighting.equal if equal_weights else weighting.by_samples,
        personal=personal.fine_tuned(local.change(epochs=fine_tuning_epochs)),
        execution=execution,
    )
