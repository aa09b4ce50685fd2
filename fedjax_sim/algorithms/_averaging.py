"""Federated averaging and its server optimisers."""

from __future__ import annotations

from typing import Literal

import optax

from fedjax_sim import server
from fedjax_sim.algorithms._method import client_weights, method, server_sgd
from fedjax_sim.base import Decay, LocalUpdate, NonNegative, Positive
from fedjax_sim.engine import optimizers
from fedjax_sim.round import Algorithm, compose

__all__ = ["fedadagrad", "fedadam", "fedavg", "fedavgm", "fedyogi", "mfl", "parallel_sgd"]


@method
def fedavg(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    equal_weights: bool = False,
) -> Algorithm:
    r"""FedAvg: in each round, a random cohort trains the server model; the average replaces it.

    .. math:: w_{t+1} = \sum_{k \in U_t} \frac{n_k}{\sum_{j \in U_t} n_j} w_k

    Source: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of
    deep networks from decentralized data", AISTATS 2017 <https://arxiv.org/abs/1602.05629>,
    Algorithm 1.
    """
    return compose(local, clients_per_round, weighting=client_weights(equal_weights))


@method
def parallel_sgd(local: LocalUpdate, *, clients_per_round: int) -> Algorithm:
    r"""Parallel SGD: FedAvg with a single local step per client.

    .. math:: w_{t+1} = w_t - \eta \sum_{k \in U_t} \frac{n_k}{\sum_{j \in U_t} n_j}
              \nabla F_b^{(k)}(w_t)

    where b is one minibatch of each client.

    Args:
        local: the local update; only its first step is taken.

    Returns:
        The algorithm. Traffic per round: m models down, m up (as many bytes as gradients).

    Source: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of
    deep networks from decentralized data", AISTATS 2017 <https://arxiv.org/abs/1602.05629> (FedSGD,
    whose minibatch is the client's whole data set); Vo, Rakotobe, "How to deal with non-IID data in
    federated learning", 2020 <vo2020how>, Table 3 (all N clients, E = 1).

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.5))
        >>> algorithm = fs.algorithms.parallel_sgd(local, clients_per_round=10)
        >>> problem.accuracy(algorithm, rounds=10) > 0.7
        True
    """
    return compose(local.change(max_steps=1), clients_per_round)


@method
def mfl(local: LocalUpdate, *, clients_per_round: int) -> Algorithm:
    r"""MFL: averages the clients' momenta as well as their models.

    .. math:: d_k \leftarrow \rho\, d_k + \nabla F_b(w_k), \quad w_k \leftarrow w_k - \eta\, d_k,
              \qquad (w, d)_{t+1} = \sum_{k \in U_t} \frac{n_k}{\sum_{j \in U_t} n_j} (w_k, d_k)

    Args:
        local: the local update; its optimiser has momentum (or other state, which is averaged in
          the same way).

    Returns:
        The algorithm; without momentum it is FedAvg, bit for bit. Traffic per round: m models and m
        momenta down, as many up: twice as much as FedAvg.

    Source: Liu, Chen, Chen, Zhang, "Accelerating federated learning via momentum gradient descent",
    IEEE TPDS 2020 <https://arxiv.org/abs/1910.03197>, Algorithm 1.
    """
    return compose(local.change(optimizer_state="average"), clients_per_round)


@method
def fedavgm(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    server_lr: Positive = 1.0,
    server_momentum: Decay = 0.9,
) -> Algorithm:
    r"""FedAvgM: FedAvg with server momentum.

    .. math:: v \leftarrow \beta v + \sum_{k \in U_t} \frac{n_k}{\sum_j n_j} (w_k - w), \qquad
              w \leftarrow w + \eta v

    Returns:
        The algorithm; without momentum and with ``server_lr=1`` it is FedAvg. Traffic per round: m
        models down, m up.

    Source: Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated
    visual classification", 2019 <https://arxiv.org/abs/1909.06335>; Ozdayi, Kantarcioglu, Iyer,
    "Improving accuracy of federated learning in non-IID settings", 2020
    <https://arxiv.org/abs/2010.15582>, eq. 2 and 3.

    Note:
        Ozdayi et al. print :math:`w \leftarrow v + \eta w`, a misprint.
    """
    return compose(local, clients_per_round, server=server_sgd(server_lr, server_momentum))


Variant = Literal["reddi", "optax"]


