"""RADFed+: the named variants of RADFed, which :func:`radfed` combines."""

from __future__ import annotations

from fedjax_sim.algorithms._delayed import ServerOptimizer, radfed
from fedjax_sim.algorithms._method import method
from fedjax_sim.base import LocalUpdate, Objective
from fedjax_sim.client.reports import Kind
from fedjax_sim.plan.selection import InitialScores
from fedjax_sim.round import Algorithm


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
    r"""RADFedi: RADFed that draws clients in proportion to their squared gradient norms.

    .. math:: U \sim p \text{ without replacement}, \qquad
              p_k \leftarrow (1-\gamma)\, p_k + \gamma\, q_k, \qquad
              q_k = \frac{1}{\lceil n_k/B \rceil} \sum_b \lVert \nabla F_b(w_k) \rVert^2

    at the weights that client k has just trained. The second version of the paper prints a mean
    over samples instead of minibatches; the first version and the authors' code use minibatches.

    Args:
        clients_per_round: m, the models in flight.
        objective: the objective of the local update, whose gradients importance is made of.
        redistribution_rounds: S, the local rounds from one aggregation to the next.
        importance: draw clients in proportion to the mean squared norm of their gradients, over
          every "minibatch" or every "sample".
        gamma: γ, the weight of a client's newest importance in its running mean.
        initial_scores: a client's importance at the start: "gradient", that of the initial weights
          (a pass over all samples), or "ones".

    Returns:
        The algorithm. Traffic per round: m models down, m up, and a number with each; before the
        first, for initial scores of the gradient, a model to each of the N clients and a number up.

    Raises:
        ValueError: if a setting is out of range.

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

    where w_recv is the model that the client received in this round: the server's in the first
    round after an aggregation, then another client's local model.

    Args:
        clients_per_round: m, the models in flight.
        redistribution_rounds: S, the local rounds from one aggregation to the next.
        mu: μ of the proximal term; 0 is none.

    Returns:
        The algorithm; with μ = 0 it is RADFed. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range.

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
    r"""RADFedm: RADFed whose server keeps a part of its old model.

    .. math:: w_{t+1} = (1-\alpha)\, w_t + \frac{\alpha}{m} \sum_{i=1}^m w_i^{(S)}

    Args:
        clients_per_round: m, the models in flight.
        redistribution_rounds: S, the local rounds from one aggregation to the next.
        alpha: α, how far the server moves towards the clients' models; 1 is all the way.

    Returns:
        The algorithm; with α = 1 it is RADFed. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range.

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
    server_lr: float = 0.1,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    v0: float | None = None,
) -> Algorithm:
    r"""RADFeda: RADFed with an adaptive optimiser on the server.

    .. math:: \Delta_t = \frac1m \sum_{i=1}^m w_i^{(S)} - w_t, \qquad
              w_{t+1} = w_t + \eta\,\frac{m_t}{\sqrt{v_t} + \tau}

    with the moments of :mod:`fedjax_sim.optimizers`. Algorithm 2 of the paper prints the quotient
    without the root, a misprint. For Adagrad, Reddi et al. take β1 = 0.

    Args:
        clients_per_round: m, the models in flight.
        redistribution_rounds: S, the local rounds from one aggregation to the next.
        server_optimizer: the server's adaptive optimiser; adagrad has no beta2.
        server_lr: η, the server's learning rate.
        beta1: β1, the decay of the first moment of the server's optimiser.
        beta2: β2, the decay of the second moment of the server's optimiser.
        tau: τ, added to the root of the second moment of the server's optimiser.
        v0: the second moment of the server's optimiser at the start; None: τ².

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range.

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
