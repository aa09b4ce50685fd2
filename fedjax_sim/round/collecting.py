"""What the server does in a round."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, ClientData, Cohort, FedState, PyTree, Slots, Variables
from fedjax_sim.engine import tree
from fedjax_sim.engine.streams import Round, stream
from fedjax_sim.round.parts import Parts


def cohort_of(
    parts: Parts, state: FedState, slots: Slots, samples: Array, data: ClientData
) -> Cohort:
    """The models that meet; ``samples int32[P]`` are their clients' n_k."""
    everywhere = jax.tree.map(lambda w: w[None], state.server)
    return Cohort(
        server=state.server,
        received=slots.received if parts.remembers else everywhere,
        client=slots.client,
        present=slots.client < data.clients,
        samples=samples,
        info=slots.info,
        tag=slots.tag,
        data=data,
    )


def absorb(
    parts: Parts, key: Array, state: FedState, slots: Slots, cohort: Cohort, due: Array
) -> FedState:
    """The server's part of the state after it took the models ``due bool[P]``, if any is."""
    # Without the clients' part: lax.cond would copy it through both branches.
    state = state._replace(
        slots=None, selection=(), client_state=(), shared_state=(), diagnostics=()
    )

    def take_due(_: None) -> FedState:
        counted = due & (slots.visits > 0)
        weights = parts.weighting(cohort.samples, slots.samples_visited)
        weights = parts.execution.replicate(jnp.where(counted, weights, 0))
        models, after = slots.variables, []
        pre_key = stream(key, Round.PREAGGREGATION)
        for i, (part, kept) in enumerate(
            zip(parts.preaggregation, state.preaggregation, strict=True)
        ):
            own_key = jax.random.fold_in(pre_key, i)
            models, weights, kept = part.apply(own_key, kept, models, weights, cohort)
            after.append(kept)
        aggregate = parts.aggregator(models, weights)
        _check_shapes(aggregate, state.server)
        moved, opt_state = parts.server.update(
            stream(key, Round.SERVER), aggregate, state.server, state.opt_state, cohort.data
        )
        sent = parts.broadcast.update(
            state.broadcast, moved, models, weights, cohort, parts.aggregator
        )
        new = state._replace(
            server=moved,
            server_samples=jnp.sum(jnp.where(counted, cohort.samples, 0)).astype(jnp.float32),
            opt_state=opt_state,
            broadcast=sent,
            preaggregation=tuple(after),
        )
        # An empty cohort (Poisson sampling may draw one) moves nothing.
        return tree.select(jnp.any(weights > 0), new, state)

    if not parts.in_flight:
        return take_due(None)
    return jax.lax.cond(jnp.any(due), take_due, lambda _: state, None)


def _check_shapes(aggregate: PyTree, server: Variables) -> None:
    got, wanted = (
        jax.tree.map(lambda a: f"{a.dtype}{list(a.shape)}", tree) for tree in (aggregate, server)
    )
    if got != wanted:
        raise ValueError(f"aggregator must return what the server holds, {wanted}, got {got}")
