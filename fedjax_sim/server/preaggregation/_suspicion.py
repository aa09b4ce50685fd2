"""Zeno: the loss on the server's own samples as the measure for the clients' updates."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    ClientView,
    Cohort,
    Context,
    Need,
    Objective,
    PreAggregation,
    PyTree,
    Variables,
    concrete,
    part,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import on_root, root_view, rows_at, shuffled
from fedjax_sim.engine.needs import NO_FLIGHT, ONE_MODEL, WHOLE_MODEL
from fedjax_sim.server.aggregators._rows import counted

LAST = Need(
    "preaggregation",
    "to be the last: who is dropped depends on the others",
    lambda parts: not any(part.drops for part in parts.preaggregation[:-1]),
    "preaggregation=(..., suspicion(...))",
)


@part
def suspicion(
    objective: Objective, dropped: float = 0.5, rho: float = 1e-3, *, batch_size: int = 128
) -> PreAggregation:
    r"""Zeno: drops the updates that lower the loss of the server's samples least.

    .. math:: s_k = F_r(w) - F_r(w + \Delta_k) - \rho \lVert \Delta_k \rVert^2

    F_r is the loss of r samples of the server's own, drawn anew in every round. Of n updates the
    :math:`\lfloor \text{dropped} \cdot n \rfloor` of least score are dropped, and all whose score
    is not finite. w keeps its state (BatchNorm statistics) for the scores.

    Args:
        objective: what F_r is the value of, that of the clients.
        dropped: the share of the updates that is dropped; at most as many may be malicious, and it
            may be more than half of them.
        rho: ρ, against steps that are longer than the loss lets expect.
        batch_size: r; all samples, if there are no more.

    Returns:
        A pre-aggregation without state, for data with ``root`` samples.

    Raises:
        ValueError: if a setting is out of range; when the state is initialised, if the data have no
            ``root``.

    Source: Xie, Koyejo, Gupta 2019 <https://arxiv.org/abs/1805.10032>, Definition 2 and Algorithm
    1, whose updates are gradients, not yet multiplied by the rate γ: its ρ is ours times γ².
    """
    if concrete(dropped) and not 0 <= dropped < 1:
        raise ValueError(f"dropped must be in [0, 1), got {dropped}")
    if concrete(rho) and not rho >= 0:
        raise ValueError(f"rho must be at least 0, got {rho}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")

    def init(variables: Variables, data: ClientData) -> PyTree:
        del variables
        root_view(data)  # refuses data without root before the first round
        return ()

    def scored(key: Array, server: Variables, client: ClientView, steps: PyTree) -> Array:
        order_key, own_key = jax.random.split(key)
        position = shuffled(order_key, client.size, client.capacity)[:batch_size]
        batch, context = rows_at(client, position), Context(server, client, own_key)

        def loss(params: PyTree) -> Array:
            return objective(params, server.state, batch, context)[0]

        def score(step: PyTree) -> Array:
            return here - loss(tree.add(server.params, step)) - rho * tree.norm(step) ** 2

        here = loss(server.params)
        return jax.vmap(score)(steps).astype(jnp.float32)

    def apply(
        key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        score = on_root(scored)(key, cohort.server, cohort.data, updates.params)
        present = weights > 0
        score = jnp.where(present & jnp.isfinite(score), score, -jnp.inf)
        rank = jnp.argsort(jnp.argsort(score, descending=True)).astype(jnp.int32)
        rows = jnp.sum(present, dtype=jnp.int32)
        left = rows - counted(dropped, len(weights))(rows)
        kept = jnp.isfinite(score) & (rank < left)
        return updates, jnp.where(kept, weights, 0), state

    needs = ONE_MODEL, NO_FLIGHT, WHOLE_MODEL, LAST
    return PreAggregation(init, apply, drops=True, weighs=True, needs=needs)
