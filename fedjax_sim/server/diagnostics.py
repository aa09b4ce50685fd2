"""Diagnostics: measurements of a round that change nothing."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import (
    Array,
    Batch,
    ClientData,
    ClientView,
    Cohort,
    Context,
    Count,
    Diagnostic,
    LocalUpdate,
    Objective,
    PyTree,
    Variables,
)
from fedjax_sim.clustering import models_taken
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import root_view, sweep
from fedjax_sim.engine.clients import Visits, client_sizes, list_starts, samples_of, visits

__all__ = ["central_divergence", "gradient_dissimilarity", "model_divergence", "models_taken"]


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
    the mean of the models that trained, i.e. the result of an aggregation, which the authors' code
    evaluates after every local round (it does not compute DC); the paper says "the global model".
    It reports ``DC``, ``f32[]``, over the trainable weights.

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


class gradient_dissimilarity(Diagnostic):
    r"""B² and BCGV: how far the clients' gradients are from each other at the server model.

    .. math:: B^2 = \frac{\sum_k p_k \lVert \nabla F_k(w) \rVert^2}{\lVert \nabla F(w) \rVert^2},
              \qquad
              \text{BCGV} = \sum_k p_k \lVert \nabla F_k(w) - \nabla F(w) \rVert^2,
              \qquad p_k = \frac{n_k}{n}, \quad \nabla F = \sum_k p_k \nabla F_k

    w is the server model after the round, and the sums are over all N clients, whether or not they
    trained. B² is 1 and BCGV is 0 if all clients have the same gradient. Both come from one pass
    over the clients, in which mean and variance are updated client by client: the memory is that
    of two gradients, and :math:`B^2 = 1 + \text{BCGV} / \lVert \nabla F \rVert^2` does not
    subtract two large numbers. It reports ``B2`` and ``BCGV``, ``f32[]``, over the trainable
    weights; a client without samples does not count.

    Samples are taken in their stored order and without the local update's transforms; the model is
    in training mode: BatchNorm sees minibatches of B. Every round costs a pass over the samples of
    all clients, and every device runs it whole.

    Args:
        objective: F.
        batch_size: B.

    Raises:
        ValueError: if batch_size is not positive; in the first round, if samples stream in or stay
            on the host.

    Source: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith 2020 <https://arxiv.org/abs/1812.06127>,
    Definition 3 (B²); Vo, Rakotobe 2020 <vo2020how>, Table 3 (BCGV, and B² as BGD).

    Example:
        >>> def squared_error(params, state, batch, context):
        ...     return 0.5 * jnp.mean((params - batch.x) ** 2, where=batch.mask), state
        >>> data = ClientData(jnp.array([1.0, 1.0, 4.0]), jnp.zeros(3, jnp.int32), jnp.arange(3),
        ...                   jnp.array([0, 2, 3]), capacity=2)  # gradients -1 and -4 at w = 0
        >>> none = Cohort(None, None, None, None, None, None, (), data)
        >>> measure = gradient_dissimilarity(squared_error).measure
        >>> values, _ = measure(None, (), Variables(jnp.float32(0), {}), None, none)
        >>> {name: round(float(value), 4) for name, value in values.items()}  # 6 / 2², 6 - 2²
        {'B2': 1.5, 'BCGV': 2.0}
    """

    objective: Objective
    batch_size: Count = 128

    def measure(
        self, key: Array, state: PyTree, server: Variables, models: Variables, cohort: Cohort
    ) -> tuple[dict[str, Array], PyTree]:
        data, clients = cohort.data, jnp.arange(cohort.data.clients, dtype=jnp.int32)
        samples = samples_of(data)

        def add(carry: PyTree, client: tuple[Visits, Array]) -> tuple[PyTree, None]:
            (total, mean, spread), (visit, size) = carry, client
            weight = size.astype(jnp.float32)
            total = total + weight
            share = weight / jnp.maximum(total, 1)
            gap = tree.subtract(self._gradient(server, visit.view(samples, data)), mean)
            mean = jax.tree.map(lambda m, g: m + share * g, mean, gap)
            return (total, mean, spread + weight * (1 - share) * jnp.square(tree.norm(gap))), None

        zero = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), server.params)
        each = visits(data, clients), client_sizes(data, clients)
        (total, mean, spread), _ = jax.lax.scan(add, (jnp.float32(0), zero, jnp.float32(0)), each)
        variance = spread / jnp.maximum(total, 1)
        ratio = jnp.where(variance > 0, variance / jnp.square(tree.norm(mean)), 0)
        return {"B2": 1 + ratio, "BCGV": variance}, state

    def _gradient(self, server: Variables, client: ClientView) -> PyTree:
        """Returns ∇F_k, ``f32[*p]``; zeros for a client without samples."""
        context = Context(server, client, jax.random.key(0))

        def add(total: PyTree, batch: Batch) -> PyTree:
            gradient, _ = jax.grad(self.objective, has_aux=True)(*server, batch, context)
            real = jnp.sum(batch.mask).astype(jnp.float32)
            share = real / jnp.maximum(client.size, 1).astype(jnp.float32)
            return jax.tree.map(lambda t, g: t + share * g.astype(jnp.float32), total, gradient)

        zero = jax.tree.map(lambda w: jnp.zeros(w.shape, jnp.float32), server.params)
        return sweep(client, self.batch_size, add, zero)


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
