"""More epochs for clients whose loss is high beside the others': LoAdaBoost."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax.numpy as jnp

from fedjax_sim.base import (
    Aggregator,
    Array,
    ClientView,
    Context,
    LocalUpdate,
    PyTree,
    Shared,
    Variables,
    part,
)


@part
def boosted(local: LocalUpdate, loss: Callable[[Variables, ClientView], Array]) -> LocalUpdate:
    r"""A client trains on while its loss is above the median of the last cohort's.

    .. math:: E_0 = \lceil E / 2 \rceil, \qquad E_r = \min\bigl(E_{r-1} + E_0 - r + 1,\;
              \lfloor 3 E / 2 \rfloor\bigr), \qquad
              \text{until } F_k(w_k) \le \operatorname{med}_{j \in U_{t-1}} F_j(w_j)

    After :math:`E_r` epochs a client compares the loss of its model on its samples with the median
    of those that the last cohort ended with. Before there is one, nobody trains on.

    Args:
        local: the local update, of E whole epochs; its epochs, steps and ``shared`` are overridden.
        loss: ``(variables, client) -> f32[]``, F_k (:func:`fedjax_sim.reports.mean_loss`).

    Returns:
        The local update. A client sends 4 bytes, and is sent 4; a visit costs a pass forward before
        every epoch and one after the last.

    Raises:
        ValueError: if local's epochs are no whole number.

    Source: Huang et al. 2020 <https://arxiv.org/abs/1811.12629>, Algorithm 2.

    Example:
        >>> import fedjax_sim as fs, optax
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1), epochs=10)
        >>> boosted(local, fs.reports.mean_loss(problem.objective)).epochs
        15
    """
    epochs = local.epochs
    if epochs != int(epochs):
        raise ValueError(f"epochs of local must be a whole number to be halved, got {epochs}")
    half, most = math.ceil(epochs / 2), int(3 * epochs / 2)
    stops, more = [half], half
    while more > 0 and stops[-1] + more < most:
        stops.append(stops[-1] + more)
        more -= 1

    def until(variables: Variables, epoch: Array, context: Context) -> Array:
        asked = jnp.any(epoch == jnp.array(stops, jnp.int32))
        return asked & (loss(variables, context.client) <= context.shared)

    def start(variables: Variables) -> Array:
        del variables
        return jnp.float32(jnp.inf)

    def send(trained: Variables, context: Context) -> Array:
        return loss(trained, context.client).astype(jnp.float32)

    def reduce(
        median: Array, sent: Array, weights: Array, clients: int, aggregator: Aggregator
    ) -> PyTree:
        """The median of those that came; as it was if nobody did."""
        del clients, aggregator
        came = (weights > 0) & jnp.isfinite(sent)
        count = jnp.sum(came, dtype=jnp.int32)
        order = jnp.sort(jnp.where(came, sent, jnp.inf))
        middle = (order[jnp.maximum(count - 1, 0) // 2] + order[count // 2]) / 2
        return jnp.where(count > 0, middle, median)

    shared = Shared(start, send, reduce)
    return local.change(epochs=most, steps=None, until=until, shared=shared)
