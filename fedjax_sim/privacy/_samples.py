"""DP-SGD: clipped gradients of single samples, Poisson minibatches and noise in every step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, Batch, ClientView, Finite, Need, Part, Positive, PyTree, concrete
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import repeat, rows_at
from fedjax_sim.engine.needs import (
    NO_LOSS_READ,
    NOTHING_AFTER,
    NOTHING_OFFERED,
    NOTHING_TOLD,
    OWN_SAMPLES,
)
from fedjax_sim.engine.streams import Step, stream
from fedjax_sim.privacy._noise import normal

STEPS_ALONE = Need(
    "local",
    "local training that reads samples in its private steps alone",
    lambda parts: parts.local.private is not None,
    "local_sgd(private=...) without a wrapper",
)
NOTHING_COUNTED = Need(
    "preaggregation",
    "pre-aggregations for which clients send nothing before the first round",
    lambda parts: all(part.setup_traffic is None for part in parts.preaggregation),
    "preaggregation without discrepancy",
)


class Slope(NamedTuple):
    """A private gradient."""

    loss: Array  # f[], the mean loss of the minibatch, without noise; 0 if it is empty
    gradient: PyTree  # [*p]
    samples: Array  # int32[], the size of the minibatch
    state: PyTree = ()  # the model's state, which has no leaves


class dp_sgd(Part):
    r"""Private steps: every sample's gradient is clipped, and Gaussian noise added to their sum.

    .. math:: \frac{1}{\min(B, n_k)} \Bigl(\sum_{i \in b} g_i \min\bigl(1,
              \tfrac{C}{\lVert g_i \rVert_2}\bigr) + \mathcal{N}(0, \sigma^2 C^2 I)\Bigr), \qquad
              P(i \in b) = q_k = \min\bigl(1, \tfrac{B}{n_k}\bigr)

    instead of a minibatch's gradient. Every sample joins every minibatch independently (Poisson
    sampling), and the denominator is the expected size. A minibatch has any size from 0 to n_k: its
    gradients are computed B at a time, and none is dropped. :math:`g_i` is the gradient of the
    objective on sample i alone, including all its terms, with its own dropout and transforms; one
    that is not finite counts as 0. An epoch has :math:`\lceil n_k / B \rceil` steps, as without
    privacy. Corrections, the optimiser and all that follows only see the private gradient.

    A client's samples are private even from the server, each with the ε of
    :meth:`fedjax_sim.Algorithm.client_epsilon`; :func:`fedjax_sim.privacy.sample_epsilon` computes
    it in advance. n_k is public. Parts that read samples in any other way are rejected. The losses
    that the simulator reports are not private, and the noise is as in
    :class:`fedjax_sim.preaggregation.gaussian_mechanism`.

    Args:
        clip: C, the largest L2 norm of a sample's gradient.
        noise_multiplier: σ, the noise's standard deviation divided by C.

    Raises:
        ValueError: if a setting is out of range; by :class:`fedjax_sim.local_sgd`, for settings
            that read samples without noise; by ``compose``, for other parts that do; when a run
            starts, for a model with BatchNorm; in the first step, for data with copies of samples.

    Source: Abadi et al. 2016 <https://arxiv.org/abs/1607.00133>, Algorithm 1.

    Example:
        >>> import optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(
        ...     problem.objective, optax.sgd(0.1), private=fs.local.dp_sgd(1.0, 0.5)
        ... )
        >>> problem.accuracy(fs.fedavg(local, clients_per_round=5), rounds=5) > 0.5
        True
    """

    clip: Positive
    noise_multiplier: Finite

    def __post_init__(self) -> None:
        given = self.clip, self.noise_multiplier
        if all(map(concrete, given)) and self.noise_multiplier > 0 and math.isinf(self.clip):
            raise ValueError(f"clip must be finite if noise is added, got {self.clip}")

    @property
    def needs(self) -> tuple[Need, ...]:
        quiet = NOTHING_TOLD, NOTHING_OFFERED, NOTHING_AFTER, NO_LOSS_READ, NOTHING_COUNTED
        return (OWN_SAMPLES, STEPS_ALONE, *quiet)

    def slope(
        self,
        key: Array,
        client: ClientView,
        batch_size: int,
        loss: Callable[[PyTree, Batch, Array], Array],
        weights: PyTree,
    ) -> Slope:
        """Returns the private gradient of a new minibatch.

        Args:
            key: the key of the step.
            client: its samples.
            batch_size: B.
            loss: ``(weights, batch, key) -> f[]``, of a batch of one sample.
            weights: ``[*p]``.

        Raises:
            ValueError: if the data have copies of samples.
        """
        if client.copies:
            raise ValueError(
                f"private {self} needs data without copies, as each copy would have a "
                "gradient of its own: use data without --fedaug and --rebalance"
            )
        drawing, drawn, own = jax.random.split(stream(key, Step.PRIVATE), 3)
        order, count = _poisson(drawing, client, batch_size)
        at_once = min(batch_size, client.capacity)
        slopes = jax.vmap(jax.value_and_grad(loss), (None, 0, 0))

        def add(i: Array, total: PyTree, client: ClientView) -> PyTree:
            place = i * at_once + jnp.arange(at_once, dtype=jnp.int32)
            batch = rows_at(client, order[jnp.minimum(place, client.capacity - 1)])
            ones = jax.tree.map(lambda a: a[:, None], batch._replace(mask=place < count))
            keys = jax.vmap(lambda p: jax.random.fold_in(own, p))(place)
            losses, gradients = slopes(weights, ones, keys)
            return tree.sum_of(total, self._clipped(losses, gradients, place < count))

        none = jax.tree.map(jnp.zeros_like, (jnp.float32(0), weights))
        most = -(-client.capacity // at_once)
        loss_sum, total = repeat(client, -(-count // at_once), most, add, none)
        expected = jnp.clip(client.size, 1, batch_size)
        if not (concrete(self.noise_multiplier) and self.noise_multiplier == 0):
            total = tree.sum_of(total, normal(drawn, total, self.noise_multiplier * self.clip))
        gradient = jax.tree.map(lambda g: g / expected.astype(g.dtype), total)
        return Slope(loss_sum / jnp.maximum(count, 1).astype(jnp.float32), gradient, count)

    def _clipped(self, losses: Array, gradients: PyTree, real: Array) -> PyTree:
        """Returns the sums of the losses and of the clipped gradients of real samples."""
        norms = tree.norms(gradients)
        counted = real & jnp.isfinite(norms)
        factor = jnp.minimum(1, self.clip / norms)  # 1 for no gradient: C / 0 is infinite

        def summed(g: Array) -> Array:
            scaled = tree.expand(factor.astype(g.dtype), g) * g
            return jnp.sum(jnp.where(tree.expand(counted, g), scaled, 0), axis=0)

        loss = jnp.sum(jnp.where(real, losses, 0)).astype(jnp.float32)
        return loss, jax.tree.map(summed, gradients)


def _poisson(key: Array, client: ClientView, batch_size: int) -> tuple[Array, Array]:
    """Draws a Poisson minibatch: positions ``int32[capacity]``; the first ``count`` of them joined.

    >>> x = jnp.zeros(3)
    >>> client = ClientView(x, x, jnp.arange(3), jnp.int32(0), jnp.int32(3), 4)
    >>> order, count = _poisson(jax.random.key(0), client, 5)  # B is above n_k
    >>> order[:3].tolist(), int(count)
    ([0, 1, 2], 3)
    """
    place = jnp.arange(client.capacity, dtype=jnp.int32)
    # A number below n_k is also below B with probability B / n_k, to the last bit.
    ticket = jax.random.randint(key, place.shape, 0, jnp.maximum(client.size, 1), jnp.int32)
    joined = (ticket < batch_size) & (place < client.size)
    (order,) = jnp.nonzero(joined, size=client.capacity, fill_value=0)
    return order.astype(jnp.int32), jnp.sum(joined, dtype=jnp.int32)
