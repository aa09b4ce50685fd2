"""What the diagnostics see of a round."""

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
    """The numbers of all diagnostics, and their states.

    Args:
        parts: of the algorithm.
        key: of the round.
        state: before it.
        new: after it.
        slots: ``[P]``, with the models if any stays in flight.
        updates: ``[P, *p]``, what was sent if none does.
        cohort: what is known of the rows.

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
                f"diagnostics must report different names, {name!r} and one before it report "
                f"{min(twice)!r}"
            )
        numbers |= found
    return numbers, states


def loss(info: LocalInfo, skipped: Array) -> Array:
    """The mean of a round by sample, without those that are ``skipped bool[P]``: ``f32[]``."""
    samples = jnp.where(skipped, 0, info.samples).astype(jnp.float32)
    # If every last batch is dropped, no sample is visited: that is no divergence.
    mean = tree.row_sum(info.loss * samples) / jnp.maximum(tree.row_sum(samples), 1)
    nobody = jnp.any(skipped) & ~jnp.any(samples > 0)
    return jnp.where(nobody, jnp.nan, mean)