@method
def fedadagrad(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    server_lr: Positive = 0.1,
    beta1: Decay = 0.0,
    tau: Positive = 1e-3,
    v0: NonNegative | None = None,
    variant: Variant = "reddi",
) -> Algorithm:
    r"""FedAdagrad: FedAvg with Adagrad as the server optimiser.

    .. math:: \Delta = \sum_k p_k (w_k - w), \quad
              m \leftarrow \beta_1 m + (1 - \beta_1)\,\Delta, \quad
              v \leftarrow v + \Delta^2, \quad
              w \leftarrow w + \eta\,\frac{m}{\sqrt v + \tau}

    Source: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated
    optimization", ICLR 2021 <https://arxiv.org/abs/2003.00295>, Algorithm 2; DeepMind 2020
    <https://github.com/google-deepmind>, optax (variant).

    Note:
        The paper sets β1 = 0 for Adagrad. The variant "optax" is ``optax.adagrad``, which has no
        first moment (β1 must be 0) and adds τ inside the root.
    """
    if variant == "optax" and beta1:
        raise ValueError(f"beta1 must be 0 with variant 'optax', got {beta1}")
    if _is_optax(variant, v0):
        rule = optax.adagrad(server_lr, eps=tau)
    else:
        rule = optimizers.adagrad(server_lr, beta1=beta1, tau=tau, v0=v0)
    return compose(local, clients_per_round, server=server.optimizer(rule))


@method
def fedadam(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    server_lr: Positive = 0.03,
    beta1: Decay = 0.9,
    beta2: Decay = 0.99,
    tau: Positive = 1e-3,
    v0: NonNegative | None = None,
    variant: Variant = "reddi",
) -> Algorithm:
    r"""FedAdam: FedAvg with Adam as the server optimiser, without bias correction.

    .. math:: \Delta = \sum_k p_k (w_k - w), \quad
              m \leftarrow \beta_1 m + (1 - \beta_1)\,\Delta, \quad
              v \leftarrow \beta_2 v + (1 - \beta_2)\,\Delta^2, \quad
              w \leftarrow w + \eta\,\frac{m}{\sqrt v + \tau}

    Source: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated
    optimization", ICLR 2021 <https://arxiv.org/abs/2003.00295>, Algorithm 2; DeepMind 2020
    <https://github.com/google-deepmind>, optax (variant).

    Note:
        The variant "optax" is ``optax.adam``, as in FedJAX; it corrects the bias of both moments.
    """
    if _is_optax(variant, v0):
        rule = optax.adam(server_lr, beta1, beta2, tau)
    else:
        rule = optimizers.adam(server_lr, beta1=beta1, beta2=beta2, tau=tau, v0=v0)
    return compose(local, clients_per_round, server=server.optimizer(rule))


@method
def fedyogi(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    server_lr: Positive = 0.03,
    beta1: Decay = 0.9,
    beta2: Decay = 0.99,
    tau: Positive = 1e-3,
    v0: NonNegative | None = None,
    variant: Variant = "reddi",
) -> Algorithm:
    r"""FedYogi: FedAvg with Yogi as the server optimiser, without bias correction.

    .. math:: \Delta = \sum_k p_k (w_k - w), \quad
              m \leftarrow \beta_1 m + (1 - \beta_1)\,\Delta, \quad
              v \leftarrow v - (1 - \beta_2)\,\Delta^2 \operatorname{sign}(v - \Delta^2), \quad
              w \leftarrow w + \eta\,\frac{m}{\sqrt v + \tau}

    Source: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated
    optimization", ICLR 2021 <https://arxiv.org/abs/2003.00295>, Algorithm 2; DeepMind 2020
    <https://github.com/google-deepmind>, optax (variant).

    Note:
        The variant "optax" is ``optax.yogi``; it corrects the bias of both moments.
    """
    if _is_optax(variant, v0):
        rule = optax.yogi(server_lr, beta1, beta2, tau)
    else:
        rule = optimizers.yogi(server_lr, beta1=beta1, beta2=beta2, tau=tau, v0=v0)
    return compose(local, clients_per_round, server=server.optimizer(rule))


def _is_optax(variant: Variant, v0: float | None) -> bool:
    """Checks the settings of an adaptive server optimiser; returns whether it is optax's own."""
    if variant == "optax" and v0 is not None:
        raise ValueError(f"v0 must be None with variant 'optax', got {v0}")
    return variant == "optax"
