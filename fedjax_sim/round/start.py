"""The state before the first round."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import ClientData, FedState, Variables
from fedjax_sim.engine import tree
from fedjax_sim.round.parts import Parts
from fedjax_sim.round.placement import at_rest
from fedjax_sim.round.training import first_visit


def initial_state(parts: Parts, variables: Variables, data: ClientData) -> FedState:
    """Every part's own start, for the initial model ``variables``.

    Raises:
        ValueError: if there are fewer clients than slots, and the selection has no use for idle
            ones.
    """
    if data.clients < parts.slots and not parts.selection.may_idle:
        raise ValueError(
            f"clients_per_round must be at most the {data.clients} clients, got {parts.slots}"
        )
    state = FedState(
        round=jnp.int32(0),
        server=variables,
        server_samples=jnp.float32(0),
        opt_state=parts.server.init(variables),
        slots=None,
        selection=parts.selection.init(variables, data, parts.execution),
        client_state=tree.stack_copies(parts.local.client_state(variables), data.clients),
        shared_state=parts.local.shared_state(variables),
        broadcast=parts.broadcast.init(variables),
        preaggregation=tuple(part.init(variables, data) for part in parts.preaggregation),
        diagnostics={name: d.init(variables, data) for name, d in parts.diagnostics.items()},
    )
    if not parts.in_flight:
        return state
    _, info, tag = jax.eval_shape(lambda: first_visit(parts, state, data))
    return state._replace(slots=at_rest(parts, state, info, tag))
