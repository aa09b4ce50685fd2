"""Methods that correct local training against client drift."""

from __future__ import annotations

from fedjax_sim import server
from fedjax_sim.algorithms._method import method, server_sgd
from fedjax_sim.base import Fraction, LocalUpdate, NonNegative, Positive, plain_sgd
from fedjax_sim.client import corrections, turns
from fedjax_sim.client.skipping import geometric
from fedjax_sim.plan import selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import preaggregation, weighting

__all__ = ["fedadmm", "feddyn", "fednova", "fedprox", "scaffnew", "scaffold"]


@method
def fedprox(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    mu: NonNegative | None = None,
    adaptive: bool = False,
    inexactness: float | None = None,
) -> Algorithm:
    r"""FedProx: FedAvg on local objectives with a proximal term.

    .. math:: h_k(w) = F_k(w) + \frac{\mu}{2} \lVert w - w_t \rVert^2

    Args:
        mu: μ: weight of the proximal term, in the first round if adaptive. None: 0.01, or 0 if
          adaptive.
        adaptive: raise μ by 0.1 when the training loss rises, and lower it by 0.1 after five
          decreases in a row; see :class:`fedjax_sim.corrections.adaptive_proximal`.
        inexactness: γ: a client stops after the epoch that reduces the gradient norm of h_k to γ
          times its initial value. None: as the local update has it.

    Returns:
        The algorithm; with μ = 0 it is FedAvg, bit for bit. Traffic per round: m models down, m up;
        if adaptive, 12 bytes more down and 8 up for each.

    Source: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous
    networks", MLSys 2020 <https://arxiv.org/abs/1812.06127>, Algorithm 2 and section 5.3; Vo,
    Rakotobe, "How to deal with non-IID data in federated learning", 2020 <vo2020how>, Table 2
    (inexactness).
    """
    if mu is None:
        mu = 0.0 if adaptive else 0.01
    term = corrections.adaptive_proximal(mu) if adaptive else corrections.proximal(mu)
    stop = {} if inexactness is None else {"inexactness": inexactness}
    return compose(local.change(corrections=(term,), **stop), clients_per_round)


@method
def scaffold(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    option: corrections.Option = 2,
    server_lr: Positive = 1.0,
) -> Algorithm:
    r"""SCAFFOLD: control variates correct every local step for client drift.

    .. math:: w_k \leftarrow w_k - \eta\,(\nabla F_b(w_k) - c_k + c), \qquad
              w \leftarrow w + \frac{\eta_g}{m} \sum_{k \in U} (w_k - w), \qquad
              c \leftarrow c + \frac1N \sum_{k \in U} (c_k^+ - c_k)

    All clients are weighted equally, as in the paper: since c is an unweighted mean, the method
    minimises the unweighted mean of the clients' losses under any weights.

    Args:
        option: a client's new control variate: 1, its full gradient at the received model; 2, the
          mean gradient along its steps (see :class:`fedjax_sim.corrections.scaffold`).
        server_lr: η_g: server learning rate.

    Returns:
        The algorithm. Traffic per round: m models and m control variates down, as many up: twice as
        much as FedAvg.

    Source: Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: stochastic controlled
    averaging for federated learning", ICML 2020 <https://arxiv.org/abs/1910.06378>, Algorithm 1.
    """
    return compose(
        local.change(corrections=(corrections.scaffold(option),)),
        clients_per_round,
        weighting=weighting.equal,
        server=server_sgd(server_lr),
    )


@method
def scaffnew(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    lr: float,
    momentum: float,
    coin: Fraction = 0.2,
) -> Algorithm:
    r"""Scaffnew (ProxSkip): averages after a local step only with probability p, by a shared coin.

    .. math:: \hat x_{k,t+1} = x_{k,t} - \gamma\,(\nabla F_b(x_{k,t}) - h_{k,t}), \qquad
              x_{k,t+1} = \begin{cases} \frac1N \sum_j \hat x_{j,t+1} & \text{with probability } p
              \\ \hat x_{k,t+1} & \text{otherwise} \end{cases}, \qquad
              h_{k,t+1} = h_{k,t} + \frac p\gamma\,(x_{k,t+1} - \hat x_{k,t+1})

    A round consists of the steps between two averages, T steps at all clients, with :math:`P(T = t)
    = p (1 - p)^{t-1}`; only averaging changes h_k. All N clients participate with equal weights.
    With p = 1 it is parallel SGD. With full gradients, strongly convex losses of condition number κ
    and :math:`p = 1/\sqrt\kappa`, reaching a given precision takes on the order of
    :math:`\sqrt\kappa` rounds, where gradient descent takes κ.

    Args:
        local: the local update, by SGD; its epochs and optimizer_state are overridden, so its
          momentum restarts in every round.
        clients_per_round: N: all clients participate.
        lr: γ: learning rate of the clients' SGD, as set in the local update.
        momentum: momentum of the clients' SGD, as set in the local update; 0 in the paper, see
          :class:`fedjax_sim.corrections.scaffnew`.
        coin: p: probability of averaging after a step; a round has 1/p steps on average.

    Returns:
        The algorithm. Memory: two models per client. Traffic per round: N models down, N up.

    Source: Mishchenko, Malinovsky, Stich, Richtárik, "ProxSkip: yes! Local gradient steps provably
    lead to communication acceleration! Finally!", ICML 2022 <https://arxiv.org/abs/2202.09357>,
    Algorithm 2.

    Example:
        >>> algorithm = fs.algorithms.scaffnew(
        ...     local, clients_per_round=problem.data.clients, lr=0.1, momentum=0.0
        ... )
        >>> problem.accuracy(algorithm, rounds=5) > 0.8
        True
    """
    return compose(
        local.change(
            corrections=(corrections.scaffnew(coin, lr, momentum),),
            steps=geometric(coin),
            optimizer_state="reset",
        ),
        clients_per_round,
        selection=selection.everyone(),
        weighting=weighting.equal,
    )


