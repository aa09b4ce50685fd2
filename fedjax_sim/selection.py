"""Which client each slot visits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, ClientData, PyTree, Selection


def uniform(*, held: bool = False) -> Selection:
    """Uniform draws without replacement, so that no two slots visit the same client.

    Args:
        held: False draws for every slot in every round (FedAvg, RADFed); True keeps a slot's client
          until the slot is due (phase shift), and draws from the clients that are free.

    Returns:
        A selection without state.

    Source: McMahan et al. 2017, Algorithm 1; Cornelis, listing 2 line 7 (held).
    """

    def draw(
        key: Array, state: PyTree, data: ClientData, clients: Array, vacant: Array, visits: Array
    ) -> tuple[Array, PyTree]:
        del visits
        n = data.start.shape[0] - 1
        ticket = jax.random.uniform(key, (n,))
        # Clients of slots that are not vacant are taken; row n swallows the vacant ones' marks.
        taken = jnp.zeros(n + 1, bool).at[jnp.where(vacant, n, clients)].set(True)[:n]
        queue = jnp.argsort(jnp.where(taken, 2.0, ticket)).astype(jnp.int32)
        rank = jnp.cumsum(vacant, dtype=jnp.int32) - 1
        return jnp.where(vacant, queue[jnp.maximum(rank, 0)], clients), state

    return Selection(init=lambda variables, data, execution: (), draw=draw, held=held)
