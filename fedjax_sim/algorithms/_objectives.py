"""Methods that add a term to the clients' loss, or calibrate it."""

from __future__ import annotations

from fedjax_sim.algorithms._averaging import fedavg
from fedjax_sim.algorithms._method import method
from fedjax_sim.base import LocalUpdate, Model, NonNegative, Objective
from fedjax_sim.client import terms
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import preaggregation

__all__ = ["feddisco", "fedgkd", "fedlc", "fedntd", "fedrs", "moon"]


@method
def moon(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    objective: Objective,
    mu: float = 1.0,
    temperature: float = 0.5,
    equal_weights: bool = False,
) -> Algorithm:
    r"""MOON: a contrastive loss pulls a client's features towards the server model's features.

    .. math:: F_b(w) - \mu \log \frac{e^{\cos(z, z_{recv}) / \tau}}
              {e^{\cos(z, z_{recv}) / \tau} + e^{\cos(z, z_{prev}) / \tau}}

    It also pushes them away from the features of the client's previous model. The features z are
    the inputs of the model's last dense layer; see :class:`fedjax_sim.terms.model_contrast`.

    Args:
        mu: μ: weight of the contrastive term; the authors use 0.1, 1, 5 or 10.

    Returns:
        The algorithm. Memory: one model per client. Traffic per round: m models down, m up.

    Source: Li, He, Song, "Model-contrastive federated learning", CVPR 2021
    <https://arxiv.org/abs/2103.16257>, Algorithm 1.
    """
    term = terms.model_contrast(model, mu, temperature)
    changed = local.change(objective=terms.remade(objective, term=term), memory=terms.last_model())
    return fedavg(changed, clients_per_round=clients_per_round, equal_weights=equal_weights)


@method
def fedntd(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    objective: Objective,
    beta: float = 1.0,
    temperature: float = 1.0,
    equal_weights: bool = False,
) -> Algorithm:
    r"""FedNTD: distils the server model's predictions on all classes but the true one.

    .. math:: F_b(w) + \beta\, \mathrm{KL}\bigl(\tilde q_{recv} \,\|\, \tilde q_w\bigr)

    Both distributions exclude the true class; see :class:`fedjax_sim.terms.not_true_distillation`.

    Args:
        beta: β: weight of the distillation term.

    Source: Lee, Jeong, Shin, Bae, Yun, "Preservation of the global knowledge by not-true
    distillation in federated learning", NeurIPS 2022 <https://arxiv.org/abs/2106.03097>.
    """
    term = terms.not_true_distillation(model, beta, temperature)
    changed = local.change(objective=terms.remade(objective, term=term))
    return fedavg(changed, clients_per_round=clients_per_round, equal_weights=equal_weights)


@method
def fedlc(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    tau: float = 1.0,
    equal_weights: bool = False,
) -> Algorithm:
    r"""FedLC: calibrates each client's training logits by its own label counts.

    .. math:: f_{k,y}(x) - \tau\, n_{k,y}^{-1/4}

    Args:
        tau: τ: strength of the calibration; 0 is FedAvg.

    Source: Zhang, Li, Li, Xu, Wu, Ding, Wu, "Federated learning with label distribution skew via
    logits calibration", ICML 2022 <https://arxiv.org/abs/2209.00189>.
    """
    changed = local.change(objective=terms.remade(objective, adjust=terms.calibration(tau)))
    return fedavg(changed, clients_per_round=clients_per_round, equal_weights=equal_weights)


@method
def fedrs(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    alpha: float = 0.5,
) -> Algorithm:
    r"""FedRS: scales down the training logits of classes that a client lacks.

    .. math:: \alpha^{[n_{k,y} = 0]} f_{k,y}(x)

    Args:
        alpha: α: the scale; 1 is FedAvg.

    Source: Li, Zhan, "FedRS: federated learning with restricted softmax for label distribution
    non-IID data", KDD 2021 <https://doi.org/10.1145/3447548.3467254>.
    """
    changed = terms.remade(objective, adjust=terms.restricted(alpha))
    return fedavg(local.change(objective=changed), clients_per_round=clients_per_round)


@method
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
) -> Algorithm:
    r"""FedGKD: distils the average of the last server models into the clients' models.

    .. math:: F_b(w) + \gamma \tau^2\, \mathrm{KL}\Bigl(\sigma\bigl(f(\bar w_t, x) / \tau\bigr)
              \,\|\, \sigma\bigl(f(w, x) / \tau\bigr)\Bigr), \qquad
              \bar w_t = \frac1M \sum_{i=0}^{M-1} w_{t-i}

    where f are the logits and σ is the softmax; see :class:`fedjax_sim.terms.teacher_distillation`.

    Args:
        gamma: γ: weight of the distillation term; 0 is FedAvg.
        buffer: M: server models averaged into the teacher; 1 uses only the received model.

    Returns:
        The algorithm. Memory: M + 1 models at the server. Traffic per round: 2m models down, or m
        if M is 1; m up.

    Source: Yao, Pan, Dai, Wan, Ding, Jin, Xu, Sun, "Local-global knowledge distillation in
    heterogeneous federated learning with non-IID data", 2021 <https://arxiv.org/abs/2107.00051>.

    Note:
        γ, M and τ² follow the authors' code, which omits the term in the first round. FedGKD-VOTE,
        in which each past model is a teacher, weighted by its loss on validation samples, is not
        included.
    """
    term = terms.teacher_distillation(model, gamma, temperature)
    shared = None if buffer == 1 else terms.past_models(buffer)
    changed = local.change(objective=terms.remade(objective, term=term), shared=shared)
    return fedavg(changed, clients_per_round=clients_per_round, equal_weights=equal_weights)


@method
def feddisco(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    classes: int,
    disco_a: NonNegative = 0.5,
    disco_b: NonNegative = 0.1,
    discrepancy: preaggregation.Discrepancy = "kl",
) -> Algorithm:
    r"""FedDisco: weights clients by their samples, and less if their labels are far from uniform.

    .. math:: w \leftarrow w + \sum_{k \in U} p_k (w_k - w), \qquad
              p_k \propto \max(n_k - a\, d_k + b,\, 0)

    where n_k is the client's share of the cohort's samples, and d_k is defined in
    :class:`fedjax_sim.preaggregation.discrepancy`. If the authors make the test labels imbalanced,
    they use the test distribution instead of the uniform one.

    Args:
        disco_a: a: weight of the label discrepancy; with b = 0, 0 is FedAvg.
        disco_b: b: constant added to each weight.
        discrepancy: d_k: "kl", the divergence from uniform as a share of the cohort's, or "l2".

    Returns:
        The algorithm. Traffic per round: m models down, m up; before the first round, one number
        from every client.

    Source: Ye, Xu, Wang, Xu, Chen, Wang, "FedDisco: federated learning with discrepancy-aware
    collaboration", ICML 2023 <https://arxiv.org/abs/2305.19229>, section 4.
    """
    return compose(
        local,
        clients_per_round,
        preaggregation=(preaggregation.discrepancy(classes, disco_a, disco_b, discrepancy),),
    )
