"""Which model a slot starts from when it leaves the server."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import Aggregator, Array, Broadcast, ClientView, Gathered, Variables, part
from fedjax_sim.clustering import dynamic, ifca
from fedjax_sim.engine import tree

__all__ = ["Past", "dynamic", "ifca", "latest", "stale"]


@part
def latest() -> Broadcast:
    """The server model w_t, the same for all."""
    return Broadcast(
        init=lambda variables: (),
        send=lambda key, state, server, client: (server, ()),
        update=lambda state, server, gathered, aggregator: state,
        reads_updates=False,
    )


class Past(NamedTuple):
    """The last server models, in a ring.

    Attributes:
        models: ``[most + 1, *p]``; the model after n updates is row ``n % (most + 1)``.
        updates: ``int32[]``, n, the updates so far.
    """

    models: Variables
    updates: Array


@part
def stale(most: int) -> Broadcast:
    r"""A server model of some updates ago, as if other models had arrived while the client trained.

    .. math:: w_{recv} = w_{t-d}, \qquad d \sim U\{0, 1, \dots, \min(d_{max}, t)\}

    independently for every slot that leaves the server. The tag is d, ``int32[]``. An evaluation,
    which draws nothing, gets the latest model.

    Args:
        most: :math:`d_{max}`; 0 is :func:`latest`. The server keeps that many more models.

    Returns:
        A broadcast.

    Raises:
        ValueError: if most is negative.

    Source: Xie et al. 2019 <https://arxiv.org/abs/1903.03934>, section 6, which simulates staleness
    like this.

    >>> part = stale(2)
    >>> sent = part.update(part.init(jnp.float32(0)), jnp.float32(1), None, None)
    >>> draw = lambda seed: part.send(jax.random.key(seed), sent, jnp.float32(1), None)
    >>> sorted({(float(model), int(d)) for model, d in map(draw, range(9))})
    [(0.0, 1), (1.0, 0)]
    """
    if most < 0:
        raise ValueError(f"most must be at least 0, got {most}")
    rows = most + 1

    def send(
        key: Array | None, past: Past, server: Variables, client: ClientView
    ) -> tuple[Variables, Array]:
        del client
        if key is None:
            return server, jnp.int32(0)
        age = jax.random.randint(key, (), 0, jnp.minimum(past.updates, most) + 1, jnp.int32)
        return tree.take(past.models, (past.updates - age) % rows), age

    def update(past: Past, server: Variables, gathered: Gathered, aggregator: Aggregator) -> Past:
        del gathered, aggregator
        updates = past.updates + 1
        kept = jax.tree.map(lambda a, w: a.at[updates % rows].set(w), past.models, server)
        return Past(kept, updates)

    return Broadcast(
        init=lambda variables: Past(
            tree.stack_copies(variables, rows, "max_staleness"), jnp.int32(0)
        ),
        send=send,
        update=update,
        several=True,
        tags="staleness",
    )
