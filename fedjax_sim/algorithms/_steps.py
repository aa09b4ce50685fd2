"""Methods that change local or server steps: sharpness, extrapolation, momentum, DiLoCo."""

from __future__ import annotations

from fedjax_sim import server
from fedjax_sim.algorithms._averaging import fedavg
from fedjax_sim.algorithms._method import client_weights, method, server_sgd
from fedjax_sim.base import Decay, LocalUpdate, Objective, Positive, plain_sgd
from fedjax_sim.client import corrections, terms
from fedjax_sim.models import leaves
from fedjax_sim.plan import exchange, flight, selection
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting

__all__ = [
    "diloco",
    "fedcm",
    "fedexp",
    "fedlesam",
    "fedsam",
    "mime",
    "mimelite",
    "streaming_diloco",
]


@method
@plain_sgd
def fedsam(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    rho: float = 0.05,
    equal_weights: bool = False,
) -> Algorithm:
    r"""FedSAM: clients use sharpness-aware minimisation, which favours flat minima.

    .. math:: w_k \leftarrow w_k - \eta\, \nabla F_b\Bigl(w_k + \rho\,
              \frac{\nabla F_b(w_k)}{\lVert \nabla F_b(w_k) \rVert}\Bigr)

    Returns:
        The algorithm, which reports the losses at the perturbed weights. Traffic per round: m
        models down, m up.

    Source: Qu, Li, Duan, Liu, Tang, Lu, "Generalized federated learning via sharpness aware
    minimization", ICML 2022 <https://arxiv.org/abs/2206.02618>, Algorithm 1.
    """
    changed = local.change(objective=terms.sharpness_aware(objective, rho))
    return fedavg(changed, clients_per_round=clients_per_round, equal_weights=equal_weights)


@method
@plain_sgd
def fedlesam(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    objective: Objective,
    rho: float = 0.1,
    equal_weights: bool = True,
) -> Algorithm:
    r"""FedLESAM: FedSAM with perturbations along the server's past steps, at no extra cost.

    .. math:: w_k \leftarrow w_k - \eta\, \nabla F_b\Bigl(w_k + \rho\,
              \frac{w_{last} - w_t}{\lVert w_{last} - w_t \rVert}\Bigr)

    where w_last is the model that the client received in its previous round, the initial model
    before the first. In the authors' code, the server instead sends its last step to all clients.
    Clients are weighted equally by default, as in the authors' code.

    Returns:
        The algorithm, which reports the losses at the perturbed weights. Memory: one model per
        client. Traffic per round: m models down, m up.

    Source: Fan, Hu, Yao, Niu, Zhang, Sugiyama, Wang, "Locally estimated global perturbations are
    better than local perturbations for federated sharpness-aware minimization", ICML 2024
    <https://arxiv.org/abs/2405.18890>, Algorithm 1.
    """
    changed = local.change(
        objective=terms.estimated_sharpness(objective, rho), memory=terms.last_received()
    )
    return fedavg(changed, clients_per_round=clients_per_round, equal_weights=equal_weights)


@method
def fedexp(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    eps: float = 1e-3,
    equal_weights: bool = True,
) -> Algorithm:
    r"""FedExP: extrapolates the server step, further if the clients' updates differ more.

    .. math:: \eta_g = \max\left(1, \frac{\sum_k p_k \lVert \Delta_k \rVert^2}
              {2\,(\lVert \bar\Delta \rVert^2 + \varepsilon)}\right), \qquad
              w \leftarrow w + \eta_g \bar\Delta

    Clients are weighted equally by default, as in the paper; the authors' code weights them by
    their samples. The authors score the mean of the last two models, here the last one is scored.

    Args:
        eps: ε: constant in the denominator.

    Source: Jhunjhunwala, Wang, Joshi, "FedExP: speeding up federated averaging via extrapolation",
    ICLR 2023 <https://arxiv.org/abs/2301.09604>, Algorithm 1.
    """
    return compose(
        local,
        clients_per_round,
        weighting=client_weights(equal_weights),
        server=server.extrapolated(eps),
    )


