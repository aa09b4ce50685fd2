"""RADFed: redistribution and delayed aggregation, and the options of RADFed+."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import optax

from fedjax_sim import server
from fedjax_sim.base import LocalUpdate, Objective, Selection, Server, concrete, part
from fedjax_sim.client import corrections
from fedjax_sim.client.reports import Kind, squared_gradient, with_importance
from fedjax_sim.engine import optimizers
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import redistribution, schedule, selection
from fedjax_sim.plan.selection import InitialScores
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.round.parts import Evaluated
from fedjax_sim.server import refresh, weighting

ServerOptimizer = Literal["adagrad", "adam", "yogi"]
ADAPTIVE: dict[ServerOptimizer, Callable[..., optax.GradientTransformation]] = {
    "adagrad": optimizers.adagrad,
    "adam": optimizers.adam,
    "yogi": optimizers.yogi,
}


@part
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
    evaluated: Evaluated = "in_flight",
    execution: Execution | None = None,
) -> Algorithm:
    r"""RADFed: m models are passed on among the clients for S rounds, then are averaged once.

    .. math:: w_{t+1} = \frac1m \sum_{i=1}^m w_i^{(S)}, \qquad
              w_i^{(s+1)} = \mathrm{train}\bigl(w_{\pi_s(i)}^{(s)},\, U_i^{(s)}\bigr)

    with a random permutation :math:`\pi_s` and a new uniform cohort :math:`U^{(s)}` in each round.
    The options of RADFed+ are off by default and combine freely: importance draws the cohorts
    (RADFedi); a proximal term holds a model near the one that the client received, which is mostly
    another client's (RADFedp); the server moves only a part of the way (RADFedm), or by an
    optimiser (RADFeda):

    .. math:: w_{t+1} = (1-\alpha)\, w_t + \frac{\alpha}{m} \sum_i w_i^{(S)}
              \quad\text{or}\quad w_{t+1} = w_t + \eta\,\frac{m_t}{\sqrt{v_t} + \tau}
              \text{ on } \Delta_t = \frac{\alpha}{m} \sum_i \bigl(w_i^{(S)} - w_t\bigr)

    Algorithm 2 of the paper prints the last line without the root, a misprint.

    Args:
        local: the local update.
        clients_per_round: m, the models in flight.
        redistribution_rounds: S, the local rounds from one aggregation to the next.
        active_clients: how many clients train in a round, if fewer than models: the models trained
          least since the last aggregation go first, the others are idle. None: as many as models.
        importance: draw clients in proportion to the mean squared norm of their gradients, over
          every "minibatch" or every "sample". None: draw uniformly.
        gamma: γ, the weight of a client's newest importance in its running mean.
        initial_scores: a client's importance at the start: "gradient", that of the initial weights
          (a pass over all samples), or "ones".
        mu: μ of the proximal term; 0 is none.
        alpha: α, how far the server moves towards the clients' models; 1 is all the way.
        server_optimizer: the server's adaptive optimiser; adagrad has no beta2. None: none.
        server_lr: η, the server's learning rate.
        beta1: β1, the decay of the first moment of the server's optimiser.
        beta2: β2, the decay of the second moment of the server's optimiser.
        tau: τ, added to the root of the second moment of the server's optimiser.
        v0: the second moment of the server's optimiser at the start; None: τ².
        objective: the objective of the local update, whose gradients importance is made of.
        evaluated: the model that is scored: the mean of those "in_flight", as in the authors' code,
          or the "server"'s, which is up to S - 1 rounds old.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm; a redistribution_rounds of 1 is FedAvg with equal weights, bit for bit. A
        round is a local (inner) one. Traffic per round: m models down, m up (a redistributed model
        travels as the server model would), with active_clients as many; with importance also a
        number up with each, and the first scores as in ``radfedi``.

    Raises:
        ValueError: if a setting is out of range, or importance has no objective.

    Source: Xue, Klabjan, Luo, "Aggregation delayed federated learning", 2021
    <https://arxiv.org/abs/2108.07433>, Algorithms 1 and 2; section III-A for active_clients.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.radfed(local, clients_per_round=5, redistribution_rounds=2)
        >>> problem.accuracy(algorithm, rounds=4) > 0.8  # two aggregations
        True
    """
    if redistribution_rounds < 1:
        raise ValueError(f"redistribution_rounds must be at least 1, got {redistribution_rounds}")
    if active_clients is not None and not 1 <= active_clients <= clients_per_round:
        raise ValueError(f"active_clients must be in 1..{clients_per_round}, got {active_clients}")
    draws: Selection = selection.uniform(active=active_clients)
    if importance is not None:
        if objective is None:
            raise ValueError(f"objective must be given for importance {importance!r}, got None")
        score = squared_gradient(objective, local.batch_size, importance)
        local = with_importance(local, score)
        draws = selection.importance(score, gamma, initial=initial_scores, active=active_clients)
    return compose(
        local.change(corrections=(corrections.proximal(mu),)) if mu else local,
        selection=draws,
        schedule=schedule.delayed(clients_per_round, redistribution_rounds),
        redistribution=redistribution.permute,
        refresh=refresh.nothing(),
        weighting=weighting.equal,
        server=_server(
            alpha, server_optimizer, server_lr, beta1=beta1, beta2=beta2, tau=tau, v0=v0
        ),
        evaluated=evaluated if redistribution_rounds > 1 else "server",
        execution=execution,
    )


def _server(
    alpha: float, name: ServerOptimizer | None, server_lr: float, **settings: float | None
) -> Server:
    if name is None:
        return server.mix(alpha)
    if name not in ADAPTIVE:
        raise ValueError(f"server_optimizer must be one of {', '.join(ADAPTIVE)}, got {name!r}")
    if concrete(alpha) and not 0 < alpha <= 1:
        raise ValueError(f"alpha must be in (0, 1], got {alpha}")
    if concrete(server_lr) and not server_lr > 0:
        raise ValueError(f"server_lr must be positive, got {server_lr}")
    if name == "adagrad":
        del settings["beta2"]
    return server.optimizer(optax.chain(optax.scale(alpha), ADAPTIVE[name](server_lr, **settings)))