@method
def fednova(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    lr: float,
    momentum: float,
    mu: float = 0.0,
) -> Algorithm:
    r"""FedNova: FedAvg with each client's update normalised by its accumulated local steps.

    .. math:: w_{t+1} = w_t - \tau_{eff} \sum_{k \in U_t} p_k \frac{w_t - w_k}{a_k}, \qquad
              \tau_{eff} = \sum_{k \in U_t} p_k a_k, \quad p_k = \frac{n_k}{\sum_j n_j}

    where a_k after T_k local steps is defined in :class:`fedjax_sim.preaggregation.normalise`: T_k
    for plain SGD. It is known for momentum or for a proximal term, but not for both together. With
    a proximal term the authors' code computes τ_eff from T_k instead of a_k.

    Args:
        local: the local update, by SGD; its optimizer_state is overridden, so its momentum restarts
          in every round, as a_k assumes.

    Returns:
        The algorithm. Traffic per round: m models down, m up, and T_k with each.

    Source: Wang, Liu, Liang, Joshi, Poor, "Tackling the objective inconsistency problem in
    heterogeneous federated optimization", NeurIPS 2020 <https://arxiv.org/abs/2007.07481>, sections
    3 and 4.
    """
    return compose(
        local.change(
            optimizer_state="reset", corrections=(corrections.proximal(mu),) if mu else ()
        ),
        clients_per_round,
        preaggregation=(preaggregation.normalise(lr, momentum, mu),),
    )


@method
@plain_sgd
def feddyn(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    alpha: float = 0.1,
) -> Algorithm:
    r"""FedDyn: dynamic regularisation aligns the clients' optima with the server's.

    .. math:: \min_w F_k(w) - \langle h_k, w \rangle + \frac{\alpha}{2} \lVert w - w_t \rVert^2,
              \qquad h_k \leftarrow h_k - \alpha (w_k - w_t)

    .. math:: h \leftarrow h - \frac{\alpha}{N} \sum_{k \in U} (w_k - w_t), \qquad
              w_{t+1} = \frac1m \sum_{k \in U} w_k - \frac{h}{\alpha}

    All clients are weighted equally. The authors' code scores the mean of the round's models, not
    w, and divides a client's α by its share of the samples, N n_k / n.

    Args:
        alpha: α: strength of the regularisation; the authors use 0.1, 0.01 or 0.001.

    Returns:
        The algorithm. Memory: h_k at every client, as large as the model. Traffic per round: m
        models down, m up.

    Source: Acar, Zhao, Navarro, Mattina, Whatmough, Saligrama, "Federated learning based on dynamic
    regularization", ICLR 2021 <https://arxiv.org/abs/2111.04263>, Algorithm 1.
    """
    return compose(
        local.change(corrections=(corrections.dynamic(alpha),)),
        clients_per_round,
        weighting=weighting.equal,
        server=server.dynamic(alpha),
    )


@method
@plain_sgd
def fedadmm(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    rho: Positive = 0.01,
    server_lr: Positive | None = None,
) -> Algorithm:
    r"""FedADMM: clients take primal and dual ADMM steps; the server adds the changes of both.

    .. math:: w_k^+ \approx \arg\min_w F_k(w) + \langle y_k, w - w_t \rangle + \frac{\rho}{2}
              \lVert w - w_t \rVert^2, \qquad y_k^+ = y_k + \rho\,(w_k^+ - w_t)

    .. math:: w_{t+1} = w_t + \frac{\eta_g}{m} \sum_{k \in U} \Bigl( w_k^+ - w_k + \frac1\rho
              (y_k^+ - y_k) \Bigr)

    All clients are weighted equally. With full participation and :math:`\eta_g = 1` it is FedDyn. A
    client's steps start from w_t, as in the authors' code; in that code, w_k is w_t as well, so
    clients send :math:`2 (w_k^+ - w_t)`. The paper analyses :math:`\eta_g = m / N`, for which w_t
    is the mean of :math:`w_k + y_k / \rho` over all clients; its code uses a constant. With few
    clients per round, 1 may diverge.

    Args:
        rho: ρ: weight of the proximal term.
        server_lr: η_g: server learning rate; None: m / N.

    Returns:
        The algorithm. Memory: w_k and y_k at every client, each as large as the model. Traffic per
        round: m models down, m up.

    Source: Gong, Li, Freris, "FedADMM: a robust federated deep learning framework with adaptivity
    to system heterogeneity", ICDE 2022 <https://arxiv.org/abs/2204.03529>, Algorithm 1.
    """
    moves = server.participation() if server_lr is None else server_sgd(server_lr)
    return compose(
        turns.fedadmm(local.change(corrections=(corrections.dynamic(rho),))),
        clients_per_round,
        weighting=weighting.equal,
        server=moves,
    )
