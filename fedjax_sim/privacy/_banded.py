"""Banded matrix factorisation: noise of which each round takes back a part of the last ones'."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    Cohort,
    Need,
    Participation,
    PreAggregation,
    PyTree,
    Variables,
    part,
)
from fedjax_sim.engine import tree
from fedjax_sim.privacy._accounting import banded_epsilon, check_bands, coefficients
from fedjax_sim.privacy._clipped import (
    check_model,
    check_settings,
    cohorts_of,
    noisy_rows,
    private_needs,
)
from fedjax_sim.privacy._noise import normal


@part
def banded_mechanism(
    clip: float, noise_multiplier: float, clients_per_round: int, bands: int
) -> PreAggregation:
    r"""Makes all rounds' clipped updates private, by noise that is correlated over b rounds.

    .. math:: \frac1m \Bigl(\sum_{k \in U_t} \Delta_k
              \min\bigl(1, \tfrac{C}{\lVert \Delta_k \rVert_2}\bigr) + n_t\Bigr), \qquad
              n_t = \xi_t - \sum_{j=1}^{b-1} c_j\, n_{t-j}, \quad
              \xi_t \sim \mathcal{N}(0, z^2 C^2 I)

    with :math:`\sum_j c_j x^j = (1 - x)^{-1/2}`. In the paper's words, the noise is
    :math:`\mathbf{C}^{-1} \xi`, where **C** is the square root of the matrix of sums with all but
    its first b diagonals cut off. The noise of a model, a sum of n_t, grows far slower than that of
    as many independent ones. With b = 1 it is :func:`gaussian_mechanism` with a fixed cohort.

    Every client waits at least ⌊N/m⌋ rounds for its next turn
    (:func:`fedjax_sim.selection.cyclic`), and b is at most that: its visits then have no band in
    common, and their noises add up as if they were independent. No cohort needs to be random or
    secret. Rows, what is refused and how noise is drawn are those of :func:`gaussian_mechanism`.

    Args:
        clip: C, the largest L2 norm of a client's update, which is scaled down to it.
        noise_multiplier: z, the standard deviation of ξ divided by C. A client counts in up to b of
            them: of the same z, more bands cost more ε, see :func:`banded_epsilon`.
        clients_per_round: m, the cohort.
        bands: b.

    Returns:
        A pre-aggregation; its state is the last b - 1 noises, each as large as the model.

    Raises:
        ValueError: if a setting is out of range, or the model has non-trainable variables; when the
            state is initialised, if b is above ⌊N/m⌋; by ``compose``, if clients could come again
            before that.

    Source: Choquette-Choo et al. 2023 <https://arxiv.org/abs/2306.08153>; Kalinin,
    Lampert 2024 <https://arxiv.org/abs/2405.13763>, for the coefficients.
    """
    check_settings(clip, noise_multiplier, clients_per_round)
    if bands < 1:
        raise ValueError(f"bands must be at least 1, got {bands}")
    deviation = noise_multiplier * clip / clients_per_round if noise_multiplier else 0.0

    def init(variables: Variables, data: ClientData) -> PyTree:
        check_model(variables)
        check_bands(bands, data.clients, clients_per_round)
        zeros = jax.tree.map(jnp.zeros_like, variables.params)
        return tree.stack_copies(zeros, bands - 1)

    def apply(
        key: Array, past: PyTree, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        fresh = normal(key, cohort.server.params, deviation)

        # Each noise is less a part of those before it, the newest first.
        earlier = coefficients(bands)[1:]

        def less(drawn: Array, last: Array) -> Array:
            return drawn - jnp.tensordot(jnp.asarray(earlier, drawn.dtype), last, axes=1)

        drawn = jax.tree.map(less, fresh, past) if bands > 1 else fresh
        newest = jax.tree.map(
            lambda new, last: jnp.concatenate([new[None], last])[: bands - 1], drawn, past
        )
        norms = tree.norms(updates.params)
        rows = noisy_rows(updates, weights, norms, clip, drawn, clients_per_round)
        return *rows, newest

    turns = Need(
        "selection",
        "clients that come again after as many rounds as it has bands",
        lambda parts: parts.selection.participation == "cyclic",
        "selection=cyclic()",
    )
    needs = (*private_needs(apply, "banded_mechanism"), turns, cohorts_of(clients_per_round))

    def spent(*, sampling: Participation, slots: int, **settings: Any) -> float:
        del sampling, slots  # the needs fix both
        return banded_epsilon(noise_multiplier, bands=bands, **settings)

    return PreAggregation(init, apply, epsilon=spent, needs=needs)
