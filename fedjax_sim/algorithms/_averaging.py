"""Federated averaging and its server optimisers."""

from __future__ import annotations

from typing import Literal

import optax

from fedjax_sim import server
from fedjax_sim.algorithms._method import method
from fedjax_sim.base import LocalUpdate, concrete
from fedjax_sim.engine import optimizers
from fedjax_sim.round import Algorithm, compose
from fedjax_sim.server import weighting


@method
def fedavg(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    equal_weights: bool = False,
) -> Algorithm:
    r"""FedAvg: every round a uniform cohort trains the server model; the mean replaces it.

    .. math:: w_{t+1} = \sum_{k \in U_t} \frac{n_k}{\sum_{j \in U_t} n_j} w_k

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Source: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of
    deep networks from decentralized data", AISTATS 2017 <https://arxiv.org/abs/1602.05629>,
    Algorithm 1.
    """
    return compose(
        local,
        clients_per_round,
        weighting=weighting.equal if equal_weights else weighting.by_samples,
    )


@method
def parallel_sgd(local: LocalUpdate, *, clients_per_round: int) -> Algorithm:
    r"""Parallel SGD: every client takes one step, then the models are averaged.

    .. math:: w_{t+1} = w_t - \eta \sum_{k \in U_t} \frac{n_k}{\sum_{j \in U_t} n_j}
              \nabla F_b^{(k)}(w_t)

    with one minibatch b of each client.

    Args:
        local: the local update, of which only the first step is taken.

    Returns:
        The algorithm. Traffic per round: m models down, m up (as many bytes as gradients).

    Source: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-efficient learning of
    deep networks from decentralized data", AISTATS 2017 <https://arxiv.org/abs/1602.05629>
    (FedSGD, whose minibatch is all that the client has); Vo, Rakotobe, "How to deal with non-IID
    data in federated learning", 2020 <vo2020how>, Table 3 (all N clients, E = 1).

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.5))
        >>> algorithm = fs.algorithms.parallel_sgd(local, clients_per_round=10)
        >>> problem.accuracy(algorithm, rounds=10) > 0.7
        True
    """
    return compose(
        local.change(max_steps=1),
        clients_per_round,
    )


