"""The Gaussian mechanism, with a fixed clip and with one that adapts to the clients."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, ClientData, Cohort, Finite, PyTree, Share, Variables
from fedjax_sim.engine import tree
from fedjax_sim.privacy._accounting import epsilon
from fedjax_sim.privacy._clipped import Mechanism, check_model
from fedjax_sim.privacy._noise import normal


class gaussian_mechanism(Mechanism):
    r"""Makes the mean of the models a noisy sum of clipped updates over a fixed denominator.

    .. math:: w_t + \frac1m \Bigl(\sum_{k \in U_t} \Delta_k \min\bigl(1,
              \tfrac{C}{\lVert \Delta_k \rVert_2}\bigr) + \mathcal{N}(0, z^2 C^2 I)\Bigr)

    m is the size of the expected cohort, not of the actual one, which would reveal who took part.
    The rows are changed so that their plain mean, which must be the aggregator, equals this sum:
    absent rows become pure noise, and all weights are 1. A round without any client is pure noise.
    An update that is not finite counts as 0, so the bound holds for any message.

    The server's models are private as long as nothing else leaves the clients and no client takes
    part twice in a round: ``compose`` rejects parts that break this, and
    :meth:`fedjax_sim.Algorithm.epsilon` raises an error if a part is not known to respect it. The
    losses that the simulator reports and the rows of single clients are not private. The noise is
    drawn by JAX's generator in floating point: right for experiments, but not hardened against an
    attacker who exploits either.

    Args:
        clip: C; updates with a larger L2 norm are scaled down to it.
        noise_multiplier: z, the noise's standard deviation divided by C.
        clients_per_round: m = qN, the expected cohort.

    Raises:
        ValueError: if a setting is out of range, or the model has non-trainable variables:
            BatchNorm's statistics would leave the clients without noise.

    Source: McMahan et al. 2018 <https://arxiv.org/abs/1710.06963>, Algorithm 1 with the
    fixed-denominator estimator and weights 1.
    """

    def init(self, variables: Variables, data: ClientData) -> PyTree:
        check_model(variables)
        return ()

    def apply(
        self, key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        noise = normal(key, cohort.server.params, self.deviation)
        return *self.noisy(updates, weights, noise), state

    def epsilon(self, **settings: Any) -> float:
        return epsilon(self.noise_multiplier, **settings)


class adaptive_mechanism(gaussian_mechanism):
    r"""The Gaussian mechanism with a clip that follows a quantile of the updates' norms.

    .. math:: C \leftarrow C \exp\bigl(-\eta_C (\tilde b - \gamma)\bigr), \qquad
              \tilde b = \frac12 + \frac1m \Bigl(\sum_{k \in U_t} \bigl(b_k - \tfrac12\bigr)
              + \mathcal{N}(0, \sigma_b^2)\Bigr), \quad
              b_k = \mathbb{1}[\lVert \Delta_k \rVert_2 \le C]

    after every round, so that a fraction γ of the updates is not clipped. The server clips and
    computes b_k itself: nothing else is sent. A client changes the sum of the shifted bits b_k - ½
    by a half, and the sum of the updates by C; the noise of the updates is raised to

    .. math:: z_\Delta = \bigl(z^{-2} - (2 \sigma_b)^{-2}\bigr)^{-1/2}

    times C, so that both queries together are as private as one Gaussian mechanism with noise
    multiplier z: :func:`fedjax_sim.privacy.epsilon` of z holds. Everything else is as in
    :func:`gaussian_mechanism`.
    The state is C, ``f32[]``.

    Args:
        clip: C in the first round.
        noise_multiplier: z of both queries together; 0: the updates get no noise.
        clients_per_round: m = qN, the expected cohort.
        quantile: γ.
        clip_lr: η_C; 0 keeps the clip.
        count_noise: σ_b, the standard deviation of the noise in the count; None: m/20.

    Raises:
        ValueError: if a setting is out of range, count_noise is not more than z/2, or the model has
            non-trainable variables.

    Source: Andrew et al. 2021 <https://arxiv.org/abs/1905.03871>, Algorithm 1.

    Example:
        >>> raised = adaptive_mechanism(1.0, 0.0, 2.0, quantile=1.0, clip_lr=1.0, count_noise=0.0)
        >>> w, k = Variables(jnp.zeros(1), ()), jnp.arange(2)
        >>> cohort = Cohort(w, tree.stack_copies(w, 1), k, k >= 0, k, None, (), None)
        >>> updates = Variables(jnp.array([[0.5], [3.0]]), ())
        >>> *_, clip = raised.apply(
        ...     jax.random.key(0), jnp.float32(1), updates, jnp.ones(2), cohort
        ... )
        >>> round(float(clip), 3)  # e to the 1 - 1/2
        1.649
    """

    quantile: Share = 0.5
    _: dataclasses.KW_ONLY
    clip_lr: Finite = 0.2
    count_noise: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if math.isinf(self.clip):
            raise ValueError(f"clip must be finite if it adapts, got {self.clip}")
        z, bits = self.noise_multiplier, self._bit_noise
        if not (z / 2 < bits < math.inf or (z == 0 and bits == 0)):
            raise ValueError(
                f"count_noise must be more than noise_multiplier / 2 = {z / 2:g} and finite, got "
                f"{bits:g}" + (", m/20" if self.count_noise is None else "")
            )

    @property
    def _bit_noise(self) -> float:
        """σ_b."""
        return self.clients_per_round / 20 if self.count_noise is None else self.count_noise

    @property
    def _raised(self) -> float:
        """The noise multiplier of the updates."""
        z, bits = self.noise_multiplier, self._bit_noise
        return (z**-2 - (2 * bits) ** -2) ** -0.5 if z > 0 else 0.0

    def init(self, variables: Variables, data: ClientData) -> Array:
        check_model(variables)
        return jnp.float32(self.clip)

    def apply(
        self, key: Array, state: Array, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, Array]:
        m, limit = self.clients_per_round, state
        deviation = self._raised * limit / m
        drawn = normal(jax.random.fold_in(key, 0), cohort.server.params, deviation)
        norms = tree.norms(updates.params)
        below = jnp.where(weights > 0, (norms <= limit).astype(jnp.float32) - 0.5, 0)
        noise = self._bit_noise * jax.random.normal(jax.random.fold_in(key, 1), (), jnp.float32)
        share = 0.5 + (tree.row_sum(below) + noise) / m
        rows = self.noisy(updates, weights, drawn, limit)
        return *rows, limit * jnp.exp(-self.clip_lr * (share - self.quantile))
