"""FedNova's normalised averaging."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    Cohort,
    Decay,
    Need,
    Positive,
    PreAggregation,
    PyTree,
    Variables,
    concrete,
)
from fedjax_sim.engine import reach, tree
from fedjax_sim.engine.matching import sgd_of
from fedjax_sim.engine.needs import FRESH, NO_FLIGHT, ONE_MODEL, SYNCHRONOUS


class normalise(PreAggregation):
    r"""Normalises every client's update by its accumulated local gradients.

    .. math:: \Delta_k \leftarrow \frac{\tau_{eff}}{a_k} \Delta_k, \qquad
              \tau_{eff} = \sum_k p_k a_k, \quad p_k = \frac{n_k}{\sum_j n_j}

    so that their mean is :math:`-\tau_{eff} \sum_k p_k d_k` with :math:`d_k = -\Delta_k / a_k`.
    After T_k local steps the gradients have accumulated with the total weight

    .. math:: a_k = T_k, \qquad
              a_k = \frac{T_k - \rho\,(1 - \rho^{T_k}) / (1 - \rho)}{1 - \rho}, \qquad
              a_k = \frac{1 - (1 - \eta\mu)^{T_k}}{\eta\mu}

    for plain SGD, for momentum ρ that starts from 0 at every visit, and for a proximal term. p_k
    are the relative input weights. The state (BatchNorm statistics) is averaged unscaled. A model
    whose client took no step is unchanged. FedLab fixes p_k to 1/m and a_k to T_k.

    Args:
        lr: η of the clients' SGD.
        momentum: ρ of the clients' SGD.
        mu: μ of the proximal term; 0 for no proximal term.

    Raises:
        ValueError: if a setting is out of range, or momentum and mu are both positive.

    Source: Wang et al. 2020 <https://arxiv.org/abs/2007.07481>, sections 3 and 4.

    Example:
        >>> from fedjax_sim.base import LocalInfo
        >>> steps = jnp.array([1, 3])
        >>> info = LocalInfo(jnp.zeros(2), steps, steps)
        >>> w = Variables(jnp.zeros(1), ())
        >>> cohort = Cohort(w, tree.stack_copies(w, 1), steps, steps > 0, steps, info, (), None)
        >>> updates = Variables(jnp.array([[1.0], [9.0]]), ())
        >>> updates, *_ = normalise(0.1).apply(None, (), updates, jnp.ones(2), cohort)
        >>> updates.params.tolist()  # 1 and 3 a step, two steps each
        [[2.0], [6.0]]
    """

    lr: Positive
    momentum: Decay = 0.0
    mu: float = 0.0

    reads = ("steps",)

    def __post_init__(self) -> None:
        if concrete(self.mu, self.lr) and not 0 <= self.mu * self.lr < 1:
            raise ValueError(
                f"mu must be at least 0 and below 1 / lr = {1 / self.lr:g}, got {self.mu}"
            )
        if self.momentum > 0 and self.mu > 0:
            raise ValueError(
                f"mu must be 0 with momentum: FedNova's a_k is known for either alone, got mu "
                f"{self.mu} and momentum {self.momentum}"
            )

    @property
    def needs(self) -> tuple[Need, ...]:
        mu = self.mu
        known = Need(
            "local",
            "the correction for which FedNova's a_k is known, "
            + (f"proximal({mu})" if mu else "none"),
            lambda parts: [term.pull for term in parts.local.corrections] == ([mu] if mu else []),
            "fednova(mu=...) on a local update without corrections",
        )
        sgd = sgd_of("lr", self.lr, self.momentum)
        return (ONE_MODEL, NO_FLIGHT, SYNCHRONOUS, sgd, FRESH, known)

    def apply(
        self, key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        a = self._accumulated(cohort.info.steps)
        share = weights / tree.row_sum(weights)
        effective = tree.row_sum(share * a)
        ratio = jnp.where(a > 0, effective / jnp.where(a > 0, a, 1), 1)
        params = jax.vmap(tree.scale)(ratio, updates.params)
        return Variables(params, updates.state), weights, state

    def _accumulated(self, steps: Array) -> Array:
        """Returns a_k after T_k steps."""
        if self.mu > 0:
            # 1 - (1 - ημ)^T cancels if ημ is small.
            rate = self.lr * self.mu
            return -jnp.expm1(steps.astype(jnp.float32) * math.log1p(-rate)) / rate
        return reach.gradient_weight(steps, self.momentum)
