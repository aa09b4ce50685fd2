"""FedDF: the server learns what the clients' models say together of its own samples."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.base import (
    Array,
    Batch,
    ClientView,
    Gathered,
    Model,
    PyTree,
    Server,
    Variables,
    concrete,
    for_classes,
    part,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import of_each, on_root, rows_at, shuffled
from fedjax_sim.engine.needs import NOT_REFLECTED, ONLY_WEIGHED, PLAIN_MEAN, WHOLE_MODEL
from fedjax_sim.tasks.losses import masked_mean

AT_ONCE = 64  # samples of which all models are asked together
CLIP = 5.0  # the largest norm of a gradient, in the authors' code


@part
@for_classes
def distilled(model: Model, steps: int = 100, lr: float = 1e-3, *, batch_size: int = 128) -> Server:
    r"""FedDF: from the aggregate on, steps towards the mean logits of the clients' models.

    .. math:: q(x) = \sigma\Bigl(\frac{1}{|U_t|} \sum_{k \in U_t} f(w_k, x)\Bigr), \qquad
              w_{t+1} = \mathrm{Adam}\Bigl(w_t + \sum_k p_k \Delta_k,\;
              \frac{1}{|b|} \sum_{x \in b} \mathrm{KL}\bigl(q(x) \,\|\, \sigma(f(w, x))\bigr)\Bigr)

    over the server's own samples, of which the labels are not read. All models count alike in q,
    however large their weights. They speak without dropout and by their own BatchNorm statistics;
    w trains with both, so that its statistics become those of the server's samples. Adam starts
    afresh in every round, its rate falls to 0 along a cosine, and gradients are clipped to norm 5.

    Args:
        model: the model that the clients train.
        steps: minibatches in a round; 0 changes nothing, bit for bit.
        lr: Adam's first rate.
        batch_size: samples of a minibatch, drawn afresh for each; all, if there are no more.

    Returns:
        A server for data with ``root`` samples.

    Raises:
        ValueError: if a number is out of range; in the first round, if the data have no ``root``.

    Source: Lin et al. 2020 <https://arxiv.org/abs/2006.07242>, Algorithm 1; Lin et al. 2020
    <https://github.com/epfml/federated-learning-public-code>, the authors' code, for the optimiser.

    Example:
        >>> import fedjax_sim as fs
        >>> fs.server.distilled(fs.models.mlp((8, 8, 1), 10), steps=20)
        distilled(<Model>, steps=20)
    """
    for name, number, least in (("steps", steps, 0), ("batch_size", batch_size, 1)):
        if number < least:
            raise ValueError(f"{name} must be at least {least}, got {number}")
    if concrete(lr) and not lr > 0:
        raise ValueError(f"lr must be positive, got {lr}")
    rate = optax.cosine_decay_schedule(lr, max(steps, 1))
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(rate))

    def taught(client: ClientView, models: Variables, present: Array) -> Array:
        """``f32[n, M]``, q of every sample; 0 from the last one on."""
        count = jnp.sum(present, dtype=jnp.int32)

        def together(batch: Batch) -> Array:
            def said(w: Variables) -> Array:
                return model.apply(w, batch.x, train=False, mask=batch.mask)[0]

            every = jax.vmap(said)(models)
            shown = jnp.where(tree.expand(present, every), every, 0)
            return jax.nn.softmax(tree.row_sum(shown) / count.astype(every.dtype))

        return of_each(client, AT_ONCE, together)

    def distil(
        key: Array, mean: Variables, client: ClientView, models: Variables, present: Array
    ) -> Variables:
        q = taught(client, models, present)

        def descend(i: Array, carry: tuple[Variables, PyTree]) -> tuple[Variables, PyTree]:
            student, memory = carry
            order_key, own_key = jax.random.split(jax.random.fold_in(key, i))
            position = shuffled(order_key, client.size, client.capacity)[:batch_size]
            _, _, mask, *_ = batch = rows_at(client, position)
            wanted = q[jnp.minimum(position, client.size - 1)]

            def loss(params: PyTree) -> tuple[Array, PyTree]:
                logits, state = model.apply(
                    student._replace(params=params), batch.x, train=True, mask=mask, key=own_key
                )
                # KL but for the entropy of q, which does not depend on the weights.
                return masked_mean(optax.softmax_cross_entropy(logits, wanted), mask), state

            gradient, state = jax.grad(loss, has_aux=True)(student.params)
            with jax.numpy_dtype_promotion("standard"):  # for optax's count of steps
                change, memory = optimizer.update(gradient, memory, student.params)
            return Variables(optax.apply_updates(student.params, change), state), memory

        start = mean, optimizer.init(mean.params)
        end: Variables = jax.lax.fori_loop(0, steps, descend, start)[0]
        return end

    def update(
        key: Array, step: Variables, server: Variables, state: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        models = tree.sum_of(gathered.cohort.received, gathered.updates)
        mean = tree.add(server, step)
        end = on_root(distil)(key, mean, gathered.cohort.data, models, gathered.weights > 0)
        return tree.sum_of(step, tree.subtract(end, mean)), state

    # It asks the models themselves, so that no rule guards it and every row must be a model.
    needs = WHOLE_MODEL, NOT_REFLECTED, ONLY_WEIGHED, PLAIN_MEAN
    return Server(init=lambda variables: (), update=update, needs=needs)
