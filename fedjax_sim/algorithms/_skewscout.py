"""SkewScout: clients meet as often as the skew of their samples asks for."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, Model, part
from fedjax_sim.client.reports import accuracy
from fedjax_sim.client.skew import scouted
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose


@part
def skewscout(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    fewest_steps: int = 1,
    most_steps: int = 64,
    travel_rounds: int = 5,
    loss_weight: float = 50.0,
    allowed_loss: float = 0.05,
    traffic_weight: float = 1.0,
    execution: Execution | None = None,
) -> Algorithm:
    r"""SkewScout on FedAvg: local steps τ by the accuracy that models lose at other clients.

    .. math:: \min_\tau\; \lambda_{AL} \max(0, AL(\tau) - \sigma_{AL}) +
              \lambda_C \frac{C(\tau)}{CM}, \qquad \frac{C(\tau)}{CM} = \frac{1}{\tau}

    A client's model travels to the next cohort, which tells how much less accurate it is there: AL.
    Hill climbing doubles or halves τ, see :func:`fedjax_sim.local.scouted`. Rounds of many steps
    count as one round, as in all methods: compare by the steps, or by seconds of a clock.

    Args:
        local: the local update; its epochs are overridden.
        clients_per_round: m, the cohort drawn without replacement; the paper's is all.
        model: tells the accuracy of the clients' own samples.
        fewest_steps: τ at the start, and at least.
        most_steps: τ at most.
        travel_rounds: that measure AL before each change of τ.
        loss_weight: λ_AL.
        allowed_loss: σ_AL, the accuracy that models may lose.
        traffic_weight: λ_C.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; with most_steps of 1 it is parallel SGD. Traffic per round: 2 m models and 4
        bytes each down, of which m are the traveller; m models and 16 bytes each up.

    Raises:
        ValueError: if a setting is out of range.

    Source: Hsieh, Phanishayee, Mutlu, Gibbons, "The non-IID data quagmire of decentralized machine
    learning", ICML 2020 <https://arxiv.org/abs/1910.00189>, section 7.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.skewscout(
        ...     local, clients_per_round=5, model=problem.model, fewest_steps=4
        ... )
        >>> problem.accuracy(algorithm, rounds=15) > 0.8
        True
    """
    return compose(
        scouted(
            local,
            accuracy(model, local.batch_size),
            fewest=fewest_steps,
            most=most_steps,
            rounds=travel_rounds,
            loss_weight=loss_weight,
            allowed=allowed_loss,
            traffic_weight=traffic_weight,
        ),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        execution=execution,
    )
