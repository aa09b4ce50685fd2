"""Local updates: exact epochs of minibatch SGD on a client of any size."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.base import Array, ClientView, LocalInfo, Objective, PyTree, Variables

LastBatch = Literal["keep", "drop", "refill"]


@dataclasses.dataclass(frozen=True)
class LocalSGD:
    r"""E epochs of minibatch steps of an optax optimiser.

    .. math:: T_k = E \lceil n_k / B \rceil, \qquad w_k \leftarrow w_k - \eta\,\nabla F_b(w_k)

    Samples are reshuffled each epoch by a key of (seed, round, client, epoch) alone, so a result
    does not depend on which clients ran beside this one or where. The optimiser's state starts
    anew whenever a client receives a model.

    Attributes:
        objective: see :mod:`fedjax_sim.objective`.
        optimizer: an ``optax.GradientTransformation``.
        batch_size: B.
        epochs: E; a fraction runs ``round(E * ceil(n_k / B))`` steps.
        last_batch: what becomes of the short last minibatch: ``keep`` it (its loss is the mean over
          its real samples), ``drop`` it, or ``refill`` it from the epoch's beginning.

    Raises:
        ValueError: if a setting is out of range.

    Example:
        >>> from fedjax_sim import models
        >>> from fedjax_sim.objective import empirical_risk
        >>> model = models.logistic((8, 8, 1), 10)
        >>> local = LocalSGD(empirical_risk(model), optax.sgd(0.1), batch_size=16, epochs=2)
        >>> int(local.steps(jnp.int32(40)))  # 2 * ceil(40 / 16)
        6
    """

    objective: Objective
    optimizer: optax.GradientTransformation
    batch_size: int = 16
    epochs: float = 1.0
    last_batch: LastBatch = "keep"

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if not self.epochs > 0:
            raise ValueError(f"epochs must be positive, got {self.epochs}")
        if self.last_batch not in ("keep", "drop", "refill"):
            raise ValueError(
                f"last_batch must be 'keep', 'drop' or 'refill', got {self.last_batch!r}"
            )

    def batches(self, size: Array) -> Array:
        """Minibatches in an epoch of ``size int32[]`` samples."""
        spare = 0 if self.last_batch == "drop" else self.batch_size - 1
        return (size + spare) // self.batch_size

    def steps(self, size: Array) -> Array:
        """T_k, the steps on a client of ``size int32[]`` samples."""
        if self.epochs == int(self.epochs):
            return self.batches(size) * int(self.epochs)
        return jnp.round(self.epochs * self.batches(size).astype(jnp.float32)).astype(jnp.int32)

    def __call__(
        self, key: Array, variables: Variables, client: ClientView
    ) -> tuple[Variables, LocalInfo]:
        """Trains ``variables`` on ``client``; see :class:`fedjax_sim.base.LocalUpdate`."""
        batches, total = self.batches(client.size), self.steps(client.size)
        step = functools.partial(self._step, received=variables.params, client=client)

        # All epochs' keys at once: on CPU a threefry call costs more than a small client's step.
        numbers = jnp.arange(math.ceil(self.epochs), dtype=jnp.uint32)
        epoch_keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, numbers)

        def epoch(e: Array, carry: PyTree) -> PyTree:
            epoch_key = epoch_keys[e]
            order = shuffled(epoch_key, client.size, client.capacity)
            todo = jnp.clip(total - e * batches, 0, batches)
            return jax.lax.fori_loop(
                0, todo, lambda b, c: step(c, jax.random.fold_in(epoch_key, b + 1), order, b), carry
            )

        carry = (variables, self.optimizer.init(variables.params), jnp.float32(0), jnp.int32(0))
        trained, _, loss, seen = jax.lax.fori_loop(0, math.ceil(self.epochs), epoch, carry)
        return trained, LocalInfo(loss / jnp.maximum(seen, 1).astype(jnp.float32), total, seen)

    def _step(
        self,
        carry: PyTree,
        key: Array,
        order: Array,
        batch: Array,
        *,
        received: PyTree,
        client: ClientView,
    ) -> PyTree:
        (params, state), opt_state, loss_sum, seen = carry
        position = batch * self.batch_size + jnp.arange(self.batch_size, dtype=jnp.int32)
        mask = position < client.size
        if self.last_batch == "refill":
            position, mask = position % client.size, jnp.ones_like(mask)
        # Padding repeats the client's own last sample: never another client's data.
        position = jnp.minimum(position, client.size - 1)
        rows = client.index[client.start + order[position]]
        (loss, state), grads = jax.value_and_grad(self.objective, has_aux=True)(
            params, state, received, client.x[rows], client.y[rows], mask, key
        )
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        count = jnp.sum(mask, dtype=jnp.int32)
        loss_sum = loss_sum + loss * count.astype(jnp.float32)
        return Variables(params, state), opt_state, loss_sum, seen + count


def shuffled(key: Array, size: Array, capacity: int) -> Array:
    """A uniformly random order of ``0..size-1`` in a buffer of at least ``capacity``.

    A sort of hashed positions, over the smallest power of two that holds the client: the cost
    follows the client's own size, not the largest one's. (Ties, of probability n²/2³³, keep their
    order. The hash is two rounds of a 32-bit finaliser around the words of the key: one fused loop
    where threefry is five dependent ones, a third of a logistic regression's step time.)

    Args:
        key: PRNG key.
        size: ``int32[]``, n_k.
        capacity: the largest n_k (static).

    Returns:
        ``int32[P]``, P the power of two at or above ``capacity``; entries from ``size`` on are
        padding, all of them at least ``size``.

    >>> sorted(shuffled(jax.random.key(0), jnp.int32(5), 40)[:5].tolist())
    [0, 1, 2, 3, 4]
    """
    high, low = jax.random.key_data(key)[..., 0], jax.random.key_data(key)[..., -1]
    smallest, largest = 5, max(5, math.ceil(math.log2(max(capacity, 1))))

    def at(power: int) -> Array:
        words = 2**power
        slot = jnp.arange(words, dtype=jnp.int32)
        bits = _mixed(_mixed(slot.astype(jnp.uint32) + high) ^ low)
        bits = jnp.where(slot < size, bits, jnp.uint32(2**32 - 1))
        order = jax.lax.sort((bits, slot), num_keys=1, is_stable=True)[1]
        return jnp.concatenate([order, jnp.arange(words, 2**largest, dtype=jnp.int32)])

    powers = range(smallest, largest + 1)
    if len(powers) == 1:
        return at(smallest)
    level = sum((size > 2**p).astype(jnp.int32) for p in powers[:-1])
    return jax.lax.switch(level, [functools.partial(at, p) for p in powers])


def _mixed(x: Array) -> Array:
    """A bijection of uint32 without visible structure (multiply, xor-shift)."""
    for multiplier in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(multiplier)
    return x ^ (x >> jnp.uint32(15))
