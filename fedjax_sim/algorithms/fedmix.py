"""FedMix: mixup with the means of other clients' samples."""

from __future__ import annotations

from fedjax_sim import fedmix as mixing
from fedjax_sim import schedule, selection
from fedjax_sim.base import Algorithm, LocalUpdate, Objective
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution


def fedmix(
    local: LocalUpdate,
    *,
    objective: Objective,
    clients_per_round: int,
    mix_ratio: float = 0.05,
    mix_samples: int = 16,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedMix: FedAvg whose clients mix their samples with means that others have sent.

    .. math:: (1 - \lambda)\,\ell\bigl(f((1-\lambda)x), y\bigr)
              + \lambda\,\ell\bigl(f((1-\lambda)x), \bar y\bigr)
              + \lambda\,\frac{\partial \ell}{\partial x} \cdot \bar x

    is the loss of a sample (x, y), with the mean :math:`(\bar x, \bar y)` of a block of M_k samples
    of another client, drawn anew in every step.

    Args:
        local: the local update.
        objective: ℓ of the model, as the local update has it.
        clients_per_round: m, the cohort drawn without replacement.
        mix_ratio: λ of FedMix; 0 is FedAvg.
        mix_samples: M_k, the samples behind a mean that a client sends; the more, the less a mean
          tells of one of them.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up; before the first, every client sends
        its ⌈n_k / M_k⌉ means, each an input and the labels behind it, to all others
        (:func:`fedjax_sim.fedmix.exchange`).

    Raises:
        ValueError: if mix_ratio or mix_samples is out of range.

    Source: Yoon, Shin, Hwang, Yang, "FedMix: approximation of mixup under mean augmented federated
    learning", ICLR 2021, Algorithm 2.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> risk = empirical_risk(models.logistic((8, 8, 1), 10))
        >>> local = local_sgd(risk, optax.sgd(0.1), batch_size=16)
        >>> fedmix(local, objective=risk, clients_per_round=10).slots
        10
    """
    return compose(
        local.change(
            objective=mixing.fedmix(objective, mix_ratio),
            transforms=(mixing.peer_means(mix_samples),),
            peers=True,
        )._replace(opening=mixing.exchange(mix_samples)),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        execution=execution,
    )
