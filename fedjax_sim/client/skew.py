"""SkewScout: local steps adapted to the label skew that models show at other clients."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import (
    Aggregator,
    Array,
    Context,
    Count,
    DrawnSteps,
    Finite,
    Gathered,
    LocalUpdate,
    Shared,
    Variables,
    Wrapper,
)
from fedjax_sim.client.reports import Score
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import AS_IT_IS, NO_FLIGHT, ONE_MODEL, ONLY_WEIGHED
from fedjax_sim.engine.streams import Client, stream

NOBODY = -1
UNKNOWN = float(np.finfo(np.float32).max)
"""The cost before any is known: every other cost is lower."""


class Scout(NamedTuple):
    """The server's state.

    Attributes:
        model: the model that is evaluated at other clients in the next round.
        owner: ``int32[]``, the client that trained it; -1 before the first round.
        home: ``f32[]``, its accuracy at that client.
        row: ``int32[]``, the row of the cohort whose model is evaluated next.
        next_owner: ``int32[]``, the client of that row.
        next_home: ``f32[]``, the accuracy of its model at that client.
        level: ``int32[]``, the level of τ, which is 2^level times the fewest.
        way: ``int32[]``, 1 or -1, the direction of its last change.
        lost: ``f32[]``, the accuracy lost since then, summed over the rounds that measured it.
        measured: ``int32[]``, the number of these rounds.
        cost: ``f32[]``, the cost of the previous level; the largest float at the start.
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


class Accuracies(NamedTuple):
    """A client's message.

    Attributes:
        owner: ``int32[]``, the client.
        ticket: ``f32[]``, a random number; the client with the largest is sampled.
        home: ``f32[]``, the accuracy of its own model.
        away: ``f32[]``, the accuracy of the model under evaluation.
    """

    owner: Array
    ticket: Array
    home: Array
    away: Array


