"""SkewScout: models that travel tell how much the clients differ, and so how often they meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import (
    Aggregator,
    Array,
    ClientView,
    Context,
    DrawnSteps,
    Gathered,
    LocalUpdate,
    Shared,
    Variables,
    concrete,
    part,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import AS_IT_IS, NO_FLIGHT, ONE_MODEL
from fedjax_sim.engine.streams import Client, stream

NOBODY = -1
UNKNOWN = float(np.finfo(np.float32).max)  # a cost that any other is below


class Scout(NamedTuple):
    """What the server keeps.

    Attributes:
        model: that travels in the next round.
        owner: ``int32[]``, who trained it; -1 before the first has.
        home: ``f32[]``, its accuracy there.
        row: ``int32[]``, the row of the cohort whose model is to travel next.
        next_owner: ``int32[]``, its client.
        next_home: ``f32[]``.
        level: ``int32[]``, of the steps: 2^level times the fewest.
        way: ``int32[]``, 1 or -1, the last change of it.
        lost: ``f32[]``, the accuracy lost since, summed over the rounds that measured it.
        measured: ``int32[]``, these rounds.
        cost: ``f32[]``, of the level before; the largest float at the start.
    """

    model: Variables
    owner: Array
    home: Array
    row: Array
    next_owner: Array
    next_home: Array
    level: Array
    way: Array
    lost: Array
    measured: Array
    cost: Array


class Told(NamedTuple):
    """What a client tells: who it is, a random number, what its model and the traveller achieve."""

    owner: Array
    ticket: Array
    home: Array
    away: Array


@part
def scouted(
    local: LocalUpdate,
    score: Callable[[Variables, ClientView], Array],
    *,
    fewest: int = 1,
    most: int = 64,
    rounds: int = 5,
    loss_weight: float = 50.0,
    allowed: float = 0.05,
    traffic_weight: float = 1.0,
) -> LocalUpdate:
    r"""As many local steps τ for all clients as the skew of their samples lets pass (SkewScout).

    .. math:: \min_\tau\; \lambda_{AL} \max(0, AL(\tau) - \sigma_{AL})
              + \lambda_C \frac{C(\tau)}{CM}, \qquad
              AL = A_k(w_k) - \frac{1}{|U \setminus k|} \sum_{j \in U \setminus k} A_j(w_k), \qquad
              \frac{C(\tau)}{CM} = \frac{1}{\tau}

    After every round the model :math:`w_k` that one client of the cohort, drawn uniformly, has
    trained travels to the next cohort U, whose clients tell its accuracy on their samples; AL is
    the mean over some rounds of the same τ. Then τ is doubled, or halved: on in the same direction
    if the last change did not raise the cost, else back (hill climbing). It starts at the fewest
    and turns at the ends of its range. A model is sent once in τ steps, which is C(τ)/CM.

    In the paper each of a few partitions sends its model to others, and the traffic is that between
    them. Here one model travels through the server, which has it.

    Args:
        local: the local update; its epochs and ``shared`` are overridden.
        score: ``(variables, client) -> f32[]``, A (:func:`fedjax_sim.reports.accuracy`).
        fewest: τ at the start and at least.
        most: τ at most; of fewest times a power of 2 those up to it.
        rounds: that measure AL before each change of τ.
        loss_weight: λ_AL.
        allowed: σ_AL.
        traffic_weight: λ_C.

    Returns:
        The local update. A client is sent as much again as its model and 4 bytes, and sends 16; a
        visit costs two passes forward.

    Raises:
        ValueError: if a setting is out of range.

    Source: Hsieh et al. 2020 <https://arxiv.org/abs/1910.00189>, section 7.

    Example:
        >>> import fedjax_sim as fs, optax
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> local = scouted(local, fs.reports.accuracy(problem.model), fewest=2)
        >>> int(local.shared_state(problem.model.init(jax.random.key(0))).shared.level)
        0
    """
    if fewest < 1:
        raise ValueError(f"fewest must be at least 1, got {fewest}")
    if most < fewest:
        raise ValueError(f"most must be at least fewest, {fewest}, got {most}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    weights = {"loss_weight": loss_weight, "allowed": allowed, "traffic_weight": traffic_weight}
    for name, value in weights.items():
        if concrete(value) and not 0 <= value < float("inf"):
            raise ValueError(f"{name} must be finite and not negative, got {value}")
    levels = (most // fewest).bit_length()

    def steps_at(level: Array) -> Array:
        return fewest * 2**level

    def start(variables: Variables) -> Scout:
        none, zero = jnp.int32(NOBODY), jnp.float32(0)
        level, way = jnp.int32(0), jnp.int32(1)
        later = (jnp.int32(0), none, zero, level, way, zero, jnp.int32(0), jnp.float32(UNKNOWN))
        return Scout(variables, none, zero, *later)

    def told(state: Scout) -> tuple[Variables, Array]:
        return state.model, state.level

    def send(trained: Variables, context: Context) -> Told:
        state: Scout = context.shared
        client, own = context.client, context.client.id
        assert own is not None
        ticket = jax.random.uniform(stream(context.key, Client.TICKET), (), jnp.float32)
        return Told(own, ticket, score(trained, client), score(state.model, client))

    def reduce(
        state: Scout, sent: Told, weights: Array, clients: int, aggregator: Aggregator
    ) -> Scout:
        del clients, aggregator
        present = weights > 0
        others = present & (sent.owner != state.owner) & (state.owner != NOBODY)
        count = jnp.sum(others, dtype=jnp.int32).astype(jnp.float32)
        away = tree.row_sum(jnp.where(others, sent.away, 0)) / jnp.maximum(count, 1)
        anyone = count > 0
        row = jnp.argmax(jnp.where(present, sent.ticket, -1)).astype(jnp.int32)
        return climbed(
            state._replace(
                row=row,
                next_owner=sent.owner[row],
                next_home=sent.home[row],
                lost=state.lost + jnp.where(anyone, state.home - away, 0),
                measured=state.measured + anyone.astype(jnp.int32),
            )
        )

    def climbed(state: Scout) -> Scout:
        """With another level, if enough rounds have measured what this one loses."""
        loss = state.lost / jnp.maximum(state.measured, 1).astype(jnp.float32)
        traffic = 1 / steps_at(state.level).astype(jnp.float32)
        cost = loss_weight * jnp.maximum(0, loss - allowed) + traffic_weight * traffic
        way = jnp.where(cost > state.cost, -state.way, state.way)
        there = state.level + way
        way = jnp.where((there < 0) | (there >= levels), -way, way)
        moved = state._replace(
            level=jnp.clip(state.level + way, 0, levels - 1),
            way=way,
            lost=jnp.float32(0),
            measured=jnp.int32(0),
            cost=cost,
        )
        return tree.select(state.measured >= rounds, moved, state)

    def follow(state: Scout, step: Variables, gathered: Gathered) -> Scout:
        """The next traveller is what the server has of it."""
        del step
        update = tree.take(gathered.updates, state.row)
        model = tree.add(gathered.cohort.server, update)
        sets_out = state._replace(model=model, owner=state.next_owner, home=state.next_home)
        return tree.select(gathered.weights[state.row] > 0, sets_out, state)

    drawn = DrawnSteps(lambda key, state: steps_at(state.level), fewest * 2 ** (levels - 1))
    shared = Shared(start, send, reduce, follow, told=told, needs=(NO_FLIGHT, ONE_MODEL, AS_IT_IS))
    return local.change(steps=drawn, shared=shared, max_steps=None)
