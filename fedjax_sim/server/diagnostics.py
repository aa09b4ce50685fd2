"""Diagnostics: measurements of a round that change nothing."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import (
    Array,
    ClientData,
    ClientView,
    Cohort,
    Diagnostic,
    LocalUpdate,
    PyTree,
    Variables,
)
from fedjax_sim.clustering import models_taken
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import root_view
from fedjax_sim.engine.clients import list_starts

__all__ = ["central_divergence", "model_divergence", "models_taken"]


class model_divergence(Diagnostic):
    r"""DL: the mean angular distance between the models that trained in a round.

    .. math:: DL = \binom{m}{2}^{-1} \sum_{i<j} \Bigl(1 - \frac{w_i \cdot w_j}
                   {\lVert w_i \rVert \lVert w_j \rVert}\Bigr)
                 = \frac{1}{m-1} \sum_i \lVert u_i - \bar u \rVert^2,
              \qquad u_i = \frac{w_i}{\lVert w_i \rVert}

    The second form is computed: it needs no m² products, and small angles are not lost in the
    rounding of cosines near 1. w are the trainable weights as trained; a single model has DL 0. It
    reports ``DL``, ``f32[]``.

    Source: Xue et al. 2021 <https://arxiv.org/abs/2108.07433>, eq. 3.

    Example:
        >>> models = Variables({"w": jnp.array([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])}, {})
        >>> k = jnp.arange(3)
        >>> cohort = Cohort(None, None, k, k >= 0, None, None, (), None)
        >>> values, _ = model_divergence().measure(None, (), None, models, cohort)
        >>> round(float(values["DL"]), 4)  # (1 + 0 + 1) / 3
        0.6667
    """

    def measure(
        self, key: Array, state: PyTree, server: Variables, models: Variables, cohort: Cohort
    ) -> tuple[dict[str, Array], PyTree]:
        present = cohort.present
        count = jnp.sum(present).astype(jnp.float32)
        rows = [
            jnp.where(tree.expand(present, a), a, 0).astype(jnp.float32)
            for a in jax.tree.leaves(models.params)
        ]
        norms = jnp.sqrt(sum((jax.vmap(_square)(a) for a in rows), jnp.float32(0)))
        total = jnp.float32(0)
        for a in rows:
            unit = a / tree.expand(jnp.maximum(norms, np.finfo(jnp.float32).tiny), a)
            centre = tree.row_sum(unit)[None] / jnp.maximum(count, 1)
            total += _square(jnp.where(tree.expand(present, a), unit - centre, 0))
        return {"DL": total / jnp.maximum(count - 1, 1)}, state


class _Twin(NamedTuple):
    """A federation of one client: its model, and the states of client and server."""

    variables: Variables
    client_state: PyTree
    shared_state: PyTree


class central_divergence(Diagnostic):
    r"""DC: the relative distance of the federated model from a centralised twin.

    .. math:: DC(t) = \frac{\lVert w_{FL}^t - w_C^t \rVert}{\lVert w_C^t \rVert}

    The twin starts from the same :math:`w_1`; in every round it makes one local update on the union
    of the samples of the clients that trained, shuffled together. :math:`w_{FL}` is the server
    model. In a round that does not move the server model (RADFed between two aggregations) it is
    the mean of the models that trained, i.e. the result of an aggregation: the authors' code
    evaluates and measures it after every local round; the paper says "the global model". It
    reports ``DC``, ``f32[]``, over the trainable weights.

    Args:
        local: the twin's local update; pass the clients' own to share its E, B and optimiser. Every
          device runs it whole: a round of it takes as long as the cohort's on one device.

    Raises:
        ValueError: if local needs the other clients' samples: the twin has no other clients.

    Source: Xue et al. 2021 <https://arxiv.org/abs/2108.07433>, section V-B; Zhao et al. 2018
    <https://arxiv.org/abs/1806.00582>, eq. 1; Xue et al. 2021 <https://github.com/yxsub/RADFed>,
    the authors' code, for the rounds between two aggregations.
    """

    local: LocalUpdate

    def __post_init__(self) -> None:
        if self.local.peers:
            raise ValueError(
                "local must do without the other clients' samples for the centralised twin, got "
                "peers=True"
            )

    def init(self, variables: Variables, data: ClientData) -> _Twin:
        local = self.local
        return _Twin(variables, local.client_state(variables), local.shared_state(variables))

    def measure(
        self, key: Array, twin: _Twin, server: Variables, models: Variables, cohort: Cohort
    ) -> tuple[dict[str, Array], _Twin]:
        union = _union(cohort)
        trained = self.local.train(key, twin.variables, union, twin.client_state, twin.shared_state)
        message = tree.stack_copies(trained.message, 1)
        weight = union.size[None].astype(jnp.float32)
        shared_state = self.local.reduce(twin.shared_state, message, weight, 1, tree.mean)
        gap = tree.subtract(_federated(server, models, cohort), trained.variables.params)
        divergence = tree.norm(gap) / tree.norm(trained.variables.params)
        return {"DC": divergence}, _Twin(trained.variables, trained.client_state, shared_state)


def _federated(server: Variables, models: Variables, cohort: Cohort) -> PyTree:
    """Returns the server's weights, or the mean of the models if the round did not move them."""
    pairs = zip(jax.tree.leaves(server.params), jax.tree.leaves(cohort.server.params), strict=True)
    moved = jnp.any(jnp.stack([jnp.any(new != old) for new, old in pairs]))
    weights = cohort.present.astype(jnp.float32)
    mean = tree.mean(models.params, weights)
    return jax.tree.map(lambda w, w_mean: jnp.where(moved, w, w_mean), server.params, mean)


def _union(cohort: Cohort) -> ClientView:
    """Returns all samples of the cohort's clients, as if they were the server's own.

    They are ordered by client, so that the order of the models' rows does not matter.
    """
    data = cohort.data
    clients = jnp.sort(cohort.client)
    # Indexing clamps: client N, i.e. no client, starts and ends at the last entry of start.
    begin, sizes = list_starts(data, clients), data.start[clients + 1] - data.start[clients]
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    most = min(len(clients) * data.capacity, len(data.index))
    entry = jnp.arange(most, dtype=jnp.int32)
    owner = jnp.searchsorted(ends, entry, side="right").astype(jnp.int32)
    # Beyond the end the owner is P, which is clamped too; no minibatch reads these entries.
    rows = data.index[begin[owner] + entry - (ends[owner] - sizes[owner])]
    edges = jnp.stack([jnp.zeros_like(ends[-1]), ends[-1]])
    union = root_view(dataclasses.replace(data, index=rows, root=edges, capacity=most))
    if data.budget is None:
        return union
    budget = jnp.sum(jnp.where(sizes > 0, data.budget[clients], 0), dtype=jnp.int32)
    return dataclasses.replace(union, budget=budget)


def _square(a: Array) -> Array:
    return jnp.vdot(a, a)