@method
@plain_sgd
def fedcm(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    lr: float,
    momentum: float,
    alpha: float = 0.1,
    server_lr: Positive = 1.0,
    equal_weights: bool = True,
) -> Algorithm:
    r"""FedCM: client-level momentum; local steps follow the previous cohort's mean update.

    .. math:: w_k \leftarrow w_k - \eta \bigl(\alpha \nabla F_b(w_k) + (1 - \alpha) \Delta_t\bigr),
              \qquad \Delta_{t+1} = -\frac{1}{\eta K} \sum_k p_k (w_k - w_t), \qquad
              w_{t+1} = w_t + \eta_g \sum_k p_k (w_k - w_t)

    K is the cohort's mean number of local steps T_k, which all equal K in the paper; see
    :class:`fedjax_sim.corrections.client_momentum`. The paper's server learning rate is K η η_g.
    Clients are weighted equally by default, as in the paper.

    Args:
        local: the local update, by SGD; its optimizer_state is overridden, so its momentum restarts
          in every round.
        momentum: momentum of the clients' SGD, as set in the local update; 0 in the paper.
        alpha: α: weight of the client's own gradient; 1 is FedAvg.
        server_lr: η_g: server learning rate.

    Returns:
        The algorithm. Traffic per round: m models and m momenta down, m models up.

    Source: Xu, Wang, Wang, Yao, "FedCM: federated learning with client-level momentum", 2021
    <https://arxiv.org/abs/2106.10874>, Algorithm 1.
    """
    term = corrections.client_momentum(alpha, lr, momentum)
    return compose(
        local.change(corrections=(term,), optimizer_state="reset"),
        clients_per_round,
        weighting=client_weights(equal_weights),
        server=server_sgd(server_lr),
    )


@method
@plain_sgd
def mime(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    beta: float = 0.9,
    equal_weights: bool = False,
) -> Algorithm:
    r"""Mime: MimeLite with SVRG-style gradient corrections towards the cohort's mean gradient.

    .. math:: w_k \leftarrow w_k - \eta \Bigl(\beta m + (1 - \beta) \bigl(\nabla F_b(w_k)
              - \nabla F_b(w_t) + c\bigr)\Bigr), \qquad
              c = \sum_k p_k \nabla F_k(w_t), \qquad m \leftarrow \beta m + (1 - \beta)\, c

    A round has two exchanges: the clients of the cohort send their full gradients at w_t, all
    receive the mean c, and then they train. The paper weights clients equally.

    Args:
        local: the local update; its own optimiser should be plain SGD.
        beta: β: momentum; 0 is SVRG at every client, around the cohort's gradient.

    Returns:
        The algorithm. Traffic per round: m models, m momenta and m gradients down, m gradients and
        m models up.

    Source: Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh, "Breaking the centralized barrier
    for cross-device federated learning", NeurIPS 2021 <https://arxiv.org/abs/2008.03606>, Algorithm
    1.
    """
    changed = local.change(corrections=(corrections.mime(beta),))
    return fedavg(changed, clients_per_round=clients_per_round, equal_weights=equal_weights)


@method
@plain_sgd
def mimelite(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    beta: float = 0.9,
    equal_weights: bool = False,
) -> Algorithm:
    r"""MimeLite: all local steps use one momentum, which only the server updates.

    .. math:: w_k \leftarrow w_k - \eta \bigl(\beta m + (1 - \beta) \nabla F_b(w_k)\bigr), \qquad
              m \leftarrow \beta m + (1 - \beta) \sum_k p_k \nabla F_k(w_t)

    with the same weights :math:`p_k` for the momentum as for the models. The paper weights clients
    equally.

    Args:
        local: the local update; its own optimiser should be plain SGD.
        beta: β: momentum; 0 is FedAvg.

    Returns:
        The algorithm. Traffic per round: m models and m momenta down, m models and m gradients up.

    Source: Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh, "Breaking the centralized barrier
    for cross-device federated learning", NeurIPS 2021 <https://arxiv.org/abs/2008.03606>, Algorithm
    1.
    """
    changed = local.change(corrections=(corrections.global_momentum(beta),))
    return fedavg(changed, clients_per_round=clients_per_round, equal_weights=equal_weights)


