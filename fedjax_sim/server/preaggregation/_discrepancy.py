"""FedDisco's weights: clients whose labels are unlike those wanted count less."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    Cohort,
    PreAggregation,
    PyTree,
    SetupTraffic,
    Variables,
    concrete,
    for_classes,
    part,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import label_counts

Discrepancy = Literal["kl", "l2"]
"""How far labels are from uniform: Kullback-Leibler divergence, or Euclidean distance."""


@part
@for_classes
def discrepancy(
    classes: int, a: float = 0.5, b: float = 0.1, distance: Discrepancy = "kl"
) -> PreAggregation:
    r"""Weighs clients by their samples and by how far their labels are from uniform.

    .. math:: p_k \propto \max(n_k - a\, d_k + b,\, 0), \qquad
              d_k = \frac{D_{KL}(D_k \Vert T)}{\sum_j D_{KL}(D_j \Vert T)}
              \quad \text{or} \quad d_k = \lVert D_k - T \rVert_2

    where n_k are the shares of the weights that arrive here (of the cohort's samples in the paper),
    D_k the client's label distribution and T the uniform one; j runs over the cohort. If no client
    has weight, the weights stay as they are. Every client says how far its labels are from T once,
    before the first round, in 32 bits.

    Args:
        classes: M, the number of classes.
        a: a, of the distance; 0 with b = 0 changes nothing but the scale of the weights.
        b: b, what everyone has.
        distance: "kl", as the authors ran it, or "l2".

    Returns:
        A pre-aggregation; its state are the distances, ``f32[N]``.

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
    if classes < 1:
        raise ValueError(f"classes must be at least 1, got {classes}")
    for name, value in (("a", a), ("b", b)):
        if concrete(value) and not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value}")
    if distance not in ("kl", "l2"):
        raise ValueError(f"distance must be 'kl' or 'l2', got {distance!r}")

    def init(variables: Variables, data: ClientData) -> Array:
        del variables
        counts = label_counts(data, classes).astype(jnp.float32)
        share = counts / jnp.maximum(jnp.sum(counts, axis=1, keepdims=True), 1)
        if distance == "l2":
            return jnp.sqrt(jnp.sum((share - 1 / classes) ** 2, axis=1))
        return jnp.sum(jax.scipy.special.xlogy(share, classes * share), axis=1)

    def apply(
        key: Array, distances: Array, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        del key
        present = weights > 0
        d = jnp.where(present, distances[cohort.client], 0)
        if distance == "kl":
            total = tree.row_sum(d)
            d = d / jnp.where(total > 0, total, 1)
        size = weights / tree.row_sum(weights)
        wanted = jnp.where(present, jnp.maximum(size - a * d + b, 0), 0)
        return updates, jnp.where(jnp.any(wanted > 0), wanted, weights), distances

    return PreAggregation(
        init=init,
        apply=apply,
        setup_traffic=lambda variables, data: SetupTraffic(4 * data.clients, 0),
        weighs=True,
    )
