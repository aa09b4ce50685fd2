"""RADFed+: the variants of RADFed that its paper names; :func:`radfed` mixes them."""

from __future__ import annotations

from fedjax_sim.algorithms.radfed import ServerOptimizer, radfed
from fedjax_sim.base import Algorithm, LocalUpdate, Objective
from fedjax_sim.execution import Execution
from fedjax_sim.importance import Kind
from fedjax_sim.selection import InitialScores


def radfedi(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    redistribution_rounds: int = 5,
    importance: Kind = "minibatch",
    gamma: float = 0.9,
    initial_scores: InitialScores = "gradient",
    execution: Execution | None = None,
) -> Algorithm:
    r"""RADFedi: RADFed that draws clients by the gradients that they still have.

    .. math:: U \sim p \text{ without replacement}, \qquad
              p_k \leftarrow (1-\gamma)\, p_k + \gamma\, q_k, \qquad
              q_k = \frac{1}{\lceil n_k/B \rceil} \sum_b \lVert \nabla F_b(w_k) \rVert^2

    at the weights that client k has just trained. The second version of the paper prints the mean
    over samples in the place of minibatches; the first version and the authors' code have these.

    Args:
        local: the local update.
        clients_per_round: m, the models in flight.
        objective: what the gradients are of: that of the local update.
        redistribution_rounds: S, the local rounds from one aggregation to the next.
        importance: mean over minibatches or over samples.
        gamma: γ, the weight of a client's newest importance in its running mean.
        initial_scores: importance at the start, of the gradient at the initial weights (a pass over
            all samples, as in the authors' code) or all ones.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up, and a number with each; before the
        first, for initial scores of the gradient, a model to each of the N clients and a number up.

    Raises:
        ValueError: if a setting is out of range.

    Source: Xue, Klabjan, Luo, "Aggregation delayed federated learning", 2021, Algorithm 2 and
    section III-B.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> risk = empirical_risk(models.logistic((8, 8, 1), 10))
        >>> radfedi(local_sgd(risk, optax.sgd(0.1)), clients_per_round=10, objective=risk).slots
        10
    """
    return radfed(
        local,
        clients_per_round=clients_per_round,
        redistribution_rounds=redistribution_rounds,
        importance=importance,
        gamma=gamma,
        initial_scores=initial_scores,
        objective=objective,
        execution=execution,
    )


def radfedp(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    redistribution_rounds: int = 5,
    mu: float = 0.01,
    execution: Execution | None = None,
) -> Algorithm:
    r"""RADFedp: RADFed with FedProx's proximal term.

    .. math:: h_k(w) = F_k(w) + \frac{\mu}{2} \lVert w - w_{recv} \rVert^2

    where w_recv is the model that the client received in this round: but in the first after an
    aggregation another client's local model, not the server's.

    Args:
        local: the local update.
        clients_per_round: m, the models in flight.
        redistribution_rounds: S, the local rounds from one aggregation to the next.
        mu: μ of the proximal term; 0 is RADFed.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range.

    Source: Xue, Klabjan, Luo, "Aggregation delayed federated learning", 2021, Algorithm 2
    (ClientUpdate) and section III-C.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> risk = empirical_risk(models.logistic((8, 8, 1), 10))
        >>> radfedp(local_sgd(risk, optax.sgd(0.1)), clients_per_round=10, mu=0.1).slots
        10
    """
    return radfed(
        local,
        clients_per_round=clients_per_round,
        redistribution_rounds=redistribution_rounds,
        mu=mu,
        execution=execution,
    )


def radfedm(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    redistribution_rounds: int = 5,
    alpha: float = 0.9,
    execution: Execution | None = None,
) -> Algorithm:
    r"""RADFedm: RADFed whose server keeps a part of its old model.

    .. math:: w_{t+1} = (1-\alpha)\, w_t + \frac{\alpha}{m} \sum_{i=1}^m w_i^{(S)}

    Args:
        local: the local update.
        clients_per_round: m, the models in flight.
        redistribution_rounds: S, the local rounds from one aggregation to the next.
        alpha: α, the part of the way to the models' mean that the server goes; 1 is RADFed.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range.

    Source: Xue, Klabjan, Luo, "Aggregation delayed federated learning", 2021, Algorithm 2 line 14
    and section IV-D (α is FedAsync's).

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> risk = empirical_risk(models.logistic((8, 8, 1), 10))
        >>> radfedm(local_sgd(risk, optax.sgd(0.1)), clients_per_round=10, alpha=0.6).slots
        10
    """
    return radfed(
        local,
        clients_per_round=clients_per_round,
        redistribution_rounds=redistribution_rounds,
        alpha=alpha,
        execution=execution,
    )


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
    execution: Execution | None = None,
) -> Algorithm:
    r"""RADFeda: RADFed with an adaptive optimiser on the server.

    .. math:: \Delta_t = \frac1m \sum_{i=1}^m w_i^{(S)} - w_t, \qquad
              w_{t+1} = w_t + \eta\,\frac{m_t}{\sqrt{v_t} + \tau}

    with the moments of :mod:`fedjax_sim.optimizers`. Algorithm 2 of the paper prints the quotient
    without the root, a misprint.

    Args:
        local: the local update.
        clients_per_round: m, the models in flight.
        redistribution_rounds: S, the local rounds from one aggregation to the next.
        server_optimizer: adaptive optimiser of the server.
        server_lr: η, the server's learning rate.
        beta1: β1, the decay of the first moment of the server's optimiser; FedAdagrad's paper
          has 0.
        beta2: β2, the decay of the second moment of the server's optimiser; adagrad has none.
        tau: τ, which the server's optimiser adds to the root of the second moment.
        v0: the second moment of the server's optimiser at the start; None: τ².
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range.

    Source: Xue, Klabjan, Luo, "Aggregation delayed federated learning", 2021, Algorithm 2 lines 15
    to 17 and section IV-E; Reddi et al., ICLR 2021.

    Example:
        >>> import optax
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> risk = empirical_risk(models.logistic((8, 8, 1), 10))
        >>> local = local_sgd(risk, optax.sgd(0.1))
        >>> radfeda(local, clients_per_round=10, server_optimizer="yogi").slots
        10
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
        execution=execution,
    )
