"""FedDisco's weights: clients with more skewed labels count less."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    Cohort,
    Count,
    NonNegative,
    PreAggregation,
    SetupTraffic,
    Variables,
    for_classes,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import label_counts

Discrepancy = Literal["kl", "l2"]
"""Distance of labels from uniform: Kullback-Leibler divergence, or Euclidean distance."""


@for_classes
class discrepancy(PreAggregation):
    r"""Weights clients by their samples and by the distance of their labels from uniform.

    .. math:: p_k \propto \max(n_k - a\, d_k + b,\, 0), \qquad
              d_k = \frac{D_{KL}(D_k \Vert T)}{\sum_j D_{KL}(D_j \Vert T)}
              \quad \text{or} \quad d_k = \lVert D_k - T \rVert_2

    where n_k are the relative input weights (of the cohort's samples in the paper), D_k the
    client's label distribution and T the uniform one; j runs over the cohort. If all weights would
    be 0, they are unchanged. Every client sends its distance once, before the first round, in 32
    bits; the state is these distances, ``f32[N]``.

    Args:
        classes: M, the number of classes.
        a: a, the coefficient of the distance; 0 with b = 0 only changes the scale of the weights.
        b: b, added to every weight.
        distance: "kl", as in the authors' experiments, or "l2".

    Raises:
        ValueError: if a setting is out of range.

    Source: Ye et al. 2023 <https://arxiv.org/abs/2305.19229>, section 4.

    Example:
        >>> cohort = Cohort(None, None, jnp.array([1, 0]), None, None, None, (), None)
        >>> weigh = discrepancy(2, a=0.5, b=0.0).apply
        >>> distances = jnp.array([0.3, 0.1])  # three quarters and one quarter of their sum
        >>> weights = weigh(None, distances, None, jnp.array([60.0, 40.0]), cohort)[1]
        >>> [round(float(w), 3) for w in weights]
        [0.475, 0.025]
    """

    classes: Count
    a: NonNegative = 0.5
    b: NonNegative = 0.1
    distance: Discrepancy = "kl"

    weighs = True

    def setup_traffic(self, variables: Variables, data: ClientData) -> SetupTraffic:
        return SetupTraffic(4 * data.clients, 0)

    def init(self, variables: Variables, data: ClientData) -> Array:
        counts = label_counts(data, self.classes).astype(jnp.float32)
        share = counts / jnp.maximum(jnp.sum(counts, axis=1, keepdims=True), 1)
        if self.distance == "l2":
            return jnp.sqrt(jnp.sum((share - 1 / self.classes) ** 2, axis=1))
        return jnp.sum(jax.scipy.special.xlogy(share, self.classes * share), axis=1)

    def apply(
        self, key: Array, distances: Array, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, Array]:
        present = weights > 0
        d = jnp.where(present, distances[cohort.client], 0)
        if self.distance == "kl":
            total = tree.row_sum(d)
            d = d / jnp.where(total > 0, total, 1)
        size = weights / tree.row_sum(weights)
        new = jnp.where(present, jnp.maximum(size - self.a * d + self.b, 0), 0)
        return updates, jnp.where(jnp.any(new > 0), new, weights), distances
