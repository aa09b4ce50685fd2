"""Defences that compare the clients' updates with the server's own samples: Zeno and FLTrust."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    ClientView,
    Cohort,
    Context,
    Count,
    Decay,
    LocalUpdate,
    Need,
    NonNegative,
    Objective,
    PreAggregation,
    PyTree,
    Variables,
)
from fedjax_sim.base.parts import check_kind
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import on_root, root_view, rows_at, shuffled
from fedjax_sim.engine.needs import NO_FLIGHT, ONE_MODEL, SYNCHRONOUS, WHOLE_MODEL
from fedjax_sim.server.aggregators._rows import share_of

LAST = Need(
    "preaggregation",
    "to be the last: who is dropped depends on the others",
    lambda parts: not any(part.drops for part in parts.preaggregation[:-1]),
    "preaggregation=(..., suspicion(...))",
)


class suspicion(PreAggregation):
    r"""Zeno: drops the updates that reduce the loss on the server's samples least.

    .. math:: s_k = F_r(w) - F_r(w + \Delta_k) - \rho \lVert \Delta_k \rVert^2

    F_r is the loss on r of the server's own samples (``root`` samples of the data), redrawn in
    every round. Of n updates, the :math:`\lfloor \text{dropped} \cdot n \rfloor` with the lowest
    scores are dropped, and all whose score is not finite. The scores use the state (BatchNorm
    statistics) of w.

    Args:
        objective: the clients' objective, evaluated as F_r on root samples.
        dropped: the share of the updates to drop, an upper bound on the malicious share; it may be
          more than a half.
        rho: ρ, a penalty on long steps.
        batch_size: r; all samples if there are fewer.

    Raises:
        ValueError: if a setting is out of range; when the state is initialised, if the data have no
            ``root``.

    Source: Xie, Koyejo, Gupta 2019 <https://arxiv.org/abs/1805.10032>, Definition 2 and Algorithm
    1, whose updates are gradients, not yet multiplied by the rate γ: its ρ is ours times γ².
    """

    objective: Objective
    dropped: Decay = 0.5
    rho: NonNegative = 1e-3
    _: dataclasses.KW_ONLY
    batch_size: Count = 128

    drops = True
    weighs = True
    needs = (ONE_MODEL, NO_FLIGHT, SYNCHRONOUS, WHOLE_MODEL, LAST)

    def init(self, variables: Variables, data: ClientData) -> PyTree:
        root_view(data)  # rejects data without root before the first round
        return ()

    def apply(
        self, key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        score = on_root(self._scores)(key, cohort.server, cohort.data, updates.params)
        present = weights > 0
        score = jnp.where(present & jnp.isfinite(score), score, -jnp.inf)
        rank = jnp.argsort(jnp.argsort(score, descending=True)).astype(jnp.int32)
        count = jnp.sum(present, dtype=jnp.int32)
        left = count - share_of(count, self.dropped, len(weights))
        kept = jnp.isfinite(score) & (rank < left)
        return updates, jnp.where(kept, weights, 0), state

    def _scores(self, key: Array, server: Variables, client: ClientView, steps: PyTree) -> Array:
        """Returns s_k of each row, ``f32[P]``."""
        order_key, own_key = jax.random.split(key)
        position = shuffled(order_key, client.size, client.capacity)[: self.batch_size]
        batch, context = rows_at(client, position), Context(server, client, own_key)

        def loss(params: PyTree) -> Array:
            return self.objective(params, server.state, batch, context)[0]

        def score(step: PyTree) -> Array:
            after = loss(tree.add(server.params, step))
            return before - after - self.rho * tree.norm(step) ** 2

        before = loss(server.params)
        return jax.vmap(score)(steps).astype(jnp.float32)


class trust(PreAggregation):
    r"""FLTrust: weights updates by agreement with the server's, and scales them to its norm.

    The server trains its model on its own samples (``root`` samples of the data), :math:`g_0 =
    \mathrm{train}(w) - w`; then

    .. math:: TS_k = \mathrm{ReLU}(\cos(\Delta_k, g_0)), \qquad
              \Delta_k \leftarrow \frac{\lVert g_0 \rVert}{\lVert \Delta_k \rVert} \Delta_k

    and :math:`TS_k` replaces the weight. Angles and norms are over the trainable parameters. If no
    client is trusted, the model is unchanged.

    Args:
        local: the server's local update, the clients' own in the paper; it restarts in every round.

    Raises:
        ValueError: if local needs the other clients' samples; when the state is initialised, if the
            data have no ``root``.

    Source: Cao et al. 2021 <https://arxiv.org/abs/2012.13995>, Algorithm 2.
    """

    local: LocalUpdate

    needs = (ONE_MODEL, NO_FLIGHT, SYNCHRONOUS, WHOLE_MODEL)

    def __post_init__(self) -> None:
        check_kind("local must be a", LocalUpdate, self.local)
        if self.local.peers:
            raise ValueError(
                "local must do without the other clients' samples for FLTrust, got peers=True"
            )

    def init(self, variables: Variables, data: ClientData) -> PyTree:
        root_view(data)  # rejects data without root before the first round
        return ()

    def apply(
        self, key: Array, state: PyTree, updates: Variables, weights: Array, cohort: Cohort
    ) -> tuple[Variables, Array, PyTree]:
        server, local = cohort.server, self.local
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
        params = jax.vmap(tree.scale)(length / norm, updates.params)
        scaled = Variables(params, updates.state)
        rows = tree.select_rows(trusted, scaled, jax.tree.map(jnp.zeros_like, updates))
        return rows, jnp.where(jnp.any(trusted), score, weights), state


def _dot(a: PyTree, b: PyTree) -> Array:
    return sum(jax.tree.leaves(jax.tree.map(jnp.vdot, a, b)), jnp.float32(0))
