"""FLTrust: the server's own update as the measure of the clients'."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim import tree
from fedjax_sim.base import (
    Array,
    ClientData,
    Cohort,
    LocalUpdate,
    PyTree,
    Screen,
    Variables,
)
from fedjax_sim.batches import on_root, root_view


def trust(local: LocalUpdate) -> Screen:
    r"""Weighs clients by how far their change agrees with the server's own, and fits their norms.

    The server trains its model on its own samples, :math:`g_0 = \mathrm{train}(w) - w`; then

    .. math:: TS_k = \mathrm{ReLU}(\cos(\Delta_k, g_0)), \qquad
              w_k \leftarrow w + \frac{\lVert g_0 \rVert}{\lVert \Delta_k \rVert} \Delta_k

    and :math:`TS_k` are the weights, whatever they were before. Angles and norms are over the
    trainable parameters. Where nobody is trusted the model stays as it is.

    Args:
        local: trains the server's model, as the clients train it in the paper; it begins anew in
            every round.

    Returns:
        A screen without state, for data with ``root`` samples.

    Raises:
        ValueError: if local needs the other clients' samples; when the state is initialised, if the
            data have no ``root``.

    Source: Cao, Fang, Liu, Gong, "FLTrust: Byzantine-robust federated learning via trust
    bootstrapping", NDSS 2021, Algorithm 2.
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
        key: Array, state: PyTree, models: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        server = cohort.server
        trained = on_root(local)(
            key, server, cohort.data, local.memory(server), local.shared(server)
        )
        own = jax.tree.map(jnp.subtract, trained.variables.params, server.params)
        change = jax.tree.map(jnp.subtract, models.params, cohort.received.params)
        norm = jax.vmap(tree.norm)(change)
        along = jax.vmap(_dot, in_axes=(0, None))(change, own)
        # Not a number, of an absent or broken row, is not greater than 0 either.
        trusted = (weights > 0) & (along > 0) & jnp.isfinite(norm)
        length = tree.norm(own)
        score = jnp.where(trusted, along / (norm * length), 0)
        factor = length / norm

        def fitted(w: Array, delta: Array) -> Array:
            by = tree.expand(factor, delta).astype(delta.dtype)
            return w + jnp.where(tree.expand(trusted, delta), by * delta, 0)

        params = jax.tree.map(fitted, cohort.received.params, change)
        kept = tree.stack_copies(server.state, len(weights))
        rows = Variables(params, tree.select_rows(trusted, models.state, kept))
        return rows, jnp.where(jnp.any(trusted), score, weights), state

    return Screen(init, apply)


def _dot(a: PyTree, b: PyTree) -> Array:
    return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b)), jnp.float32(0))