MOST_FRAGMENTS = 1000
"""Limit on fragments, as each is a part of its own; no model has so many layers."""


@method
def diloco(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    server_lr: Positive = 0.7,
    server_momentum: Decay = 0.9,
) -> Algorithm:
    r"""DiLoCo: clients keep their optimiser state; the server applies Nesterov momentum.

    .. math:: v \leftarrow \beta v + \bar\Delta, \qquad w \leftarrow w + \eta_g
              (\beta v + \bar\Delta), \qquad \bar\Delta = \frac1m \sum_{k \in U} (w_k - w)

    Local SGD as used to train language models: the inner optimiser is the local update's (AdamW in
    the paper) and continues with the state of the client's previous round.

    Args:
        local: the local update; the paper takes 500 steps of AdamW per round (``max_steps``).
        server_lr: η_g: server learning rate.

    Returns:
        The algorithm. Memory: one optimiser state per client. Traffic per round: m models down, m
        up.

    Source: Douillard, Feng, Rusu, Chhaparia, Donchev, Kuncoro, Ranzato, Szlam, Shen, "DiLoCo:
    distributed low-communication training of language models", 2023
    <https://arxiv.org/abs/2311.08105>, Algorithm 1.
    """
    return compose(
        local.change(optimizer_state="keep"),
        clients_per_round,
        weighting=weighting.equal,
        server=server_sgd(server_lr, server_momentum, nesterov=True),
    )


@method
def streaming_diloco(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    fragments: int = 2,
    server_lr: Positive = 0.7,
    server_momentum: Decay = 0.9,
) -> Algorithm:
    r"""Streaming DiLoCo: synchronises one fragment of the model per round, in turn.

    .. math:: p = t \bmod P, \qquad v^p \leftarrow \beta v^p + \bar\Delta^p, \qquad
              w^p \leftarrow w^p + \eta_g (\beta v^p + \bar\Delta^p), \qquad
              w_k^p \leftarrow w^p

    where :math:`\bar\Delta^p = \frac1m \sum_{k \in U} (w_k^p - w^p)` is the clients' change of
    fragment p since its last synchronisation, P rounds ago. Layers p, p + P, p + 2P, ... form
    fragment p: layers are staggered here as phase shift staggers groups of clients. Clients
    continue with the other fragments and with their optimiser state. The m clients sampled in the
    first round are the workers of the whole run; another flight lets others join.

    A round lasts from one synchronisation to the next, H / P steps in the paper. The paper also
    overlaps communication with τ local steps, after which a worker mixes the new fragment with its
    own (α), and sends 4-bit numbers; here, communication is exact and takes no time.

    Args:
        local: the local update, with H / P steps (``max_steps``); AdamW in the paper.
        clients_per_round: m: workers.
        fragments: P: fragments, at most the number of layers. 1 is DiLoCo with permanent clients.
        server_lr: η_g: server learning rate.

    Returns:
        The algorithm. Memory: m models, and one optimiser state per client. Traffic per round: a
        P-th of m models down, as much up; in the first round m models down.

    Source: Douillard, Donchev, Rush, Kale, Charles, Garrett, Teston, Lacey, McIlroy, Shen, Ramé,
    Szlam, Ranzato, Barham, "Streaming DiLoCo with overlapping communication: towards a distributed
    free lunch", 2025 <https://arxiv.org/abs/2501.18512>, Algorithm 2.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.05, momentum=0.9))
        >>> algorithm = fs.algorithms.streaming_diloco(local, clients_per_round=5, fragments=1)
        >>> problem.accuracy(algorithm, rounds=5) > 0.8
        True
    """
    if not 1 <= fragments <= MOST_FRAGMENTS:
        raise ValueError(f"fragments must be in 1..{MOST_FRAGMENTS}, got {fragments}")
    return compose(
        local.change(optimizer_state="keep"),
        clients_per_round,
        selection=selection.uniform(sticky=True),
        flight=flight.permanent(),
        exchange=exchange.fragments(*(leaves.strided(p, fragments) for p in range(fragments))),
        weighting=weighting.equal,
        server=server_sgd(server_lr, server_momentum, nesterov=True),
    )
