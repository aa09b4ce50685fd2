"""Several models at the server: which of them a client starts from, and whose mean each becomes."""

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
    ClientView,
    Cohort,
    Context,
    Diagnostic,
    Gathered,
    Objective,
    PyTree,
    Variables,
    part,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import sweep
from fedjax_sim.engine.distances import squared_between
from fedjax_sim.engine.groups import first_fit, smallest_groups
from fedjax_sim.engine.matching import slots_of
from fedjax_sim.engine.needs import ALL_DUE, CLUSTER, PLAIN_SERVER, WHOLE_MODEL

By = Literal["angle", "distance"]

EXACT = 12
"""The largest cohort that :func:`dynamic` groups by
:func:`fedjax_sim.engine.groups.smallest_groups`; a larger one by
:func:`fedjax_sim.engine.groups.first_fit`. The search takes 4¹²/3 steps, and 4 times as many for
each client more."""


class Models(NamedTuple):
    """The server's set of models W, in a stack of fixed size.

    Attributes:
        variables: ``[K, *p]``.
        used: ``int32[]``, how many are in use; they come first.
    """

    variables: Variables
    used: Array


@part
def ifca(clusters: int, objective: Objective, batch_size: int = 50) -> Broadcast:
    r"""Iterative federated clustering: K models, each the mean of the clients that chose it.

    .. math:: \hat\jmath_k = \arg\min_j F_k(\theta_j), \qquad
              \theta_j \leftarrow
              \sum_{k: \hat\jmath_k = j} \frac{a_k}{\sum_{i: \hat\jmath_i = j} a_i} w_k

    a_k are the weights of the round after its pre-aggregations, and the aggregator of the
    composition takes the place of the mean. A model that no client chose stays as it is. The server
    model is the aggregate of all; a server update would not move these, and is refused.

    The first model is the initial server model. Each other one has the entries of every weight
    array in another random order: if an initialiser draws them independently, this is as good a
    random start as the first, and differs from seed to seed.

    Args:
        clusters: K, the models at the server.
        objective: F_k, evaluated on all samples of the client, in training mode.
        batch_size: the samples that are evaluated at once.

    Returns:
        A broadcast; the tag is the chosen model's number ``int32[]``, the lowest of equals.

    Raises:
        ValueError: if clusters or batch_size is below 1.

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
    _check_at_least_one(clusters=clusters, batch_size=batch_size)

    def init(variables: Variables) -> Models:
        copies = tree.stack_copies(variables, clusters)

        def other(j: Array) -> PyTree:
            leaves, structure = jax.tree.flatten(variables.params)
            keys = jax.random.split(jax.random.key(j), len(leaves))
            mixed = [
                jax.random.permutation(key, a.ravel()).reshape(a.shape)
                for key, a in zip(keys, leaves, strict=True)
            ]
            return jax.tree.unflatten(structure, mixed)

        others = jax.vmap(other)(jnp.arange(1, clusters, dtype=jnp.int32))
        params = jax.tree.map(lambda a, b: a.at[1:].set(b), copies.params, others)
        return Models(copies._replace(params=params), jnp.int32(clusters))

    def update(
        state: Models, server: Variables, gathered: Gathered, aggregator: Aggregator
    ) -> Models:
        tag = gathered.cohort.tag
        return state._replace(variables=_reduced(aggregator, state, gathered, tag))

    return Broadcast(
        init=init,
        send=_lowest_loss(objective, batch_size),
        update=update,
        offered=lambda state: state.used,
        several=True,
        tags="cluster",
        needs=(PLAIN_SERVER, WHOLE_MODEL),
    )


@part
def dynamic(
    limit: float | None, by: By, slots: int, objective: Objective, batch_size: int = 50
) -> Broadcast:
    r"""Dynamic clustering: the smallest number of groups within which all clients agree.

    .. math:: w_k^0 = \arg\min_{w \in W} F_k(w), \qquad
              W \leftarrow \Bigl\{ \sum_{k \in G} \frac{a_k}{\sum_{i \in G} a_i} w_k :
              G \in \mathrm{Cluster}_C \Bigr\}

    with the weights and the aggregator that :func:`ifca` uses. Every pair of a group is within C:
    the angle between their updates :math:`c_k = w_k - w_k^0`, or the Euclidean distance of their
    weights :math:`w_k`. If at most ``EXACT`` models meet, no grouping has fewer groups; for more
    models the groups are those of :func:`fedjax_sim.engine.groups.first_fit`. Which of several
    smallest groupings is taken follows from the clients' numbers alone. At first W is the server
    model.

    Args:
        limit: C; for "angle" in degrees, at most 180 (None: 90), where float32 tells 0.05 apart;
          for "distance" it must be given, since what is near depends on the model.
        by: "angle" or "distance", over all weights (BatchNorm statistics do not count). A client
          that did not move is at an angle of 0 to all.
        slots: S, the most models that meet, and so the most groups: W has room for that many.
        objective: F_k, evaluated on all samples of the client, in training mode.
        batch_size: the samples that are evaluated at once.

    Returns:
        A broadcast for schedules in which all slots are due together; the tag is the chosen model's
        number in W ``int32[]``, the lowest of equals.

    Raises:
        ValueError: if a setting is out of range.

    Source: Vo, Rakotobe 2020 <vo2020how>, Algorithm 4, which prints plain means (as equal weights
    give) and adds to W without end; here the groups of a round replace those before.
    """
    if by not in ("angle", "distance"):
        raise ValueError(f"by must be 'angle' or 'distance', got {by!r}")
    if limit is None and by == "angle":
        limit = 90.0
    if limit is None or not limit > 0 or (by == "angle" and limit > 180):
        allowed = "above 0 and at most 180 degrees" if by == "angle" else "above 0"
        raise ValueError(f"limit must be {allowed}, got {limit}")
    _check_at_least_one(slots=slots, batch_size=batch_size)

    def update(
        state: Models, server: Variables, gathered: Gathered, aggregator: Aggregator
    ) -> Models:
        cohort = gathered.cohort
        # By client: neither the result nor its order may depend on rows. Absent ones come last.
        row = jnp.argsort(jnp.where(gathered.weights > 0, cohort.client, 2**31 - 1))[:slots]
        updates, weights, received = tree.take(
            (gathered.updates, gathered.weights, cohort.received), row
        )
        present = weights > 0
        if by == "angle":
            near = _angles_within(updates.params, limit)
        else:
            models = tree.add(received.params, updates.params)
            near = jnp.sqrt(squared_between(models)) <= limit
        group, count = (smallest_groups if slots <= EXACT else first_fit)(near, present)
        # Groups are not those that the models left in: their common measure is the server's model.
        rows = Gathered(updates, weights, cohort._replace(received=received))
        base = tree.stack_copies(cohort.server, slots)
        old = state._replace(variables=base)
        new = _reduced(aggregator, old, rows, group)
        used = jnp.arange(slots, dtype=jnp.int32) < count
        reduced = tree.select_rows(used, new, state.variables)
        return Models(reduced, jnp.where(count > 0, count, state.used))

    return Broadcast(
        init=lambda variables: Models(tree.stack_copies(variables, slots), jnp.int32(1)),
        send=_lowest_loss(objective, batch_size),
        update=update,
        offered=lambda state: state.used,
        several=True,
        tags="cluster",
        needs=(PLAIN_SERVER, ALL_DUE, WHOLE_MODEL, slots_of(slots, most=True)),
    )


@part
def models_taken() -> Diagnostic:
    """How many different models the cohort started from: ``models_taken``.

    Returns:
        A diagnostic that reports ``models_taken``, ``f32[]``.
    """

    def measure(
        key: Array, state: PyTree, server: Variables, models: Variables, cohort: Cohort
    ) -> tuple[dict[str, Array], PyTree]:
        visited = cohort.present
        same = (cohort.tag[:, None] == cohort.tag[None]) & visited[None]
        earlier = jnp.any(jnp.tril(same, -1), axis=1)
        taken = jnp.sum(visited & ~earlier, dtype=jnp.int32).astype(jnp.float32)
        return {"models_taken": taken}, state

    return Diagnostic(init=lambda variables, data: (), measure=measure, needs=(CLUSTER,))


def _lowest_loss(objective: Objective, batch_size: int) -> Callable[..., tuple[Variables, Array]]:
    """``Broadcast.send`` of the model in :class:`Models` with the lowest loss on the client."""

    def loss(variables: Variables, client: ClientView) -> Array:
        params, state = variables

        def add(total: Array, batch: Batch) -> Array:
            context = Context(variables, client, jax.random.key(0))
            value, _ = objective(params, state, batch, context)
            return total + value * jnp.sum(batch.mask, dtype=value.dtype)

        return sweep(client, batch_size, add, jnp.float32(0))

    def send(
        key: Array | None, models: Models, server: Variables, client: ClientView
    ) -> tuple[Variables, Array]:
        def better(j: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
            value = loss(tree.take(models.variables, j), client)
            is_lower = value < best[0]
            return jnp.where(is_lower, value, best[0]), jnp.where(is_lower, j, best[1])

        start = (jnp.float32(jnp.inf), jnp.int32(0))
        chosen = jax.lax.fori_loop(0, models.used, better, start)[1]
        return tree.take(models.variables, chosen), chosen

    return send


def _reduced(aggregator: Aggregator, state: Models, gathered: Gathered, group: Array) -> Variables:
    """Each model of W moved by its group's rows; as it was if a group has none."""
    room = len(jax.tree.leaves(state.variables)[0])
    received = gathered.cohort.received

    # One group after another: stacks for all would take room times the memory of one.
    def of(task: tuple[Array, Variables]) -> Variables:
        number, old = task
        own = jnp.where(group == number, gathered.weights, 0)
        from_old = jax.tree.map(
            lambda update, start, w: update + (start - w[None]), gathered.updates, received, old
        )
        return tree.select(jnp.any(own > 0), tree.add(old, aggregator(from_old, own)), old)

    return jax.lax.map(of, (jnp.arange(room, dtype=jnp.int32), state.variables))


def _angles_within(updates: PyTree, degrees: float) -> Array:
    """``bool[S, S]``: whether the angle of two rows is at most ``degrees``."""
    flat = [a.reshape(len(a), -1) for a in jax.tree.leaves(updates)]
    gram = sum(jnp.einsum("id,jd->ij", a, a, precision="highest") for a in flat)
    length = jnp.sqrt(jnp.diagonal(gram))
    product = length[:, None] * length[None]
    cosine = jnp.clip(gram / jnp.where(product > 0, product, 1), -1, 1)
    return (cosine >= math.cos(math.radians(degrees))) | (product == 0)


def _check_at_least_one(**settings: int) -> None:
    for name, value in settings.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
