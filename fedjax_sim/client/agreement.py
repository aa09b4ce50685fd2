"""FedMD: clients agree on what they say of public samples, and keep their models."""

from __future__ import annotations

import dataclasses
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
    LocalUpdate,
    MissingRootError,
    Model,
    PyTree,
    Shared,
    Trained,
    Variables,
    concrete,
    for_classes,
    part,
    wrap,
)
from fedjax_sim.client.carried import Common
from fedjax_sim.client.losses import masked_mean
from fedjax_sim.engine.batches import rows_at, shuffled, sweep
from fedjax_sim.engine.loops import repeat
from fedjax_sim.engine.memory import check_room
from fedjax_sim.engine.streams import Client, stream

MOST_EPOCHS = 1000  # each is a loop of its own in the program
AT_ONCE = 64  # public samples whose logits are computed together


class Consensus(NamedTuple):
    """What the last cohort said of the public samples.

    Attributes:
        logits: ``f32[n, M]``, their mean; 0 for a sample that is not there.
        clients: ``int32[]``, how many have said it; 0 before anyone did.
    """

    logits: Array
    clients: Array


@part
@for_classes
def consensus(model: Model, classes: int, samples: int) -> Shared:
    r"""The mean logits of the clients' models on public samples.

    .. math:: \bar f(x_i) = \frac{1}{|U|} \sum_{k \in U} f(w_k, x_i), \qquad x_i \in D_0

    by the models that they have just trained, without dropout. All count alike; the composition's
    aggregator takes the mean.

    Args:
        model: the model that trains.
        classes: M.
        samples: n, of the data's ``root`` the first so many; of fewer all.

    Returns:
        What is shared, :class:`Consensus`: 4 n M bytes up, 4 n M + 4 down.

    Raises:
        ValueError: if a number is not positive.

    Source: Li, Wang 2019 <https://arxiv.org/abs/1910.03581>, Algorithm 1.

    Example:
        >>> from fedjax_sim import models
        >>> consensus(models.mlp((4,), 3), 3, 20).init(None).logits.shape
        (20, 3)
    """
    for name, number in (("classes", classes), ("samples", samples)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")

    def none(variables: Variables) -> Consensus:
        del variables
        check_room(f"logits of {samples:,} public samples", 4 * samples * classes)
        return Consensus(jnp.zeros((samples, classes), jnp.float32), jnp.int32(0))

    def send(trained: Variables, context: Context) -> Array:
        client = public(context.client, samples)

        def add(carry: tuple[Array, Array], batch: Batch) -> tuple[Array, Array]:
            done, said = carry
            logits, _ = model.apply(trained, batch.x, train=False, mask=batch.mask)
            logits = jnp.where(batch.mask[:, None], logits.astype(jnp.float32), 0)
            return done + AT_ONCE, jax.lax.dynamic_update_slice_in_dim(said, logits, done, axis=0)

        room = -(-samples // AT_ONCE) * AT_ONCE
        start = jnp.int32(0), jnp.zeros((room, classes), jnp.float32)
        said: Array = sweep(client, AT_ONCE, add, start)[1]
        return said[:samples]

    def reduce(
        last: Consensus, sent: Array, weights: Array, clients: int, aggregator: Aggregator
    ) -> Consensus:
        del clients
        came = weights > 0
        anyone = jnp.any(came)
        mean = aggregator(sent, jnp.where(anyone, came, True).astype(jnp.float32))
        count = jnp.sum(came, dtype=jnp.int32)
        return Consensus(
            jnp.where(anyone, mean, last.logits), jnp.where(anyone, count, last.clients)
        )

    return Shared(none, send, reduce)


@part
@for_classes
def agreed(
    local: LocalUpdate,
    model: Model,
    classes: int,
    *,
    samples: int = 200,
    epochs: int = 1,
    lr: float = 1e-3,
    batch_size: int = 128,
) -> LocalUpdate:
    r"""A client first learns to say of public samples what the last cohort said of them.

    .. math:: w_k \leftarrow \mathrm{Adam}\Bigl(w_k,\; \frac{1}{|b| M} \sum_{i \in b}
              \lVert f(w, x_i) - \bar f(x_i) \rVert_1\Bigr)

    for some epochs over the public samples, the data's ``root``, of which the labels are not read
    (digest); then it trains on its own (revisit). Adam starts afresh at every visit. The steps of
    the first part are no local steps: they are not counted, and take no time on a clock. Before
    anyone has said anything there are none.

    Args:
        local: trains on the client's own samples; its ``shared`` is overridden.
        model: the model that it trains.
        classes: M.
        samples: n, the public samples; of fewer all.
        epochs: over them; 0 changes nothing.
        lr: Adam's rate.
        batch_size: public samples of a minibatch.

    Returns:
        The local update, for data with ``root`` samples.

    Raises:
        ValueError: if a number is out of range; in the first round, if the data have no ``root``.

    Source: Li, Wang 2019 <https://arxiv.org/abs/1910.03581>, Algorithm 1; Li, Wang 2019
    <https://github.com/diogenes0319/FedMD_clean>, the authors' code, for loss and optimiser.
    """
    for name, number, least in (("epochs", epochs, 0), ("batch_size", batch_size, 1)):
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")
    if concrete(lr) and not lr > 0:
        raise ValueError(f"lr must be positive, got {lr}")
    if epochs > MOST_EPOCHS:
        raise ValueError(f"epochs must be at most {MOST_EPOCHS}, got {epochs}")
    optimizer = optax.adam(lr)

    def digested(
        key: Array, variables: Variables, client: ClientView, told: Consensus
    ) -> Variables:
        count = jnp.where(told.clients > 0, -(-client.size // batch_size), 0)
        most = -(-samples // batch_size)
        steps = jnp.arange(batch_size, dtype=jnp.int32)

        def epoch(e: int, carry: PyTree) -> PyTree:
            own_key = jax.random.fold_in(key, e)
            order = shuffled(own_key, client.size, samples)

            def step(b: Array, carry: PyTree, client: ClientView) -> PyTree:
                now, memory = carry
                place = b * batch_size + steps
                # In the order, what is not there comes last, and is masked.
                position = order[jnp.minimum(place, samples - 1)]
                position = jnp.where(place < samples, position, client.size)
                batch = rows_at(client, position)
                wanted = told.logits[jnp.minimum(position, samples - 1)]
                coin = jax.random.fold_in(own_key, b)

                def loss(params: PyTree) -> tuple[Array, PyTree]:
                    logits, state = model.apply(
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
        for e in range(epochs):
            carry = epoch(e, carry)
        end: Variables = carry[0]
        return end

    def wrapper(local: LocalUpdate) -> LocalUpdate:
        def train(
            key: Array,
            variables: Variables,
            client: ClientView,
            client_state: PyTree,
            shared_state: PyTree,
        ) -> Trained:
            told: Consensus = Common(*shared_state).shared
            own_key = stream(key, Client.AGREEMENT)
            start = digested(own_key, variables, public(client, samples), told)
            return local.train(key, start, client, client_state, shared_state)

        return dataclasses.replace(local, train=train, moves_start=True)

    return wrap(wrapper, local.change(shared=consensus(model, classes, samples)))


def public(client: ClientView, samples: int) -> ClientView:
    """The first so many of the public samples, as if they were the client's.

    Raises:
        MissingRootError: if there are none.
    """
    if client.public is None:
        raise MissingRootError(
            "root of the data must be samples that all clients know, got None: see client_data"
        )
    first, end = client.public[0], client.public[1]
    return dataclasses.replace(
        client,
        start=first,
        size=jnp.minimum(end - first, samples),
        capacity=samples,
        id=None,
        budget=None,
        relabel=None,
    )
