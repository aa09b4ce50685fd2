"""The model that a slot starts from when it leaves the server."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Aggregator,
    Array,
    Broadcast,
    ClientData,
    ClientView,
    Gathered,
    Natural,
    PyTree,
    Variables,
)
from fedjax_sim.clustering import dynamic, ifca
from fedjax_sim.engine import tree
from fedjax_sim.server.collaborative import attentive, first_order

__all__ = ["attentive", "dynamic", "first_order", "ifca", "latest", "stale"]


class latest(Broadcast):
    """Sends the server model w_t to all."""

    reads_updates = False

    def send(
        self, key: Array | None, state: PyTree, server: Variables, client: ClientView
    ) -> tuple[Variables, PyTree]:
        return server, ()


class Past(NamedTuple):
    """The last server models, in a ring buffer."""

    models: Variables  # [most + 1, *p]; the model after n updates is row n % (most + 1)
    updates: Array  # int32[], n, the number of updates


class stale(Broadcast):
    r"""Sends an older server model, as if other updates had arrived during local training.

    .. math:: w_{recv} = w_{t-d}, \qquad d \sim U\{0, 1, \dots, \min(d_{max}, t)\}

    independently for every slot that leaves the server. The tag is d, ``int32[]``. Evaluations draw
    nothing and use the latest model.

    Args:
        most: :math:`d_{max}`; 0 is :func:`latest`. The server keeps most + 1 more models.

    Raises:
        ValueError: if most is negative.

    Source: Xie et al. 2019 <https://arxiv.org/abs/1903.03934>, section 6, which simulates staleness
    like this.

    >>> part = stale(2)
    >>> past = part.update(part.init(jnp.float32(0), None), jnp.float32(1), None, None)
    >>> draw = lambda seed: part.send(jax.random.key(seed), past, jnp.float32(1), None)
    >>> sorted({(float(model), int(d)) for model, d in map(draw, range(9))})
    [(0.0, 1), (1.0, 0)]
    """

    most: Natural

    several = True
    tags = "staleness"

    def init(self, variables: Variables, data: ClientData) -> Past:
        return Past(tree.stack_copies(variables, self.most + 1, "max_staleness"), jnp.int32(0))

    def send(
        self, key: Array | None, state: Past, server: Variables, client: ClientView
    ) -> tuple[Variables, Array]:
        if key is None:
            return server, jnp.int32(0)
        oldest = jnp.minimum(state.updates, self.most)
        age = jax.random.randint(key, (), 0, oldest + 1, jnp.int32)
        return tree.take(state.models, (state.updates - age) % (self.most + 1)), age

    def update(
        self, state: Past, server: Variables, gathered: Gathered, aggregator: Aggregator
    ) -> Past:
        updates = state.updates + 1
        row = updates % (self.most + 1)
        return Past(jax.tree.map(lambda a, w: a.at[row].set(w), state.models, server), updates)
