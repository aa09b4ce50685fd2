"""Methods that change what a client minimises, against client drift."""

from __future__ import annotations

import optax

from fedjax_sim import server
from fedjax_sim.algorithms._fedavg import fedavg
from fedjax_sim.base import LocalUpdate, Model, Objective, concrete, part, plain_sgd
from fedjax_sim.client import corrections, terms
from fedjax_sim.client.reflected import reflected
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@part
@plain_sgd
def feddyn(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    alpha: float = 0.1,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedDyn: every client's loss is changed so that all agree on the server's optimum.

    .. math:: \min_w F_k(w) - \langle h_k, w \rangle + \frac{\alpha}{2} \lVert w - w_t \rVert^2,
              \qquad h_k \leftarrow h_k - \alpha (w_k - w_t)

    .. math:: h \leftarrow h - \frac{\alpha}{N} \sum_{k \in U} (w_k - w_t), \qquad
              w_{t+1} = \frac1m \sum_{k \in U} w_k - \frac{h}{\alpha}

    All clients count equally.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        alpha: α; the authors take 0.1, 0.01 or 0.001.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Memory: h_k on every client, as large as the model. Traffic per round: m
        models down, m up.

    Raises:
        ValueError: if alpha is not positive.

    Source: Acar, Zhao, Navarro, Mattina, Whatmough, Saligrama, "Federated learning based on dynamic
    regularization", ICLR 2021 <https://arxiv.org/abs/2111.04263>, Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.feddyn(local, clients_per_round=5)
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    return compose(
        local.change(corrections=(corrections.dynamic(alpha),)),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        weighting=weighting.equal,
        server=server.dynamic(alpha),
        execution=execution,
    )


@part
@plain_sgd
def fedadmm(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    rho: float = 0.01,
    server_lr: float | None = None,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedADMM: primal and dual steps of the clients, and a server that follows both.

    .. math:: w_k^+ \approx \arg\min_w F_k(w) + \langle y_k, w - w_t \rangle + \frac{\rho}{2}
              \lVert w - w_t \rVert^2, \qquad y_k^+ = y_k + \rho\,(w_k^+ - w_t)

    .. math:: w_{t+1} = w_t + \frac{\eta_g}{m} \sum_{k \in U} \Bigl( w_k^+ - w_k + \frac1\rho
              (y_k^+ - y_k) \Bigr)

    All clients count equally. If all take part and :math:`\eta_g = 1`, it is FedDyn. A client's
    steps start from w_t, as in the authors' code; in that code w_k is w_t as well, so that clients
    send :math:`2 (w_k^+ - w_t)`. The paper's analysis is of :math:`\eta_g = m / N`, with which
    w_t is the mean of all clients' :math:`w_k + y_k / \rho`; its code takes a constant, and a
    smaller one later on.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        rho: ρ.
        server_lr: η_g, the server's learning rate; None: m / N. If few clients take part, 1 may
          diverge: it did with 10 of 40 on skewed digits, where m / N did not.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Memory: w_k and y_k on every client, each as large as the model. Traffic per
        round: m models down, m up.

    Raises:
        ValueError: if rho or server_lr is not positive.

    Source: Gong, Li, Freris, "FedADMM: a robust federated deep learning framework with adaptivity
    to system heterogeneity", ICDE 2022 <https://arxiv.org/abs/2204.03529>, Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedadmm(local, clients_per_round=5)
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    if concrete(rho) and not rho > 0:
        raise ValueError(f"rho must be positive, got {rho}")
    if server_lr is not None and concrete(server_lr) and not server_lr > 0:
        raise ValueError(f"server_lr must be positive, got {server_lr}")
    moves = server.participation() if server_lr is None else server.optimizer(optax.sgd(server_lr))
    return compose(
        reflected(local.change(corrections=(corrections.dynamic(rho),))),
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        weighting=weighting.equal,
        server=moves,
        execution=execution,
    )


@part
def moon(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    objective: Objective,
    mu: float = 1.0,
    temperature: float = 0.5,
    equal_weights: bool = False,
    execution: Execution | None = None,
) -> Algorithm:
    r"""MOON: a client's features stay near the server model's, and leave its own last model's.

    .. math:: F_b(w) - \mu \log \frac{e^{\cos(z, z_{recv}) / \tau}}
              {e^{\cos(z, z_{recv}) / \tau} + e^{\cos(z, z_{prev}) / \tau}}

    The features z are the inputs of the model's last dense layer; see
    :func:`fedjax_sim.terms.model_contrast`.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        model: the model that it trains.
        objective: what it minimises, an ``empirical_risk``.
        mu: μ, the weight of the term; the authors take 0.1, 1, 5 or 10.
        temperature: τ.
        equal_weights: weigh clients equally, not by n_k, their numbers of samples.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Memory: a model for every client. Traffic per round: m models down, m up.

    Raises:
        ValueError: if the model has no features, the objective is no ``empirical_risk``, mu is
            negative or the temperature not positive.

    Source: Li, He, Song, "Model-contrastive federated learning", CVPR 2021
    <https://arxiv.org/abs/2103.16257>, Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.moon(
        ...     local, clients_per_round=5, model=problem.model, objective=problem.objective
        ... )
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    term = terms.model_contrast(model, mu, temperature)
    changed = terms.remade(objective, term=term)
    return fedavg(
        local.change(objective=changed, memory=terms.last_model()),
        clients_per_round=clients_per_round,
        equal_weights=equal_weights,
        execution=execution,
    )


@part
def fedntd(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    model: Model,
    objective: Objective,
    beta: float = 1.0,
    temperature: float = 1.0,
    equal_weights: bool = False,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedNTD: a client keeps what the server model says of the classes that are not the label's.

    .. math:: F_b(w) + \beta\, \mathrm{KL}\bigl(\tilde q_{recv} \,\|\, \tilde q_w\bigr)

    The distributions leave out the true class; see
    :func:`fedjax_sim.terms.not_true_distillation`.

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        model: the model that it trains.
        objective: what it minimises, an ``empirical_risk``.
        beta: β, the weight of the term.
        temperature: τ.
        equal_weights: weigh clients equally, not by n_k, their numbers of samples.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if the objective is no ``empirical_risk``, beta is negative or the temperature
            not positive.

    Source: Lee, Jeong, Shin, Bae, Yun, "Preservation of the global knowledge by not-true
    distillation in federated learning", NeurIPS 2022 <https://arxiv.org/abs/2106.03097>.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedntd(
        ...     local, clients_per_round=5, model=problem.model, objective=problem.objective
        ... )
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    changed = terms.remade(objective, term=terms.not_true_distillation(model, beta, temperature))
    return fedavg(
        local.change(objective=changed),
        clients_per_round=clients_per_round,
        equal_weights=equal_weights,
        execution=execution,
    )


@part
def fedlc(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    tau: float = 1.0,
    equal_weights: bool = False,
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedLC: in training, each client's logits are calibrated by its own label counts.

    .. math:: f_{k,y}(x) - \tau\, n_{k,y}^{-1/4}

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        objective: what it minimises, an ``empirical_risk``.
        tau: τ; 0 is FedAvg.
        equal_weights: weigh clients equally, not by n_k, their numbers of samples.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if the objective is no ``empirical_risk``, or tau is negative.

    Source: Zhang, Li, Li, Xu, Wu, Ding, Wu, "Federated learning with label distribution skew via
    logits calibration", ICML 2022 <https://arxiv.org/abs/2209.00189>.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedlc(
        ...     local, clients_per_round=5, objective=problem.objective
        ... )
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    changed = terms.remade(objective, adjust=terms.calibration(tau))
    return fedavg(
        local.change(objective=changed),
        clients_per_round=clients_per_round,
        equal_weights=equal_weights,
        execution=execution,
    )