class skewscout(Wrapper):
    r"""A local update whose τ steps, the same for all clients, follow label skew (SkewScout).

    .. math:: \min_\tau\; \lambda_{AL} \max(0, AL(\tau) - \sigma_{AL})
              + \lambda_C \frac{C(\tau)}{CM}, \qquad
              AL = A_k(w_k) - \frac{1}{|U \setminus k|} \sum_{j \in U \setminus k} A_j(w_k), \qquad
              \frac{C(\tau)}{CM} = \frac{1}{\tau}

    After every round the trained model :math:`w_k` of one client of the cohort, drawn uniformly, is
    sent to the next cohort U, whose clients report its accuracy on their samples; AL is the mean
    over some rounds of the same τ. Then τ is doubled or halved: in the same direction if the last
    change did not raise the cost, else in the other one (hill climbing). τ starts at the smallest
    value and turns at the ends of its range. A model is sent once in τ steps: C(τ)/CM.

    In the paper each of a few partitions sends its model to others, and the traffic is between
    partitions. Here one model travels through the server, which has it. A client receives a second
    model and 4 bytes, and sends 16 bytes; a visit costs two forward passes.

    Args:
        local: the local update; its epochs and ``shared`` are overridden.
        score: ``(variables, client) -> f32[]``, A (:class:`fedjax_sim.reports.accuracy`).
        fewest: the initial and smallest τ.
        most: upper bound on τ, which runs over fewest·2^i.
        rounds: the number of rounds that measure AL before each change of τ.
        loss_weight: λ_AL.
        allowed: σ_AL.
        traffic_weight: λ_C.

    Raises:
        ValueError: if local shares anything already, or most is less than fewest.

    Source: Hsieh et al. 2020 <https://arxiv.org/abs/1910.00189>, section 7.
    """

    score: Score
    _: dataclasses.KW_ONLY
    fewest: Count = 1
    most: int = 64
    rounds: Count = 5
    loss_weight: Finite = 50.0
    allowed: Finite = 0.05
    traffic_weight: Finite = 1.0

    sets = ("steps", "max_steps")

    def __post_init__(self) -> None:
        if self.most < self.fewest:
            raise ValueError(f"most must be at least fewest, {self.fewest}, got {self.most}")
        _ = self.inner  # checks the settings of local

    @property
    def levels(self) -> int:
        """The number of values of τ."""
        return (self.most // self.fewest).bit_length()

    @functools.cached_property
    def inner(self) -> LocalUpdate:
        steps, shared = _LevelSteps(self.fewest, self.levels), _TravellingModel(self)
        return self.local.change(steps=steps, shared=shared, max_steps=None)


class _LevelSteps(DrawnSteps):
    """The number of steps of the level in :class:`Scout`."""

    fewest: int
    levels: int

    @property
    def most(self) -> int:
        return self.fewest * 2 ** (self.levels - 1)

    def draw(self, key: Array, shared: Scout) -> Array:
        return self.fewest * 2**shared.level


class _TravellingModel(Shared):
    """The model that is evaluated at other clients, and the decision of :class:`skewscout`."""

    settings: skewscout

    needs = (NO_FLIGHT, ONE_MODEL, AS_IT_IS, ONLY_WEIGHED)

    def init(self, variables: Variables) -> Scout:
        none, zero = jnp.int32(NOBODY), jnp.float32(0)
        level, way = jnp.int32(0), jnp.int32(1)
        later = (jnp.int32(0), none, zero, level, way, zero, jnp.int32(0), jnp.float32(UNKNOWN))
        return Scout(variables, none, zero, *later)

    def downloaded(self, state: Scout) -> tuple[Variables, Array]:
        return state.model, state.level

    def send(self, trained: Variables, context: Context) -> Accuracies:
        state: Scout = context.shared
        client, score = context.client, self.settings.score
        assert client.id is not None
        ticket = jax.random.uniform(stream(context.key, Client.TICKET), (), jnp.float32)
        return Accuracies(client.id, ticket, score(trained, client), score(state.model, client))

    def reduce(
        self, state: Scout, sent: Accuracies, weights: Array, clients: int, aggregator: Aggregator
    ) -> Scout:
        present = weights > 0
        others = present & (sent.owner != state.owner) & (state.owner != NOBODY)
        count = jnp.sum(others, dtype=jnp.int32).astype(jnp.float32)
        away = tree.row_sum(jnp.where(others, sent.away, 0)) / jnp.maximum(count, 1)
        anyone = count > 0
        row = jnp.argmax(jnp.where(present, sent.ticket, -1)).astype(jnp.int32)
        return self._climbed(
            state._replace(
                row=row,
                next_owner=sent.owner[row],
                next_home=sent.home[row],
                lost=state.lost + jnp.where(anyone, state.home - away, 0),
                measured=state.measured + anyone.astype(jnp.int32),
            )
        )

    def _climbed(self, state: Scout) -> Scout:
        """Changes the level if enough rounds have measured the accuracy lost at this one."""
        of = self.settings
        loss = state.lost / jnp.maximum(state.measured, 1).astype(jnp.float32)
        traffic = 1 / (of.fewest * 2**state.level).astype(jnp.float32)
        cost = of.loss_weight * jnp.maximum(0, loss - of.allowed) + of.traffic_weight * traffic
        way = jnp.where(cost > state.cost, -state.way, state.way)
        there = state.level + way
        way = jnp.where((there < 0) | (there >= of.levels), -way, way)
        moved = state._replace(
            level=jnp.clip(state.level + way, 0, of.levels - 1),
            way=way,
            lost=jnp.float32(0),
            measured=jnp.int32(0),
            cost=cost,
        )
        return tree.select(state.measured >= of.rounds, moved, state)

    def follow(self, state: Scout, step: Variables, gathered: Gathered) -> Scout:
        update = tree.take(gathered.updates, state.row)
        model = tree.add(gathered.cohort.server, update)
        sets_out = state._replace(model=model, owner=state.next_owner, home=state.next_home)
        return tree.select(gathered.weights[state.row] > 0, sets_out, state)
