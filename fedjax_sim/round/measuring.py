"""Diagnostics and the loss of a round."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Cohort, FedState, LocalInfo, PyTree, Slots, Variables
from fedjax_sim.engine import tree
from fedjax_sim.engine.streams import Round, stream
from fedjax_sim.round.parts import Parts


def measure(
    parts: Parts,
    key: Array,
    state: FedState,
    new: FedState,
    slots: Slots,
    updates: Variables | None,
    cohort: Cohort,
) -> tuple[dict[str, Array], PyTree]:
    """Returns the numbers of all diagnostics, and their states.

    ``new`` is the state after the round. ``slots [P]`` have the models in flight; without these,
    ``updates [P, *p]`` are the round's.

    Raises:
        ValueError: if two diagnostics report one name.
    """
    numbers: dict[str, Array] = {}
    states: dict[str, PyTree] = {}
    if not parts.diagnostics:
        return numbers, states
    models = slots.variables
    if updates is not None:
        models = jax.tree.map(jnp.add, cohort.received, updates)
    for i, (name, part) in enumerate(parts.diagnostics.items()):
        own_key = stream(key, Round.DIAGNOSTIC, i)
        found, states[name] = part.measure(
            own_key, state.diagnostics[name], new.server, models, cohort
        )
        if twice := found.keys() & numbers.keys():
            raise ValueError(
                f"diagnostics must report different names, {name!r} and an earlier one report "
                f"{min(twice)!r}"
            )
        numbers |= found
    return numbers, states


def loss(info: LocalInfo, skipped: Array) -> Array:
    """Returns a round's mean loss over samples, without ``skipped bool[P]`` rows: ``f32[]``."""
    samples = jnp.where(skipped, 0, info.samples).astype(jnp.float32)
    # If every last batch is dropped, no sample is visited, which is not a divergence.
    mean = tree.row_sum(info.loss * samples) / jnp.maximum(tree.row_sum(samples), 1)
    nobody = jnp.any(skipped) & ~jnp.any(samples > 0)
    return jnp.where(nobody, jnp.nan, mean)
