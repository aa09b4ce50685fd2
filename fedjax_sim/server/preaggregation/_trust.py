"""FLTrust: the server's own update as the measure for the clients'."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    Cohort,
    LocalUpdate,
    PreAggregation,
    PyTree,
    Variables,
    part,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import on_root, root_view
from fedjax_sim.engine.needs import NO_FLIGHT, ONE_MODEL, WHOLE_MODEL


@part
def trust(local: LocalUpdate) -> PreAggregation:
    r"""Weighs updates by their agreement with the server's own, and scales them to its norm.

    The server trains its model on its own samples, :math:`g_0 = \mathrm{train}(w) - w`; then

    .. math:: TS_k = \mathrm{ReLU}(\cos(\Delta_k, g_0)), \qquad
              \Delta_k \leftarrow \frac{\lVert g_0 \rVert}{\lVert \Delta_k \rVert} \Delta_k

    and :math:`TS_k` replace the weights. Angles and norms are over the trainable parameters. If no
    client is trusted, the model stays as it is.

    Args:
        local: trains the server's model, as the clients train it in the paper; it starts afresh in
            every round.

    Returns:
        A pre-aggregation without state, for data with ``root`` samples.

    Raises:
        ValueError: if local needs the other clients' samples; when the state is initialised, if the
            data have no ``root``.

    Source: Cao et al. 2021 <https://arxiv.org/abs/2012.13995>, Algorithm 2.
    """
    if local.peers:
        raise ValueError(
            "local must do without the other clients' samples for FLTrust, got peers=True"
        )

    def init(variables: Variables, data: ClientData) -> PyTree:
        del variables
        root_view(data)  # refuses data without root before the first round
        return ()

    def apply(
        key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        server = cohort.server
        trained = on_root(local.train)(
            key, server, cohort.data, local.client_state(server), local.shared_state(server)
        )
        own = tree.subtract(trained.variables.params, server.params)
        norm = tree.norms(updates.params)
        along = jax.vmap(_dot, in_axes=(0, None))(updates.params, own)
        # NaN, from an absent or broken row, is not greater than 0 either.
        trusted = (weights > 0) & (along > 0) & jnp.isfinite(norm)
        length = tree.norm(own)
        score = jnp.where(trusted, along / (norm * length), 0)
        fitted = Variables(
            jax.vmap(tree.scale)(length / norm, updates.params),
            updates.state,
        )
        rows = tree.select_rows(trusted, fitted, jax.tree.map(jnp.zeros_like, updates))
        return rows, jnp.where(jnp.any(trusted), score, weights), state

    return PreAggregation(init, apply, needs=(ONE_MODEL, NO_FLIGHT, WHOLE_MODEL))


def _dot(a: PyTree, b: PyTree) -> Array:
    return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b)), jnp.float32(0))
