"""The Gaussian mechanism, with a fixed clip and with one that follows the clients."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, ClientData, Cohort, PreAggregation, PyTree, Variables, part
from fedjax_sim.engine import tree
from fedjax_sim.privacy._accounting import epsilon
from fedjax_sim.privacy._clipped import check_model, check_settings, noisy_rows, private_needs
from fedjax_sim.privacy._noise import normal


@part
def gaussian_mechanism(
    clip: float, noise_multiplier: float, clients_per_round: float
) -> PreAggregation:
    r"""Makes the mean of the models a noisy sum of clipped updates over a fixed denominator.

    .. math:: w_t + \frac1m \Bigl(\sum_{k \in U_t} \Delta_k \min\bigl(1,
              \tfrac{C}{\lVert \Delta_k \rVert_2}\bigr) + \mathcal{N}(0, z^2 C^2 I)\Bigr)

    m is the size of the expected cohort, not of the actual one, which would reveal who took part.
    Every row is changed so that the plain mean, which must be the aggregator, gives this: absent
    rows become noise alone, and all weigh 1. A round without any client is noise alone. An update
    that is not finite counts as 0, so that the bound holds for anything that is sent.

    The server's models are private as long as nothing else leaves the clients, and no client takes
    part twice: ``compose`` refuses what would break that, and :meth:`fedjax_sim.Algorithm.epsilon`
    gives no number if a part is not known to keep it. The losses that the simulator reports, and
    rows of single clients, are not private. The noise is drawn by JAX's generator in floating
    point: right for experiments, but not hardened against an attacker who exploits either.

    Args:
        clip: C, the largest L2 norm of a client's update, which is scaled down to it.
        noise_multiplier: z, the noise's standard deviation divided by C.
        clients_per_round: m = qN, the expected cohort.

    Returns:
        A pre-aggregation without state.

    Raises:
        ValueError: if a setting is out of range, or the model has non-trainable variables:
            BatchNorm's statistics would leave without noise.

    Source: McMahan et al. 2018 <https://arxiv.org/abs/1710.06963>, Algorithm 1 with the estimator
    of fixed denominator and weights 1.
    """
    check_settings(clip, noise_multiplier, clients_per_round)
    deviation = noise_multiplier * clip / clients_per_round if noise_multiplier else 0.0

    def init(variables: Variables, data: ClientData) -> PyTree:
        del data
        check_model(variables)
        return ()

    def apply(
        key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        norms = tree.norms(updates.params)
        drawn = normal(key, cohort.server.params, deviation)
        rows = noisy_rows(updates, weights, norms, clip, drawn, clients_per_round)
        return *rows, state

    spent = functools.partial(epsilon, noise_multiplier)
    needs = private_needs(apply, "gaussian_mechanism")
    return PreAggregation(init, apply, epsilon=spent, needs=needs)


@part
def adaptive_mechanism(
    clip: float,
    noise_multiplier: float,
    clients_per_round: float,
    quantile: float = 0.5,
    *,
    clip_lr: float = 0.2,
    count_noise: float | None = None,
) -> PreAggregation:
    r"""The Gaussian mechanism with a clip that follows a quantile of the updates' norms.

    .. math:: C \leftarrow C \exp\bigl(-\eta_C (\tilde b - \gamma)\bigr), \qquad
              \tilde b = \frac12 + \frac1m \Bigl(\sum_{k \in U_t} \bigl(b_k - \tfrac12\bigr)
              + \mathcal{N}(0, \sigma_b^2)\Bigr), \quad
              b_k = \mathbb{1}[\lVert \Delta_k \rVert_2 \le C]

    after every round, so that a share γ of the updates is not clipped. The server clips and sees
    b_k by itself: nothing travels besides. A client moves the sum of the bits, a half less each, by
    a half, and the updates' sum by C; the updates' noise is raised to

    .. math:: z_\Delta = \bigl(z^{-2} - (2 \sigma_b)^{-2}\bigr)^{-1/2}

    times C, so that both together are as private as one Gaussian mechanism of noise multiplier z:
    :func:`epsilon` of z holds for it. What else :func:`gaussian_mechanism` says holds here too.

    Args:
        clip: C of the first round.
        noise_multiplier: z, of both queries together; 0: the updates get no noise.
        clients_per_round: m = qN, the expected cohort.
        quantile: γ.
        clip_lr: η_C; 0 keeps the clip.
        count_noise: σ_b, the standard deviation of the noise in the count; None: m/20.

    Returns:
        A pre-aggregation; its state is C, ``f32[]``.

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
    check_settings(clip, noise_multiplier, clients_per_round)
    if math.isinf(clip):
        raise ValueError(f"clip must be finite if it adapts, got {clip}")
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile must be in [0, 1], got {quantile}")
    if not 0 <= clip_lr < math.inf:
        raise ValueError(f"clip_lr must be at least 0 and finite, got {clip_lr}")
    bits = clients_per_round / 20 if count_noise is None else count_noise
    least = noise_multiplier / 2
    if not (least < bits < math.inf or (noise_multiplier == 0 and bits == 0)):
        raise ValueError(
            f"count_noise must be more than noise_multiplier / 2 = {least:g} and finite, got "
            f"{bits:g}" + (", m/20" if count_noise is None else "")
        )
    raised = 0.0
    if noise_multiplier > 0:
        raised = (noise_multiplier**-2 - (2 * bits) ** -2) ** -0.5

    def init(variables: Variables, data: ClientData) -> Array:
        del data
        check_model(variables)
        return jnp.float32(clip)

    def apply(
        key: Array, limit: Array, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, Array]:
        norms = tree.norms(updates.params)
        drawn = normal(
            jax.random.fold_in(key, 0), cohort.server.params, raised * limit / clients_per_round
        )
        below = jnp.where(weights > 0, (norms <= limit).astype(jnp.float32) - 0.5, 0)
        noise = bits * jax.random.normal(jax.random.fold_in(key, 1), (), jnp.float32)
        share = 0.5 + (tree.row_sum(below) + noise) / clients_per_round
        rows = noisy_rows(updates, weights, norms, limit, drawn, clients_per_round)
        return *rows, limit * jnp.exp(-clip_lr * (share - quantile))

    spent = functools.partial(epsilon, noise_multiplier)
    needs = private_needs(apply, "adaptive_mechanism")
    return PreAggregation(init, apply, epsilon=spent, needs=needs)
