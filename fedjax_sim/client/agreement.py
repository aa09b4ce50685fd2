"""FedMD: clients agree on the logits of public samples, and keep their models."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.base import (
    Aggregator,
    Array,
    Batch,
    ClientView,
    Context,
    Count,
    LocalUpdate,
    MissingRootError,
    Model,
    Natural,
    Positive,
    PyTree,
    Shared,
    Trained,
    Variables,
    Wrapper,
)
from fedjax_sim.client.descent import Common
from fedjax_sim.engine.batches import repeat, rows_at, shuffled, sweep
from fedjax_sim.engine.memory import check_memory_for
from fedjax_sim.engine.streams import Client, stream
from fedjax_sim.tasks.losses import masked_mean

MOST_EPOCHS = 1000
"""The largest number of digest epochs, which are a loop each in the program."""

AT_ONCE = 64
"""The number of public samples whose logits are computed together."""


class Consensus(NamedTuple):
    """The last cohort's mean logits on the public samples.

    Attributes:
        logits: ``f32[n, M]``; 0 for a sample that does not exist.
        clients: ``int32[]``, the number of clients in the mean; 0 before the first round.
    """

    logits: Array
    clients: Array


class consensus(Shared):
    r"""The mean logits of the clients' models on public samples.

    .. math:: \bar f(x_i) = \frac{1}{|U|} \sum_{k \in U} f(w_k, x_i), \qquad x_i \in D_0

    where w_k are the models that the clients have just trained, without dropout. All clients count
    equally; the composition's aggregator computes the mean. The state is :class:`Consensus`: 4 n M
    bytes up, 4 n M + 4 down.
    """

    model: Model
    classes: Count
    samples: Count

    for_classes = True

    def init(self, variables: Variables) -> Consensus:
        samples, classes = self.samples, self.classes
        check_memory_for(f"logits of {samples:,} public samples", 4 * samples * classes)
        return Consensus(jnp.zeros((samples, classes), jnp.float32), jnp.int32(0))

    def send(self, trained: Variables, context: Context) -> Array:
        client = public(context.client, self.samples)

        def add(carry: tuple[Array, Array], batch: Batch) -> tuple[Array, Array]:
            done, found = carry
            logits, _ = self.model.apply(trained, batch.x, train=False, mask=batch.mask)
            logits = jnp.where(batch.mask[:, None], logits.astype(jnp.float32), 0)
            return done + AT_ONCE, jax.lax.dynamic_update_slice_in_dim(found, logits, done, axis=0)

        room = -(-self.samples // AT_ONCE) * AT_ONCE
        start = jnp.int32(0), jnp.zeros((room, self.classes), jnp.float32)
        found: Array = sweep(client, AT_ONCE, add, start)[1]
        return found[: self.samples]

    def reduce(
        self, last: Consensus, sent: Array, weights: Array, clients: int, aggregator: Aggregator
    ) -> Consensus:
        came = weights > 0
        anyone = jnp.any(came)
        mean = aggregator(sent, jnp.where(anyone, came, True).astype(jnp.float32))
        count = jnp.sum(came, dtype=jnp.int32)
        return Consensus(
            jnp.where(anyone, mean, last.logits), jnp.where(anyone, count, last.clients)
        )


class fedmd(Wrapper):
    r"""A local update that first fits the last cohort's mean logits on public samples.

    .. math:: w_k \leftarrow \mathrm{Adam}\Bigl(w_k,\; \frac{1}{|b| M} \sum_{i \in b}
              \lVert f(w, x_i) - \bar f(x_i) \rVert_1\Bigr)

    for some epochs over the public samples, the data's ``root``, whose labels are not read
    (digest); then the client trains on its own samples (revisit). Adam's state is reset at every
    visit. The steps of the digest do not count as local steps, and take no time on a clock. Before
    the first mean there is no digest.

    Args:
        local: trains on the client's own samples; its ``shared`` is overridden.
        model: the model that it trains.
        classes: M.
        samples: n, the number of public samples, or all if there are fewer.
        digest_epochs: epochs over the public samples, at most 1000; 0 changes nothing.
        digest_lr: Adam's rate.
        digest_batch_size: public samples of a minibatch.

    Raises:
        ValueError: if local shares anything already, or a setting is out of range; in the first
            round, if the data have no ``root``.

    Source: Li, Wang 2019 <https://arxiv.org/abs/1910.03581>, Algorithm 1; Li, Wang 2019
    <https://github.com/diogenes0319/FedMD_clean>, the authors' code, for loss and optimiser.
    """

    model: Model
    classes: int
    _: dataclasses.KW_ONLY
    samples: int = 200
    digest_epochs: Natural = 1
    digest_lr: Positive = 1e-3
    digest_batch_size: Count = 128

    for_classes = True
    moves_start = True

    def __post_init__(self) -> None:
        if self.digest_epochs > MOST_EPOCHS:
            raise ValueError(
                f"digest_epochs must be at most {MOST_EPOCHS}, got {self.digest_epochs}"
            )
        _ = self.inner  # checks the other settings

    @functools.cached_property
    def inner(self) -> LocalUpdate:
        return self.local.change(shared=consensus(self.model, self.classes, self.samples))

    def train(
        self,
        key: Array,
        variables: Variables,
        client: ClientView,
        client_state: PyTree,
        shared_state: PyTree,
    ) -> Trained:
        mean: Consensus = Common(*shared_state).shared
        own_key = stream(key, Client.AGREEMENT)
        start = self._digest(own_key, variables, public(client, self.samples), mean)
        return self.inner.train(key, start, client, client_state, shared_state)

    def _digest(
        self, key: Array, variables: Variables, client: ClientView, mean: Consensus
    ) -> Variables:
        """Returns the model after the digest."""
        samples, batch_size = self.samples, self.digest_batch_size
        optimizer = optax.adam(self.digest_lr)
        count = jnp.where(mean.clients > 0, -(-client.size // batch_size), 0)
        most = -(-samples // batch_size)
        steps = jnp.arange(batch_size, dtype=jnp.int32)

        def epoch(e: int, carry: PyTree) -> PyTree:
            own_key = jax.random.fold_in(key, e)
            order = shuffled(own_key, client.size, samples)

            def step(b: Array, carry: PyTree, client: ClientView) -> PyTree:
                now, memory = carry
                place = b * batch_size + steps
                # Samples that do not exist come last in the order, and are masked.
                position = order[jnp.minimum(place, samples - 1)]
                position = jnp.where(place < samples, position, client.size)
                batch = rows_at(client, position)
                wanted = mean.logits[jnp.minimum(position, samples - 1)]
                coin = jax.random.fold_in(own_key, b)

                def loss(params: PyTree) -> tuple[Array, PyTree]:
                    logits, state = self.model.apply(
                        now._replace(params=params), batch.x, train=True, mask=batch.mask, key=coin
                    )
                    gap = jnp.mean(jnp.abs(logits - wanted.astype(logits.dtype)), axis=-1)
                    return masked_mean(gap, batch.mask), state

                gradient, state = jax.grad(loss, has_aux=True)(now.params)
                with jax.numpy_dtype_promotion("standard"):  # for optax's count of steps
                    change, memory = optimizer.update(gradient, memory, now.params)
                return Variables(optax.apply_updates(now.params, change), state), memory

            return repeat(client, count, most, step, carry)

        carry: PyTree = variables, optimizer.init(variables.params)
        for e in range(self.digest_epochs):
            carry = epoch(e, carry)
        end: Variables = carry[0]
        return end


def public(client: ClientView, samples: int) -> ClientView:
    """Returns the first public samples, as if they were the client's."""
    if client.public is None:
        raise MissingRootError(
            "root of the data must be samples that all clients know, got None: see client_data"
        )
    first, end = client.public[0], client.public[1]
    size = jnp.minimum(end - first, samples)
    return client.part(first, size, capacity=samples, id=None, budget=None, relabel=None)
