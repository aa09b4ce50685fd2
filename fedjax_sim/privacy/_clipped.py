"""The base class of private mechanisms: clipped updates over a fixed denominator, and noise."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Finite, Need, Positive, PreAggregation, PyTree, Variables
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import (
    APART,
    NO_FLIGHT,
    NOTHING_AFTER,
    NOTHING_SHARED,
    NOTHING_TOLD,
    ONE_MODEL,
    OWN_ROWS,
    OWN_SAMPLES,
    PLAIN_MEAN,
)
from fedjax_sim.engine.reading import moves_by_mean

# All rows hold the same noise: their signs or norms would reveal single clients.
MEAN_ALONE = Need(
    "server",
    "a server that sees nothing but the noisy mean",
    lambda parts: moves_by_mean(parts.server),
    "server=replace() or optimizer(transform)",
)


class Mechanism(PreAggregation):
    """A private mechanism: clipped updates with noise.

    Attributes:
        clip: C, the largest L2 norm of a client's update.
        noise_multiplier: z.
        clients_per_round: m, the fixed denominator.
    """

    clip: Positive
    noise_multiplier: Finite
    clients_per_round: Positive

    def __post_init__(self) -> None:
        if self.noise_multiplier > 0 and math.isinf(self.clip):
            raise ValueError(f"clip must be finite if noise is added, got {self.clip}")

    @property
    def needs(self) -> tuple[Need, ...]:
        last = Need(
            "preaggregation",
            "to be the last pre-aggregation, after parts that read no reports",
            self._is_last,
            f"preaggregation=({type(self).__name__}(...),)",
        )
        clients = (NOTHING_SHARED, NOTHING_TOLD, NOTHING_AFTER, OWN_SAMPLES, APART, OWN_ROWS)
        return (PLAIN_MEAN, ONE_MODEL, NO_FLIGHT, *clients, last, MEAN_ALONE)

    def _is_last(self, parts: Any) -> bool:
        reads = any(part.reads or part.setup_traffic for part in parts.preaggregation)
        return parts.preaggregation[-1] is self and not reads

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise in the mean."""
        z = self.noise_multiplier
        return z * self.clip / self.clients_per_round if z else 0.0

    def noisy(
        self, updates: Variables, weights: Array, noise: PyTree, clip: Array | None = None
    ) -> tuple[Variables, Array]:
        """Returns rows whose plain mean is the sum of the clipped updates over m, plus noise.

        Args:
            updates: ``[P, *p]``.
            weights: ``f32[P]``; a row of weight 0 is absent.
            noise: ``[*p]``, the noise of the mean.
            clip: C, if it is not the setting.

        Returns:
            The rows and their weights, all 1: absent rows are noise alone.
        """
        norms = tree.norms(updates.params)
        counted = (weights > 0) & jnp.isfinite(norms)
        clip_now = self.clip if clip is None else clip
        # The mean will divide by the number of rows, present or absent.
        scale = len(weights) / self.clients_per_round * jnp.minimum(1, clip_now / norms)

        def row(update: Array, noise: Array) -> Array:
            step = tree.expand(scale, update).astype(update.dtype) * update
            return noise[None] + jnp.where(tree.expand(counted, update), step, 0)

        params = jax.tree.map(row, updates.params, noise)
        return updates._replace(params=params), jnp.ones_like(weights)


def check_model(variables: Variables) -> None:
    """Raises ValueError for a model with non-trainable variables, which would leave unprotected."""
    if jax.tree.leaves(variables.state):
        raise ValueError(
            "model must have no non-trainable variables (BatchNorm) to be private, got "
            f"{jax.tree.structure(variables.state)}"
        )
