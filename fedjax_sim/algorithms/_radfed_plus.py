"""RADFed+: the named variants of RADFed, which :func:`radfed` combines."""

from __future__ import annotations

from fedjax_sim.algorithms._delayed import ServerOptimizer, radfed
from fedjax_sim.algorithms._method import method
from fedjax_sim.base import LocalUpdate, Objective, Positive
from fedjax_sim.client.reports import Kind
from fedjax_sim.plan.selection import InitialScores
from fedjax_sim.round import Algorithm

__all__ = ["radfeda", "radfedi", "radfedm", "radfedp"]


@method
def radfedi(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    redistribution_rounds: int = 5,
    importance: Kind = "minibatch",
    gamma: float = 0.9,
    initial_scores: InitialScores = "gradient",
) -> Algorithm:
    r"""RADFedi: RADFed with clients sampled in proportion to their squared gradient norms.

    .. math:: U \sim p \text{ without replacement}, \qquad
              p_k \leftarrow (1-\gamma)\, p_k + \gamma\, q_k, \qquad
              q_k = \frac{1}{\lceil n_k/B \rceil} \sum_b \lVert \nabla F_b(w_k) \rVert^2

    at the weights that client k has just trained. Algorithm 2 of the paper's second version prints
    a mean over samples instead of minibatches; its text, the first version and the authors' code
    use minibatches.

    Args:
        clients_per_round: m: models in flight.
        importance: take the mean squared gradient norm over every "minibatch" or every "sample".

    Returns:
        The algorithm. Traffic per round: m models down, m up, and one number with each; before the
        first round, with initial scores "gradient", one model to each of the N clients and one
        number up.

    Source: Xue, Klabjan, Luo, "Aggregation delayed federated learning", 2021
    <https://arxiv.org/abs/2108.07433>, Algorithm 2 and section III-B; their code, 2021
    <https://github.com/yxsub/RADFed>, for minibatches and for the first pass.
    """
    return radfed(
        local,
        clients_per_round=clients_per_round,
        redistribution_rounds=redistribution_rounds,
        importance=importance,
        gamma=gamma,
        initial_scores=initial_scores,
        objective=objective,
    )


@method
def radfedp(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    redistribution_rounds: int = 5,
    mu: float = 0.01,
) -> Algorithm:
    r"""RADFedp: RADFed with FedProx's proximal term.

    .. math:: h_k(w) = F_k(w) + \frac{\mu}{2} \lVert w - w_{recv} \rVert^2

    where w_recv is the model that the client received in this round: the server model in the first
    round after an aggregation, then another client's local model.

    Args:
        clients_per_round: m: models in flight.

    Returns:
        The algorithm; with μ = 0 it is RADFed. Traffic per round: m models down, m up.

    Source: Xue, Klabjan, Luo, "Aggregation delayed federated learning", 2021
    <https://arxiv.org/abs/2108.07433>, Algorithm 2 (ClientUpdate) and section III-C.
    """
    return radfed(
        local,
        clients_per_round=clients_per_round,
        redistribution_rounds=redistribution_rounds,
        mu=mu,
    )


@method
def radfedm(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    redistribution_rounds: int = 5,
    alpha: float = 0.9,
) -> Algorithm:
    r"""RADFedm: RADFed whose server keeps part of its previous model.

    .. math:: w_{t+1} = (1-\alpha)\, w_t + \frac{\alpha}{m} \sum_{i=1}^m w_i^{(S)}

    Args:
        clients_per_round: m: models in flight.

    Returns:
        The algorithm; with α = 1 it is RADFed. Traffic per round: m models down, m up.

    Source: Xue, Klabjan, Luo, "Aggregation delayed federated learning", 2021
    <https://arxiv.org/abs/2108.07433>, Algorithm 2 line 14 and section IV-D (α is FedAsync's).
    """
    return radfed(
        local,
        clients_per_round=clients_per_round,
        redistribution_rounds=redistribution_rounds,
        alpha=alpha,
    )


@method
def radfeda(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    redistribution_rounds: int = 5,
    server_optimizer: ServerOptimizer = "adam",
    server_lr: Positive = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    v0: float | None = None,
) -> Algorithm:
    r"""RADFeda: RADFed with an adaptive server optimiser.

    .. math:: \Delta_t = \frac1m \sum_{i=1}^m w_i^{(S)} - w_t, \qquad
              w_{t+1} = w_t + \eta\,\frac{m_t}{\sqrt{v_t} + \tau}

    with the moments of :mod:`fedjax_sim.optimizers`. Algorithm 2 of the paper omits the root in the
    quotient, a misprint. For Adagrad, Reddi et al. set β1 = 0.

    Args:
        clients_per_round: m: models in flight.
        server_optimizer: adaptive server optimiser; adagrad has no beta2.

    Source: Xue, Klabjan, Luo, "Aggregation delayed federated learning", 2021
    <https://arxiv.org/abs/2108.07433>, Algorithm 2 lines 15 to 17 and section IV-E; Reddi, Charles,
    Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated optimization", ICLR 2021
    <https://arxiv.org/abs/2003.00295>, Algorithm 2.
    """
    return radfed(
        local,
        clients_per_round=clients_per_round,
        redistribution_rounds=redistribution_rounds,
        server_optimizer=server_optimizer,
        server_lr=server_lr,
        beta1=beta1,
        beta2=beta2,
        tau=tau,
        v0=v0,
    )
