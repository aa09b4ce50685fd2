"""LoAdaBoost: more epochs for clients whose loss is high compared with the others'."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax.numpy as jnp

from fedjax_sim.base import (
    Aggregator,
    Array,
    Context,
    LocalUpdate,
    Part,
    Shared,
    Variables,
    Wrapper,
)
from fedjax_sim.client.reports import Score


class _MedianLoss(Shared):
    """The median of the losses that the clients of the last cohort ended with."""

    loss: Score

    def init(self, variables: Variables) -> Array:
        return jnp.float32(jnp.inf)

    def send(self, trained: Variables, context: Context) -> Array:
        return self.loss(trained, context.client).astype(jnp.float32)

    def reduce(
        self, median: Array, sent: Array, weights: Array, clients: int, aggregator: Aggregator
    ) -> Array:
        came = (weights > 0) & jnp.isfinite(sent)
        count = jnp.sum(came, dtype=jnp.int32)
        order = jnp.sort(jnp.where(came, sent, jnp.inf))
        middle = (order[jnp.maximum(count - 1, 0) // 2] + order[count // 2]) / 2
        return jnp.where(count > 0, middle, median)


class _BelowMedian(Part):
    """Ends a visit before one of the epochs if the client's loss is at most the median."""

    loss: Score
    stops: tuple[int, ...]

    def __call__(self, variables: Variables, epoch: Array, context: Context) -> Array:
        asked = jnp.any(epoch == jnp.array(self.stops, jnp.int32))
        return asked & (self.loss(variables, context.client) <= context.shared)


class boosted(Wrapper):
    r"""A local update that trains on while its loss is above the median of the last cohort's.

    .. math:: E_0 = \lceil E / 2 \rceil, \qquad E_r = \min\bigl(E_{r-1} + E_0 - r + 1,\;
              \lfloor 3 E / 2 \rfloor\bigr), \qquad
              \text{until } F_k(w_k) \le \operatorname{med}_{j \in U_{t-1}} F_j(w_j)

    After :math:`E_r` epochs a client compares the loss of its model on its samples with the median
    of the losses that the last cohort ended with. Until there is a median, every client stops after
    E_0 epochs. A client sends and receives 4 bytes; a visit costs a forward pass before every epoch
    and one after the last.

    Args:
        local: the local update, of E whole epochs; its epochs, steps and ``shared`` are overridden.
        loss: ``(variables, client) -> f32[]``, F_k (:class:`fedjax_sim.reports.mean_loss`).

    Raises:
        ValueError: if local's number of epochs is not whole, or local shares anything already.

    Source: Huang et al. 2020 <https://arxiv.org/abs/1811.12629>, Algorithm 2.

    Example:
        >>> import fedjax_sim as fs, optax
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1), epochs=10)
        >>> boosted(local, fs.reports.mean_loss(problem.objective)).epochs
        15
    """

    loss: Score

    sets = ("steps", "until")

    def __post_init__(self) -> None:
        _ = self.inner  # checks the settings

    @functools.cached_property
    def inner(self) -> LocalUpdate:
        epochs = self.local.epochs
        if isinstance(epochs, Sequence) or epochs != int(epochs):
            raise ValueError(f"epochs of local must be a whole number to be halved, got {epochs}")
        half, most = math.ceil(epochs / 2), int(3 * epochs / 2)
        stops, more = [half], half
        while more > 0 and stops[-1] + more < most:
            stops.append(stops[-1] + more)
            more -= 1

        until, shared = _BelowMedian(self.loss, tuple(stops)), _MedianLoss(self.loss)
        return self.local.change(epochs=most, steps=None, until=until, shared=shared)
