"""What the mechanisms share: clipped rows whose mean is a sum over a fixed denominator."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Need, PyTree, Variables
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
from fedjax_sim.engine.reading import reads_clients


def check_settings(clip: float, noise_multiplier: float, clients_per_round: float) -> None:
    """Refuses settings that are out of range.

    Raises:
        ValueError: names the first.
    """
    if not clip > 0:
        raise ValueError(f"clip must be positive, got {clip}")
    if not 0 <= noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier must be at least 0 and finite, got {noise_multiplier}")
    if noise_multiplier > 0 and math.isinf(clip):
        raise ValueError(f"clip must be finite if noise is added, got {clip}")
    if not clients_per_round > 0:
        raise ValueError(f"clients_per_round must be positive, got {clients_per_round}")


def check_model(variables: Variables) -> None:
    """Refuses a model of which more than its parameters would leave.

    Raises:
        ValueError: if it has non-trainable variables.
    """
    if jax.tree.leaves(variables.state):
        raise ValueError(
            "model must have no non-trainable variables (BatchNorm) to be private, got "
            f"{jax.tree.structure(variables.state)}"
        )


def noisy_rows(
    updates: Variables,
    weights: Array,
    norms: Array,
    clip: float | Array,
    noise: PyTree,
    clients_per_round: float,
) -> tuple[Variables, Array]:
    """Rows whose plain mean is the sum of the clipped updates over m, and noise beside it.

    Args:
        updates: ``[P, *p]``.
        weights: ``f32[P]``; a row of weight 0 is absent.
        norms: ``f32[P]``, of the updates.
        clip: C.
        noise: ``[*p]``, of the mean.
        clients_per_round: m.

    Returns:
        The rows and their weights, all 1: absent rows are noise alone.
    """
    counted = (weights > 0) & jnp.isfinite(norms)
    # The mean will divide by the number of rows, present or absent.
    scale = len(weights) / clients_per_round * jnp.minimum(1, clip / norms)

    def row(update: Array, noise: Array) -> Array:
        step = tree.expand(scale, update).astype(update.dtype) * update
        return noise[None] + jnp.where(tree.expand(counted, update), step, 0)

    params = jax.tree.map(row, updates.params, noise)
    return updates._replace(params=params), jnp.ones_like(weights)


def private_needs(apply: Callable[..., Any], name: str) -> tuple[Need, ...]:
    """What would void the guarantee of a mechanism, by its ``apply`` and its name."""

    def is_last(parts: Any) -> bool:
        reads = any(other.reads or other.setup_traffic for other in parts.preaggregation)
        return parts.preaggregation[-1].apply is apply and not reads

    last = Need(
        "preaggregation",
        "to be the last pre-aggregation, after parts that read no reports",
        is_last,
        f"preaggregation=({name}(...),)",
    )
    # All rows hold the same noise: their signs or norms would tell of single clients.
    mean_alone = Need(
        "server",
        "a server that sees nothing but the noisy mean",
        lambda parts: (
            parts.server.setup_traffic is None
            and not parts.server.reads_updates
            and not reads_clients(parts.server)
        ),
        "server=replace() or optimizer(transform)",
    )
    clients = (NOTHING_SHARED, NOTHING_TOLD, NOTHING_AFTER, OWN_SAMPLES, APART, OWN_ROWS)
    return (PLAIN_MEAN, ONE_MODEL, NO_FLIGHT, *clients, last, mean_alone)


def cohorts_of(clients_per_round: int) -> Need:
    """What a mechanism whose noise hangs on who comes when needs of the schedule."""
    return Need(
        "schedule",
        f"cohorts of the {clients_per_round} clients that it is told of",
        lambda parts: parts.slots == clients_per_round,
        f"schedule=every_round({clients_per_round})",
    )
