"""FedAdagrad, FedAdam and FedYogi: adaptive optimisers on the server."""

from __future__ import annotations

from typing import Literal

import optax

from fedjax_sim import server
from fedjax_sim.base import LocalUpdate, concrete, part
from fedjax_sim.engine import optimizers
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan import schedule, selection
from fedjax_sim.round import Algorithm, compose

Variant = Literal["reddi", "optax"]


@part
def fedadagrad(
    local: LocalUpdate,
    *,
    clients_per_round: int,
    server_lr: float = 0.1,
    beta1: float = 0.0,
    tau: float = 1e-3,
    v0: float | None = None,
    variant: Variant = "reddi",
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedAdagrad: FedAvg with Adagrad on the server.

    .. math:: \Delta = \sum_k p_k (w_k - w), \quad
              m \leftarrow \beta_1 m + (1 - \beta_1)\,\Delta, \quad
              v \leftarrow v + \Delta^2, \quad
              w \leftarrow w + \eta\,\frac{m}{\sqrt v + \tau}

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        server_lr: η, the server's learning rate.
        beta1: β1, the decay of the first moment of the server's optimiser.
        tau: τ, added to the root of the second moment of the server's optimiser.
        v0: the second moment of the server's optimiser at the start; None: τ².
        variant: "reddi" for the paper's rule (Reddi et al.), "optax" for optax's own, which takes
          no v0.
        execution: devices and chunks; None for this machine's default.

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

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedadagrad(local, clients_per_round=5, server_lr=0.05)
        >>> problem.accuracy(algorithm, rounds=5) > 0.8
        True
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
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        server=server.optimizer(rule),
        execution=execution,
    )


@part
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
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedAdam: FedAvg with Adam on the server, without bias correction.

    .. math:: \Delta = \sum_k p_k (w_k - w), \quad
              m \leftarrow \beta_1 m + (1 - \beta_1)\,\Delta, \quad
              v \leftarrow \beta_2 v + (1 - \beta_2)\,\Delta^2, \quad
              w \leftarrow w + \eta\,\frac{m}{\sqrt v + \tau}

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        server_lr: η, the server's learning rate.
        beta1: β1, the decay of the first moment of the server's optimiser.
        beta2: β2, the decay of the second moment of the server's optimiser.
        tau: τ, added to the root of the second moment of the server's optimiser.
        v0: the second moment of the server's optimiser at the start; None: τ².
        variant: "reddi" for the paper's rule (Reddi et al.), "optax" for optax's own, which takes
          no v0.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range, or the variant does not have it.

    Source: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated
    optimization", ICLR 2021 <https://arxiv.org/abs/2003.00295>, Algorithm 2; DeepMind 2020
    <https://github.com/google-deepmind>, optax (variant).

    Note:
        The variant "optax" is ``optax.adam``, as in FedJAX: it corrects the bias of both moments.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedadam(local, clients_per_round=5, server_lr=0.1)
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    rule = (
        optax.adam(server_lr, beta1, beta2, tau)
        if _of_optax(variant, server_lr, v0)
        else optimizers.adam(server_lr, beta1=beta1, beta2=beta2, tau=tau, v0=v0)
    )
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        server=server.optimizer(rule),
        execution=execution,
    )


@part
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
    execution: Execution | None = None,
) -> Algorithm:
    r"""FedYogi: FedAvg with Yogi on the server, without bias correction.

    .. math:: \Delta = \sum_k p_k (w_k - w), \quad
              m \leftarrow \beta_1 m + (1 - \beta_1)\,\Delta, \quad
              v \leftarrow v - (1 - \beta_2)\,\Delta^2 \operatorname{sign}(v - \Delta^2), \quad
              w \leftarrow w + \eta\,\frac{m}{\sqrt v + \tau}

    Args:
        local: the local update.
        clients_per_round: m, the cohort drawn without replacement.
        server_lr: η, the server's learning rate.
        beta1: β1, the decay of the first moment of the server's optimiser.
        beta2: β2, the decay of the second moment of the server's optimiser.
        tau: τ, added to the root of the second moment of the server's optimiser.
        v0: the second moment of the server's optimiser at the start; None: τ².
        variant: "reddi" for the paper's rule (Reddi et al.), "optax" for optax's own, which takes
          no v0.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range, or the variant does not have it.

    Source: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated
    optimization", ICLR 2021 <https://arxiv.org/abs/2003.00295>, Algorithm 2; DeepMind 2020
    <https://github.com/google-deepmind>, optax (variant).

    Note:
        The variant "optax" is ``optax.yogi``: it corrects the bias of both moments.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> algorithm = fs.algorithms.fedyogi(local, clients_per_round=5, server_lr=0.1)
        >>> problem.accuracy(algorithm, rounds=3) > 0.8
        True
    """
    rule = (
        optax.yogi(server_lr, beta1, beta2, tau)
        if _of_optax(variant, server_lr, v0)
        else optimizers.yogi(server_lr, beta1=beta1, beta2=beta2, tau=tau, v0=v0)
    )
    return compose(
        local,
        selection=selection.uniform(),
        schedule=schedule.every_round(clients_per_round),
        server=server.optimizer(rule),
        execution=execution,
    )


def _of_optax(variant: Variant, server_lr: float, v0: float | None) -> bool:
    if variant not in ("reddi", "optax"):
        raise ValueError(f"variant must be 'reddi' or 'optax', got {variant!r}")
    if concrete(server_lr) and not server_lr > 0:
        raise ValueError(f"server_lr must be positive, got {server_lr}")
    if variant == "optax" and v0 is not None:
        raise ValueError(f"v0 must be left out with variant 'optax', got {v0}")
    return variant == "optax"
