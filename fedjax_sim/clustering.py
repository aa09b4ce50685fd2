"""Several models at the server: their choice by the clients, and their updates."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Aggregator,
    Array,
    Batch,
    Broadcast,
    ClientData,
    ClientView,
    Cohort,
    Context,
    Count,
    Diagnostic,
    Gathered,
    Need,
    Objective,
    PyTree,
    Variables,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import sweep
from fedjax_sim.engine.groups import first_fit, smallest_groups
from fedjax_sim.engine.matching import slots_of
from fedjax_sim.engine.needs import ALL_DUE, CLUSTER, PLAIN_SERVER, WHOLE_MODEL

By = Literal["angle", "distance"]

EXACT = 12
"""The largest cohort that :func:`dynamic` groups by
:func:`fedjax_sim.engine.groups.smallest_groups`; larger ones use
:func:`fedjax_sim.engine.groups.first_fit`. The search takes 4¹²/3 steps, and 4 times as many for
each additional client."""


class Models(NamedTuple):
    """The server's set of models W, in a stack of fixed size.

    Attributes:
        variables: ``[K, *p]``.
        used: ``int32[]``, the number of models in use; they come first.
    """

    variables: Variables
    used: Array


class _Clusters(Broadcast):
    """Several models at the server; a client starts from the one with the lowest loss."""

    several = True
    tags = "cluster"
    numbers = 1

    def offered(self, state: Models) -> Array:
        return state.used


class ifca(_Clusters):
    r"""Iterative federated clustering (IFCA): K models, each the mean of the clients that chose it.

    .. math:: \hat\jmath_k = \arg\min_j F_k(\theta_j), \qquad
              \theta_j \leftarrow
              \sum_{k: \hat\jmath_k = j} \frac{a_k}{\sum_{i: \hat\jmath_i = j} a_i} w_k

    a_k are the weights of the round after its pre-aggregations, and the composition's aggregator
    replaces the mean. A model that no client chose stays unchanged. The server model is the
    aggregate of all updates; a server update would not move the K models and is rejected.

    The first model is the initial server model. Each other model has the entries of every weight
    array in another random order: if an initialiser draws them independently, this is as good a
    random start as the first, and it differs between seeds. The tag is the index of the chosen
    model, ``int32[]``, the lowest in case of ties.

    Args:
        clusters: K, the number of models at the server.
        objective: F_k, evaluated on all samples of the client, in training mode.
        batch_size: the number of samples that are evaluated at once.

    Source: Ghosh et al. 2020 <https://arxiv.org/abs/2006.04088>, Algorithm 1 (model averaging).

    Example:
        >>> def squared_error(params, state, batch, context):
        ...     return jnp.mean((batch.x - params) ** 2, where=batch.mask), state
        >>> client = ClientView(jnp.array([1.0, 3.0, 8.0]), jnp.zeros(3, jnp.int32), jnp.arange(3),
        ...                     jnp.int32(0), jnp.int32(3), 3)
        >>> two = Models(Variables(jnp.array([0.0, 4.0]), ()), jnp.int32(2))
        >>> chosen, tag = ifca(2, squared_error).send(None, two, Variables(0.0, ()), client)
        >>> float(chosen.params), int(tag)
        (4.0, 1)
    """

    clusters: Count
    objective: Objective
    batch_size: Count = 50

    @property
    def needs(self) -> tuple[Need, ...]:
        return PLAIN_SERVER, WHOLE_MODEL

    def init(self, variables: Variables, data: ClientData) -> Models:
        copies = tree.stack_copies(variables, self.clusters, "clusters")

        def other(j: Array) -> PyTree:
            leaves, structure = jax.tree.flatten(variables.params)
            keys = jax.random.split(jax.random.key(j), len(leaves))
            mixed = [
                jax.random.permutation(key, a.ravel()).reshape(a.shape)
                for key, a in zip(keys, leaves, strict=True)
            ]
            return jax.tree.unflatten(structure, mixed)

        others = jax.vmap(other)(jnp.arange(1, self.clusters, dtype=jnp.int32))
        params = jax.tree.map(lambda a, b: a.at[1:].set(b), copies.params, others)
        return Models(copies._replace(params=params), jnp.int32(self.clusters))

    def send(
        self, key: Array | None, state: Models, server: Variables, client: ClientView
    ) -> tuple[Variables, Array]:
        return _lowest_loss(self.objective, self.batch_size, state, client)

    def update(
        self, state: Models, server: Variables, gathered: Gathered, aggregator: Aggregator
    ) -> Models:
        tag = gathered.cohort.tag
        return state._replace(variables=_reduced(aggregator, state, gathered, tag))


class dynamic(_Clusters):
    r"""Dynamic clustering: the smallest number of groups in which all clients agree.

    .. math:: w_k^0 = \arg\min_{w \in W} F_k(w), \qquad
              W \leftarrow \Bigl\{ \sum_{k \in G} \frac{a_k}{\sum_{i \in G} a_i} w_k :
              G \in \mathrm{Cluster}_C \Bigr\}

    with the weights and the aggregator of :func:`ifca`. Every pair of a group is within C, measured
    by the angle between their updates :math:`c_k = w_k - w_k^0` or by the Euclidean distance of
    their weights :math:`w_k`. With at most ``EXACT`` models no grouping has fewer groups; more
    models are grouped by :func:`fedjax_sim.engine.groups.first_fit`. Among several smallest
    groupings, the choice depends only on the client numbers. W starts as the server model. All
    slots must be due together. The tag is the index of the chosen model in W, ``int32[]``, the
    lowest in case of ties.

    Args:
        limit: C; for "angle" in degrees, at most 180, with a resolution of 0.05 in float32; the
          scale of a "distance" depends on the model.
        by: "angle" or "distance", over all weights (without BatchNorm statistics). A client whose
          model did not change has an angle of 0 to all others.
        slots: S, the largest number of models and thus of groups: the size of W.
        objective: F_k, evaluated on all samples of the client, in training mode.
        batch_size: the number of samples that are evaluated at once.

    Source: Vo, Rakotobe 2020 <vo2020how>, Algorithm 4, which has plain means (equal weights) and
    lets W grow without limit; here the groups of a round replace the previous ones.
    """

    limit: float
    by: By
    slots: int
    objective: Objective
    batch_size: Count = 50

    def __post_init__(self) -> None:
        angle = self.by == "angle"
        if not self.limit > 0 or (angle and self.limit > 180):
            allowed = "above 0 and at most 180 degrees" if angle else "above 0"
            raise ValueError(f"limit must be {allowed}, got {self.limit}")

    @property
    def needs(self) -> tuple[Need, ...]:
        return PLAIN_SERVER, ALL_DUE, WHOLE_MODEL, slots_of(self.slots, most=True)

    def init(self, variables: Variables, data: ClientData) -> Models:
        return Models(tree.stack_copies(variables, self.slots), jnp.int32(1))

    def send(
        self, key: Array | None, state: Models, server: Variables, client: ClientView
    ) -> tuple[Variables, Array]:
        return _lowest_loss(self.objective, self.batch_size, state, client)

    def update(
        self, state: Models, server: Variables, gathered: Gathered, aggregator: Aggregator
    ) -> Models:
        cohort, slots = gathered.cohort, self.slots
        # By client: neither the result nor its order may depend on rows. Absent ones come last.
        row = jnp.argsort(jnp.where(gathered.weights > 0, cohort.client, 2**31 - 1))[:slots]
        updates, weights, received = tree.take(
            (gathered.updates, gathered.weights, cohort.received), row
        )
        present = weights > 0
        if self.by == "angle":
            near = _angles_within(updates.params, self.limit)
        else:
            models = tree.add(received.params, updates.params)
            near = jnp.sqrt(tree.pairwise_squared_distances(models)) <= self.limit
        group, count = (smallest_groups if slots <= EXACT else first_fit)(near, present)
        # New groups mix rows that received different models: all are measured from the server's.
        rows = Gathered(updates, weights, cohort._replace(received=received))
        base = tree.stack_copies(cohort.server, slots)
        new = _reduced(aggregator, state._replace(variables=base), rows, group)
        used = jnp.arange(slots, dtype=jnp.int32) < count
        reduced = tree.select_rows(used, new, state.variables)
        return Models(reduced, jnp.where(count > 0, count, state.used))


class models_taken(Diagnostic):
    """``models_taken``: the number of different models from which the cohort started, ``f32[]``."""

    @property
    def needs(self) -> tuple[Need, ...]:
        return (CLUSTER,)

    def measure(
        self, key: Array, state: PyTree, server: Variables, models: Variables, cohort: Cohort
    ) -> tuple[dict[str, Array], PyTree]:
        visited = cohort.present
        same = (cohort.tag[:, None] == cohort.tag[None]) & visited[None]
        earlier = jnp.any(jnp.tril(same, -1), axis=1)
        taken = jnp.sum(visited & ~earlier, dtype=jnp.int32).astype(jnp.float32)
        return {"models_taken": taken}, state


def loss_on(
    objective: Objective, batch_size: int, client: ClientView
) -> Callable[[Variables], Array]:
    """Returns the function that computes a model's loss, summed over a client's samples."""

    def loss(variables: Variables) -> Array:
        params, state = variables

        def add(total: Array, batch: Batch) -> Array:
            context = Context(variables, client, jax.random.key(0))
            value, _ = objective(params, state, batch, context)
            return total + value * jnp.sum(batch.mask, dtype=value.dtype)

        return sweep(client, batch_size, add, jnp.float32(0))

    return loss


def _lowest_loss(
    objective: Objective, batch_size: int, models: Models, client: ClientView
) -> tuple[Variables, Array]:
    """Returns the model with the lowest loss on the client, and its index."""
    loss = loss_on(objective, batch_size, client)

    def better(j: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        value = loss(tree.take(models.variables, j))
        is_lower = value < best[0]
        return jnp.where(is_lower, value, best[0]), jnp.where(is_lower, j, best[1])

    start = (jnp.float32(jnp.inf), jnp.int32(0))
    chosen = jax.lax.fori_loop(0, models.used, better, start)[1]
    return tree.take(models.variables, chosen), chosen


def _reduced(aggregator: Aggregator, state: Models, gathered: Gathered, group: Array) -> Variables:
    """Returns each model of W moved by the rows of its group; unchanged if it has none."""
    count = len(jax.tree.leaves(state.variables)[0])
    received = gathered.cohort.received

    # One group after another: stacks for all groups would take that many times the memory.
    def of(task: tuple[Array, Variables]) -> Variables:
        number, old = task
        own = jnp.where(group == number, gathered.weights, 0)
        from_old = jax.tree.map(
            lambda update, start, w: update + (start - w[None]), gathered.updates, received, old
        )
        return tree.select(jnp.any(own > 0), tree.add(old, aggregator(from_old, own)), old)

    return jax.lax.map(of, (jnp.arange(count, dtype=jnp.int32), state.variables))


def _angles_within(updates: PyTree, degrees: float) -> Array:
    """Returns whether the angle of two rows is at most ``degrees``, ``bool[S, S]``."""
    flat = [a.reshape(len(a), -1) for a in jax.tree.leaves(updates)]
    gram = sum(jnp.einsum("id,jd->ij", a, a, precision="highest") for a in flat)
    length = jnp.sqrt(jnp.diagonal(gram))
    product = length[:, None] * length[None]
    cosine = jnp.clip(gram / jnp.where(product > 0, product, 1), -1, 1)
    return (cosine >= math.cos(math.radians(degrees))) | (product == 0)
