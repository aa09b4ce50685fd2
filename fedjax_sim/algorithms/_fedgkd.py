"""FedGKD: clients distil from the server's past models."""

from __future__ import annotations

from fedjax_sim.algorithms._fedavg import fedavg
from fedjax_sim.base import LocalUpdate, Model, Objective, part
from fedjax_sim.client import terms
from fedjax_sim.engine.execution import Execution
from fedjax_sim.round import Algorithm


@part
def fedgkd(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    objective: Objective,
    gamma: float = 0.1,
    buffer: int = 5,
    temperature: float = 1.0,
    equal_weights: bool = False,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedGKD: a client's answers stay near those of the mean of the last server models.

    .. math:: F_b(w) + \gamma \tau^2\, \mathrm{KL}\Bigl(\sigma\bigl(f(\bar w_t, x) / \tau\bigr)
              \,\Big\|\, \sigma\bigl(f(w, x) / \tau\bigr)\Bigr), \qquad
              \bar w_t = \frac1M \sum_{i=0}^{M-1} w_{t-i}

    with the logits f and the softmax σ; see :func:`fedjax_sim.terms.teacher_distillation`.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        model: the model that it trains.
        objective: what it minimises, an ``empirical_risk``.
        gamma: γ, the weight of the term; 0 is FedAvg.
        buffer: M, the server models behind the teacher; 1 is the received model alone.
        temperature: τ.
        equal_weights: weigh clients equally, not by n_k, their numbers of samples.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Memory: M + 1 models at the server. Traffic per round: 2m models down, or m
        if M is 1; m up.

    Raises:
        ValueError: if the objective is no ``empirical_risk``, gamma is negative, or buffer or the
            temperature not positive.

    Source: Yao, Pan, Dai, Wan, Ding, Jin, Xu, Sun, "Local-global knowledge distillation in
    heterogeneous federated learning with non-IID data", 2021 <https://arxiv.org/abs/2107.00051>.

    Note:
        γ, M and τ² are those of the authors' code, which leaves the term out in the first round.
        FedGKD-VOTE, by which every past model teaches alone, as far as its loss on validation
        samples is low, is not here.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedgkd(
        ...     local, clients_per_round=5, model=problem.model, objective=problem.objective
        ... )
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    term = terms.teacher_distillation(model, gamma, temperature)
    shared = None if buffer == 1 else terms.past_models(buffer)
    return fedavg(
        local.change(objective=terms.remade(objective, term=term), shared=shared),
        clients_per_round=clients_per_round,
        equal_weights=equal_weights,
        execution=execution,
    )
