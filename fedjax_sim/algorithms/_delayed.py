"""Delayed aggregation: phase shift, RADFed and its variants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import optax

from fedjax_sim import server
from fedjax_sim.algorithms._method import method
from fedjax_sim.base import (
    Count,
    Evaluated,
    Fraction,
    LocalUpdate,
    NonNegative,
    Objective,
    Positive,
    Selection,
    Server,
)
from fedjax_sim.client import corrections
from fedjax_sim.client.reports import Kind, squared_gradient, with_importance
from fedjax_sim.engine import optimizers
from fedjax_sim.plan import flight, redistribution, selection
from fedjax_sim.plan.selection import InitialScores
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting

__all__ = ["hierfavg", "phase_shift", "radfed"]

Mode = Literal["communication", "epochs"]


@method
def phase_shift(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    phases: Count = 2,
    mode: Mode = "communication",
) -> Algorithm:
    r"""Phase shift: n groups train concurrently; one uploads per round, the others are corrected.

    .. math:: w_k \leftarrow \frac{N_t}{n_k + N_t} w_t + \frac{n_k}{n_k + N_t} w_k, \qquad
              w_{t+1} = \sum_{k \in \text{oldest}} \frac{n_k}{N_{t+1}} w_k, \quad
              N_{t+1} = \sum_{k \in \text{oldest}} n_k

    A group trains for n rounds. After its upload it is replaced by free clients, which start from
    the server model. At the end of a run, all models in flight are uploaded and averaged.

    Args:
        local: the local update, with E of the FedAvg with which it is compared.
        clients_per_round: n·m: clients active at once; all clients for full participation.
        phases: n: number of groups; must divide clients_per_round. 1 is FedAvg, bit for bit.
        mode: "communication" trains E epochs per round and saves traffic; "epochs" keeps FedAvg's
          traffic and trains E (n+1)/2n epochs in 2n/(n+1) times as many rounds (``round_factor``).

    Returns:
        The algorithm. Traffic per round: n·m models down, m up: (n+1)/2n of FedAvg's.

    Source: Cornelis, "Federated learning from non-IID data", thesis, TU Delft 2022
    <cornelis2022federated>, chapter 4, Algorithms 2 and 3; eq. 4.2 and 4.3 for the two modes.

    Example:
        >>> algorithm = fs.algorithms.phase_shift(local, clients_per_round=10, phases=2)
        >>> problem.accuracy(algorithm, rounds=4) > 0.8
        True
        >>> fs.algorithms.phase_shift(
        ...     local, clients_per_round=40, phases=4, mode="epochs"
        ... ).round_factor
        1.6
    """
    round_factor = 2 * phases / (phases + 1) if mode == "epochs" else 1.0
    return compose(
        local.change(epochs=np.divide(local.epochs, round_factor).tolist()),
        clients_per_round,
        selection=selection.uniform(sticky=True),
        flight=flight.staggered(
            phases, refresh=flight.drift_correction(), round_factor=round_factor
        ),
    )


ServerOptimizer = Literal["adagrad", "adam", "yogi"]


ADAPTIVE: dict[ServerOptimizer, Callable[..., optax.GradientTransformation]] = {
    "adagrad": optimizers.adagrad,
    "adam": optimizers.adam,
    "yogi": optimizers.yogi,
}


@method
def radfed(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    redistribution_rounds: Count = 5,
    active_clients: Count | None = None,
    importance: Kind | None = None,
    gamma: float = 0.9,
    initial_scores: InitialScores = "gradient",
    mu: NonNegative | None = None,
    alpha: Fraction = 1.0,
    server_optimizer: ServerOptimizer | None = None,
    server_lr: Positive = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    v0: float | None = None,
    objective: Objective | None = None,
    evaluated: Evaluated = "in_flight",
) -> Algorithm:
    r"""RADFed: redistributes m models among the clients for S rounds, then averages them once.

    .. math:: w_{t+1} = \frac1m \sum_{i=1}^m w_i^{(S)}, \qquad
              w_i^{(s+1)} = \mathrm{train}\bigl(w_{\pi_s(i)}^{(s)},\, U_i^{(s)}\bigr)

    with a random permutation :math:`\pi_s` and a new uniform cohort :math:`U^{(s)}` in each round.
    The options of RADFed+ are off by default and combine freely: sampling by importance (RADFedi);
    a proximal term that keeps a model near the one the client received, usually another client's
    (RADFedp); a server that moves only part of the way (RADFedm) or uses an optimiser (RADFeda):

    .. math:: w_{t+1} = (1-\alpha)\, w_t + \frac{\alpha}{m} \sum_i w_i^{(S)}
              \quad\text{or}\quad w_{t+1} = w_t + \eta\,\frac{m_t}{\sqrt{v_t} + \tau}
              \text{ on } \Delta_t = \frac{\alpha}{m} \sum_i \bigl(w_i^{(S)} - w_t\bigr)

    Algorithm 2 of the paper omits the root in the last expression, a misprint.

    Args:
        clients_per_round: m: models in flight.
        active_clients: clients that train per round, if fewer than models: the models trained least
          since the last aggregation go first. None: as many as models.
        importance: sample clients in proportion to the mean squared norm of their gradients, over
          every "minibatch" or every "sample". None: uniformly.
        mu: μ of the proximal term. None: no term.
        server_optimizer: adaptive server optimiser; adagrad has no beta2. None: no optimiser.
        objective: F, the objective of the local update; required by importance.
        evaluated: model to score: the mean of the models "in_flight", as in the authors' code, or
          the "server" model, up to S - 1 rounds old.

    Returns:
        The algorithm; with ``redistribution_rounds=1`` it is FedAvg with equal weights, bit for
        bit. Each round is a local (inner) round. Traffic per round: m models down, m up (a
        redistributed model counts as the server model would), with active_clients in place of m;
        with importance, also one number up with each, and initial scores as in ``radfedi``.

    Source: Xue, Klabjan, Luo, "Aggregation delayed federated learning", 2021
    <https://arxiv.org/abs/2108.07433>, Algorithms 1 and 2; section III-A for active_clients.
    """
    if active_clients is not None and active_clients > clients_per_round:
        raise ValueError(f"active_clients must be in 1..{clients_per_round}, got {active_clients}")
    draws: Selection = selection.uniform(active=active_clients)
    if importance is not None:
        if objective is None:
            raise ValueError(f"objective must be given for importance {importance!r}, got None")
        score = squared_gradient(objective, local.batch_size, importance)
        local = with_importance(local, score)
        draws = selection.importance(score, gamma, initial=initial_scores, active=active_clients)
    return compose(
        local if mu is None else local.change(corrections=(corrections.proximal(mu),)),
        clients_per_round,
        selection=draws,
        flight=flight.delayed(
            redistribution_rounds,
            redistribution=redistribution.permute,
            evaluated=evaluated if redistribution_rounds > 1 else "server",
        ),
        weighting=weighting.equal,
        server=_server_step(
            alpha, server_optimizer, server_lr, beta1=beta1, beta2=beta2, tau=tau, v0=v0
        ),
    )


def _server_step(
    alpha: float, name: ServerOptimizer | None, server_lr: float, **settings: float | None
) -> Server:
    """Returns a step of length alpha, or an adaptive optimiser on it."""
    if name is None:
        return server.mix(alpha)
    if name == "adagrad":
        del settings["beta2"]
    return server.optimizer(optax.chain(optax.scale(alpha), ADAPTIVE[name](server_lr, **settings)))


@method
def hierfavg(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    edges: Count = 2,
    edge_rounds: Count = 2,
) -> Algorithm:
    r"""HierFAVG: clients average at edge servers in each round, and edges at the cloud in some.

    .. math:: w_k \leftarrow \sum_{j \in C_\ell} \frac{n_j}{\sum_{i \in C_\ell} n_i} w_j
              \; \text{ for } k \in C_\ell \text{ in each round}, \qquad
              w \leftarrow \sum_k \frac{n_k}{\sum_j n_j} w_k
              \; \text{ in each } \kappa_2\text{-th}

    Client k belongs to edge k mod L; see :class:`fedjax_sim.redistribution.edges`, which takes any
    other assignment. A cohort trains for κ₂ rounds; the authors' code draws another one at each
    edge in every round. κ₁ is the number of local steps. The cloud's model is evaluated.

    Args:
        clients_per_round: m: clients per round; all clients in the paper.
        edges: L: number of edges; 1 is FedAvg whose cohort stays for κ₂ rounds.
        edge_rounds: κ₂: rounds between two averages at the cloud; 1 is FedAvg, bit for bit.

    Returns:
        The algorithm. Traffic per round: m models down, m up, between clients and edges; per κ₂
        rounds, L more models each way, between edges and the cloud.

    Source: Liu, Zhang, Song, Letaief, "Client-edge-cloud hierarchical federated learning", ICC 2020
    <https://arxiv.org/abs/1905.06641>, Algorithm 1; Liu 2020 <https://github.com/LuminLiu/HierFL>,
    the authors' code.
    """
    return compose(
        local,
        clients_per_round,
        selection=selection.uniform(sticky=True),
        flight=flight.delayed(edge_rounds, redistribution=redistribution.edges(edges)),
    )
