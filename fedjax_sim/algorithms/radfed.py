"""RADFed: redistribution and delayed aggregation, and the options of RADFed+."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import optax

from fedjax_sim import (
    drift,
    optimizers,
    receive,
    redistribution,
    schedule,
    selection,
    server,
    weighting,
)
from fedjax_sim.base import Algorithm, LocalUpdate, Objective, Server
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution
from fedjax_sim.importance import Kind, squared_gradient, with_importance
from fedjax_sim.selection import InitialScores

ServerOptimizer = Literal["adagrad", "adam", "yogi"]
ADAPTIVE: dict[ServerOptimizer, Callable[..., optax.GradientTransformation]] = {
    "adagrad": optimizers.adagrad,
    "adam": optimizers.adam,
    "yogi": optimizers.yogi,
}


def radfed(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    redistribution_rounds: int = 5,
    active_clients: int | None = None,
    importance: Kind | None = None,
    gamma: float = 0.9,
    initial_scores: InitialScores = "gradient",
    mu: float = 0.0,
    alpha: float = 1.0,
    server_optimizer: ServerOptimizer | None = None,
    server_lr: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    v0: float | None = None,
    objective: Objective | None = None,
    execution: Execution | None = None,
) -> Algorithm:
    r"""RADFed: m models wander among the clients for S rounds, then are averaged once.

    .. math:: w_{t+1} = \frac1m \sum_{i=1}^m w_i^{(S)}, \qquad
              w_i^{(s+1)} = \mathrm{train}\bigl(w_{\pi_s(i)}^{(s)},\, U_i^{(s)}\bigr)

    with a random permutation :math:`\pi_s` and a fresh uniform cohort :math:`U^{(s)}` each round.
    The options of RADFed+ are off by default and mix freely: importance draws the cohorts
    (RADFedi), a proximal term holds a model to what the client received, which is a local model
    (RADFedp), and the server moves only a part of the way (RADFedm) or by an optimiser (RADFeda):

    .. math:: w_{t+1} = (1-\alpha)\, w_t + \frac{\alpha}{m} \sum_i w_i^{(S)}
              \quad\text{or}\quad w_{t+1} = w_t + \eta\,\frac{m_t}{\sqrt{v_t} + \tau}
              \text{ on } \Delta_t = \frac{\alpha}{m} \sum_i \bigl(w_i^{(S)} - w_t\bigr)

    Algorithm 2 of the paper prints the last line without the root, a misprint.

    Args:
        local: the local update.
        clients_per_round: m, the models in flight.
        redistribution_rounds: S, the local rounds from one aggregation to the next; 1 is FedAvg
          with equal weights, bit for bit.
        active_clients: where fewer clients than models (clients_per_round) can train in a round,
          how many: the models least trained since the last aggregation go first, the others rest.
          None: as many as models.
        importance: draws clients by their mean squared gradient at the models they trained, over
          minibatches or over samples; None draws uniformly.
        gamma: γ, the weight of a client's newest importance in its running mean.
        initial_scores: importance at the start, of the gradient at the initial weights (a pass over
            all samples) or all ones.
        mu: μ of the proximal term μ/2 ‖w - w_recv‖², w_recv the model that was received; 0: none.
        alpha: α, the part of the way to the models' mean that the server goes.
        server_optimizer: adaptive optimiser of the server; None: none.
        server_lr: η, the server's learning rate.
        beta1: β1, the decay of the first moment of the server's optimiser.
        beta2: β2, the decay of the second moment of the server's optimiser; adagrad has none.
        tau: τ, which the server's optimiser adds to the root of the second moment.
        v0: the second moment of the server's optimiser at the start; None: τ².
        objective: what importance is scored by: that of the local update.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; one step is one local (inner) round. Traffic per round: m models down, m up
        (a redistributed model travels as the server model would), with active_clients as many; with
        importance also a number up with each, and the first scores as in ``radfedi``.

    Raises:
        ValueError: if a setting is out of range, or importance has no objective.

    Source: Xue, Klabjan, Luo, "Aggregation delayed federated learning", 2021, Algorithms 1 and 2;
    section III-A for active_clients.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> radfed(local, clients_per_round=10, redistribution_rounds=5).slots
        10
    """
    if redistribution_rounds < 1:
        raise ValueError(f"redistribution_rounds must be at least 1, got {redistribution_rounds}")
    if active_clients is not None and not 1 <= active_clients <= clients_per_round:
        raise ValueError(f"active_clients must be in 1..{clients_per_round}, got {active_clients}")
    draws = selection.uniform(active=active_clients)
    if importance is not None:
        if objective is None:
            raise ValueError(f"objective must be given for importance {importance!r}, got None")
        score = squared_gradient(objective, local.batch_size, importance)
        local = with_importance(local, score)
        draws = selection.importance(score, gamma, initial=initial_scores, active=active_clients)
    return compose(
        local.change(drift=(drift.proximal(mu),)) if mu else local,
        selection=draws,
        schedule=schedule.delayed(clients_per_round, redistribution_rounds),
        redistribution=redistribution.permute,
        receive=receive.nothing(),
        weighting=weighting.equal,
        server=_server(
            alpha, server_optimizer, server_lr, beta1=beta1, beta2=beta2, tau=tau, v0=v0
        ),
        execution=execution,
    )


def _server(
    alpha: float, name: ServerOptimizer | None, server_lr: float, **settings: float | None
) -> Server:
    if name is None:
        return server.mix(alpha)
    if name not in ADAPTIVE:
        raise ValueError(f"server_optimizer must be one of {', '.join(ADAPTIVE)}, got {name!r}")
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    if not server_lr > 0:
        raise ValueError(f"server_lr must be positive, got {server_lr}")
    if name == "adagrad":
        del settings["beta2"]
    return server.optimizer(optax.chain(optax.scale(alpha), ADAPTIVE[name](server_lr, **settings)))