@method
def mfl(local: LocalUpdate, *, clients_per_round: int) -> Algorithm:
    r"""MFL: the clients' momenta are averaged and sent on, like their models.

    .. math:: d_k \leftarrow \rho\, d_k + \nabla F_b(w_k), \quad w_k \leftarrow w_k - \eta\, d_k,
              \qquad (w, d)_{t+1} = \sum_{k \in U_t} \frac{n_k}{\sum_{j \in U_t} n_j} (w_k, d_k)

    Args:
        local: the local update; its optimiser has momentum (or another state, which is averaged in
          the same way).

    Returns:
        The algorithm; without momentum it is FedAvg, bit for bit. Traffic per round: m models and m
        momenta down, as many up: twice FedAvg's.

    Source: Liu, Chen, Chen, Zhang, "Accelerating federated learning via momentum gradient descent",
    IEEE TPDS 2020 <https://arxiv.org/abs/1910.03197>, Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.05, momentum=0.9))
        >>> algorithm = fs.algorithms.mfl(local, clients_per_round=5)
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    return compose(
        local.change(optimizer_state="average"),
        clients_per_round,
    )


@method
def fedavgm(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    server_lr: float = 1.0,
    server_momentum: float = 0.9,
) -> Algorithm:
    r"""FedAvgM: FedAvg with momentum on the server.

    .. math:: v \leftarrow \beta v + \sum_{k \in U_t} \frac{n_k}{\sum_j n_j} (w_k - w), \qquad
              w \leftarrow w + \eta v

    Args:
        server_lr: η, the server's learning rate.
        server_momentum: β, the server's momentum; 0 is none.

    Returns:
        The algorithm; without momentum and with a server_lr of 1 it is FedAvg. Traffic per round: m
        models down, m up.

    Raises:
        ValueError: if server_lr is not positive or server_momentum not in [0, 1).

    Source: Hsu, Qi, Brown, "Measuring the effects of non-identical data distribution for federated
    visual classification", 2019 <https://arxiv.org/abs/1909.06335>; Ozdayi, Kantarcioglu, Iyer,
    "Improving accuracy of federated learning in non-IID settings", 2020
    <https://arxiv.org/abs/2010.15582>, eq. 2 and 3.

    Note:
        Ozdayi et al. print :math:`w \leftarrow v + \eta w`, a misprint. Momentum is plain, not
        Nesterov's as in Flower's baseline.
    """
    if concrete(server_lr) and not server_lr > 0:
        raise ValueError(f"server_lr must be positive, got {server_lr}")
    if concrete(server_momentum) and not 0 <= server_momentum < 1:
        raise ValueError(f"server_momentum must be in [0, 1), got {server_momentum}")
    return compose(
        local,
        clients_per_round,
        server=server.optimizer(optax.sgd(server_lr, momentum=server_momentum)),
    )


Variant = Literal["reddi", "optax"]


@method
def fedadagrad(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    server_lr: float = 0.1,
    beta1: float = 0.0,
    tau: float = 1e-3,
    v0: float | None = None,
    variant: Variant = "reddi",
) -> Algorithm:
    r"""FedAdagrad: FedAvg with Adagrad on the server.

    .. math:: \Delta = \sum_k p_k (w_k - w), \quad
              m \leftarrow \beta_1 m + (1 - \beta_1)\,\Delta, \quad
              v \leftarrow v + \Delta^2, \quad
              w \leftarrow w + \eta\,\frac{m}{\sqrt v + \tau}

    Args:
        server_lr: η, the server's learning rate.
        beta1: β1, the decay of the first moment of the server's optimiser.
        tau: τ, added to the root of the second moment of the server's optimiser.
        v0: the second moment of the server's optimiser at the start; None: τ².
        variant: "reddi" for the paper's rule (Reddi et al.), "optax" for optax's own, which takes
          no v0.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range, or the variant does not have it.

    Source: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated
    optimization", ICLR 2021 <https://arxiv.org/abs/2003.00295>, Algorithm 2; DeepMind 2020
    <https://github.com/google-deepmind>, optax (variant).

    Note:
        In the paper β1 is 0 for Adagrad. The variant "optax" is ``optax.adagrad``: it has no first
        moment, so that β1 must be 0, and adds τ inside the root.
    """
    if variant == "optax" and beta1:
        raise ValueError(f"beta1 must be 0 with variant 'optax', got {beta1}")
    rule = (
        optax.adagrad(server_lr, eps=tau)
        if _of_optax(variant, server_lr, v0)
        else optimizers.adagrad(server_lr, beta1=beta1, tau=tau, v0=v0)
    )
    return compose(
        local,
        clients_per_round,
        server=server.optimizer(rule),
    )


@method
def fedadam(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    server_lr: float = 0.03,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    v0: float | None = None,
    variant: Variant = "reddi",
) -> Algorithm:
    r"""FedAdam: FedAvg with Adam on the server, without bias correction.

    .. math:: \Delta = \sum_k p_k (w_k - w), \quad
              m \leftarrow \beta_1 m + (1 - \beta_1)\,\Delta, \quad
              v \leftarrow \beta_2 v + (1 - \beta_2)\,\Delta^2, \quad
              w \leftarrow w + \eta\,\frac{m}{\sqrt v + \tau}

    Args:
        server_lr: η, the server's learning rate.
        beta1: β1, the decay of the first moment of the server's optimiser.
        beta2: β2, the decay of the second moment of the server's optimiser.
        tau: τ, added to the root of the second moment of the server's optimiser.
        v0: the second moment of the server's optimiser at the start; None: τ².
        variant: "reddi" for the paper's rule (Reddi et al.), "optax" for optax's own, which takes
          no v0.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range, or the variant does not have it.

    Source: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated
    optimization", ICLR 2021 <https://arxiv.org/abs/2003.00295>, Algorithm 2; DeepMind 2020
    <https://github.com/google-deepmind>, optax (variant).

    Note:
        The variant "optax" is ``optax.adam``, as in FedJAX: it corrects the bias of both moments.
    """
    rule = (
        optax.adam(server_lr, beta1, beta2, tau)
        if _of_optax(variant, server_lr, v0)
        else optimizers.adam(server_lr, beta1=beta1, beta2=beta2, tau=tau, v0=v0)
    )
    return compose(
        local,
        clients_per_round,
        server=server.optimizer(rule),
    )


@method
def fedyogi(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    server_lr: float = 0.03,
    beta1: float = 0.9,
    beta2: float = 0.99,
    tau: float = 1e-3,
    v0: float | None = None,
    variant: Variant = "reddi",
) -> Algorithm:
    r"""FedYogi: FedAvg with Yogi on the server, without bias correction.

    .. math:: \Delta = \sum_k p_k (w_k - w), \quad
              m \leftarrow \beta_1 m + (1 - \beta_1)\,\Delta, \quad
              v \leftarrow v - (1 - \beta_2)\,\Delta^2 \operatorname{sign}(v - \Delta^2), \quad
              w \leftarrow w + \eta\,\frac{m}{\sqrt v + \tau}

    Args:
        server_lr: η, the server's learning rate.
        beta1: β1, the decay of the first moment of the server's optimiser.
        beta2: β2, the decay of the second moment of the server's optimiser.
        tau: τ, added to the root of the second moment of the server's optimiser.
        v0: the second moment of the server's optimiser at the start; None: τ².
        variant: "reddi" for the paper's rule (Reddi et al.), "optax" for optax's own, which takes
          no v0.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range, or the variant does not have it.

    Source: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated
    optimization", ICLR 2021 <https://arxiv.org/abs/2003.00295>, Algorithm 2; DeepMind 2020
    <https://github.com/google-deepmind>, optax (variant).

    Note:
        The variant "optax" is ``optax.yogi``: it corrects the bias of both moments.
    """
    rule = (
        optax.yogi(server_lr, beta1, beta2, tau)
        if _of_optax(variant, server_lr, v0)
        else optimizers.yogi(server_lr, beta1=beta1, beta2=beta2, tau=tau, v0=v0)
    )
    return compose(
        local,
        clients_per_round,
        server=server.optimizer(rule),
    )


def _of_optax(variant: Variant, server_lr: float, v0: float | None) -> bool:
    if variant not in ("reddi", "optax"):
        raise ValueError(f"variant must be 'reddi' or 'optax', got {variant!r}")
    if concrete(server_lr) and not server_lr > 0:
        raise ValueError(f"server_lr must be positive, got {server_lr}")
    if variant == "optax" and v0 is not None:
        raise ValueError(f"v0 must be left out with variant 'optax', got {v0}")
    return variant == "optax"
