"""FedMix: mixup with the means of other clients' samples."""

from __future__ import annotations

from fedjax_sim.base import LocalUpdate, Objective, part
from fedjax_sim.client import mixup
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose


@part
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
    of another client, drawn afresh in every step.

    Args:
        local: the local update.
        objective: ℓ of the model, the objective of the local update.
        clients_per_round: m, the cohort drawn without replacement.
        mix_ratio: λ of FedMix; 0 is FedAvg.
        mix_samples: M_k, the samples behind a mean that a client sends; the more they are, the less
          the mean reveals of one of them.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up; before the first, every client sends
        its ⌈n_k / M_k⌉ means, each an input and the labels behind it, to all others
        (:func:`fedjax_sim.mixup.exchange`).

    Raises:
        ValueError: if mix_ratio or mix_samples is out of range.

    Source: Yoon, Shin, Hwang, Yang, "FedMix: approximation of mixup under mean augmented federated
    learning", ICLR 2021 <https://arxiv.org/abs/2107.00233>, Algorithm 2.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedmix(
        ...     local, objective=problem.objective, clients_per_round=5, mix_samples=8
        ... )
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    return compose(
        local.change(
            objective=mixup.mixed_objective(objective, mix_ratio),
            transforms=(mixup.peer_means(mix_samples),),
            peers=True,
        ).replace(setup_traffic=mixup.exchange(mix_samples)),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        execution=execution,
    )
