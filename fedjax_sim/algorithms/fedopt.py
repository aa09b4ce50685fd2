"""FedAdagrad, FedAdam and FedYogi: adaptive optimisers on the server."""

from __future__ import annotations

from typing import Literal

import optax

from fedjax_sim import optimizers, schedule, selection, server
from fedjax_sim.base import Algorithm, LocalUpdate
from fedjax_sim.compose import compose
from fedjax_sim.execution import Execution

Variant = Literal["reddi", "optax"]


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
        beta1: β1, of the first moment; the paper's Adagrad has 0, optax's no other.
        tau: τ, added to the root of the second moment (optax's Adagrad adds it inside).
        v0: v, the second moment, at the start; None for τ² (optax has its own).
        variant: "reddi" for the rule of the paper (Reddi et al.), "optax" for optax's own: here
            ``optax.adagrad``.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range, or the variant has none of that name.

    Source: Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan, "Adaptive federated
    optimization", ICLR 2021, Algorithm 2.

    Example:
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> fedadagrad(local, clients_per_round=10, v0=0.0).slots
        10
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
        beta1: β1, of the first moment.
        beta2: β2, of the second moment.
        tau: τ, added to the root of the second moment.
        v0: v, the second moment, at the start; None for τ² (optax has its own).
        variant: "reddi" for the rule of the paper, "optax" for ``optax.adam``, which corrects the
            bias of both moments.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range, or the variant has none of that name.

    Source: Reddi et al., ICLR 2021, Algorithm 2. fedjax computes the "optax" variant.

    Example:
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> fedadam(local, clients_per_round=10, server_lr=0.01).slots
        10
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
        beta1: β1, of the first moment.
        beta2: β2, of the second moment.
        tau: τ, added to the root of the second moment.
        v0: v, the second moment, at the start; None for τ² (optax has its own).
        variant: "reddi" for the rule of the paper, "optax" for ``optax.yogi``, which corrects the
            bias of both moments.
        execution: devices and chunks; None for this machine's default.

    Returns:
        The algorithm. Traffic per round: m models down, m up.

    Raises:
        ValueError: if a setting is out of range, or the variant has none of that name.

    Source: Reddi et al., ICLR 2021, Algorithm 2.

    Example:
        >>> from fedjax_sim import local_sgd, models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = local_sgd(empirical_risk(model), optax.sgd(0.1), batch_size=16)
        >>> fedyogi(local, clients_per_round=10, server_lr=0.01).slots
        10
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
    if not server_lr > 0:
        raise ValueError(f"server_lr must be positive, got {server_lr}")
    if variant == "optax" and v0 is not None:
        raise ValueError(f"v0 must be left out with variant 'optax', got {v0}")
    return variant == "optax"
