"""Servers that train on their own samples."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from fedjax_sim.base import (
    Array,
    Batch,
    ClientData,
    ClientView,
    Count,
    Gathered,
    LocalUpdate,
    Model,
    Natural,
    Positive,
    PyTree,
    Server,
    SetupTraffic,
    Variables,
    for_classes,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import of_each, on_root, root_view, rows_at, shuffled
from fedjax_sim.engine.needs import (
    NOT_REFLECTED,
    ONE_MODEL,
    ONLY_WEIGHED,
    OWN_ROWS,
    PLAIN_MEAN,
    WHOLE_MODEL,
)
from fedjax_sim.tasks.losses import masked_mean

AT_ONCE = 64  # samples on which all models are evaluated together
CLIP = 5.0  # the largest norm of a gradient, in the authors' code


class _Training(Server):
    """A server that trains on its own samples."""

    local: LocalUpdate

    reads_updates = False

    def __post_init__(self) -> None:
        if self.local.peers:
            raise ValueError(
                "local must do without the other clients' samples to train on the server's, got "
                "peers=True"
            )

    def init(self, variables: Variables) -> PyTree:
        kept = self.local.client_state(variables), self.local.shared_state(variables)
        if jax.tree.leaves(kept):
            raise ValueError(
                "local must neither keep nor share anything between its visits to train on the "
                "server's samples: it has a correction or an optimizer_state that does"
            )
        return kept

    def _train(self, key: Array, start: Variables, data: ClientData, state: PyTree) -> Variables:
        trained: Variables = on_root(self.local.train)(key, start, data, *state).variables
        return trained


class train_on_root(_Training):
    r"""Trains the aggregate on the server's own samples.

    .. math:: w_{t+1} = \mathrm{train}\Bigl(w_t + \sum_k p_k \Delta_k,\, D_0\Bigr)

    It needs data with ``root`` samples.

    Args:
        local: the local update, run on the server's samples as on a client's; it restarts in every
            round.

    Raises:
        ValueError: if local needs the other clients' samples; when the state is initialised, if it
            keeps or shares anything between its visits; in the first round, if the data have no
            ``root``.

    Source: Ozdayi et al. 2020 <https://arxiv.org/abs/2010.15582>, section 3.1.
    """

    needs = (WHOLE_MODEL,)

    def update(
        self, key: Array, step: Variables, server: Variables, state: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        trained = self._train(key, tree.add(server, step), gathered.cohort.data, state)
        return tree.subtract(trained, server), state


class train_beside(_Training):
    r"""Trains the server as one more client, on samples that clients have sent to it.

    .. math:: w_{t+1} = w_t + \frac{n \sum_k p_k \Delta_k + n_0 (w_0 - w_t)}{n + n_0}, \qquad
              w_0 = \mathrm{train}(w_t, D_0), \qquad n = \sum_{k \in U_t} n_k

    It needs data with ``root`` samples; the n_0 samples are uploaded once, before the first round.
    A round in which no model arrives leaves the server model unchanged.

    Args:
        local: the local update, run on the server's samples as on a client's; it restarts in every
            round.

    Raises:
        ValueError: as :func:`train_on_root` does.

    Source: Yoshida et al. 2020 <https://arxiv.org/abs/1905.07210>.
    """

    needs = (ONE_MODEL, WHOLE_MODEL, OWN_ROWS)

    def setup_traffic(self, variables: Variables, data: ClientData) -> SetupTraffic:
        return SetupTraffic(int(root_view(data).size) * data.sample_bytes, 0)

    def update(
        self, key: Array, step: Variables, server: Variables, state: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        data, present = gathered.cohort.data, gathered.weights > 0
        change = tree.subtract(self._train(key, server, data, state), server)
        n_0 = root_view(data).size.astype(jnp.float32)
        n = jnp.sum(jnp.where(present, gathered.cohort.samples, 0)).astype(jnp.float32)
        total = tree.add(tree.scale(n / (n + n_0), step), tree.scale(n_0 / (n + n_0), change))
        return total, state


@for_classes
class distilled(Server):
    r"""FedDF: distils the mean logits of the clients' models into the aggregate.

    .. math:: q(x) = \sigma\Bigl(\frac{1}{|U_t|} \sum_{k \in U_t} f(w_k, x)\Bigr), \qquad
              w_{t+1} = \mathrm{Adam}\Bigl(w_t + \sum_k p_k \Delta_k,\;
              \frac{1}{|b|} \sum_{x \in b} \mathrm{KL}\bigl(q(x) \,\|\, \sigma(f(w, x))\bigr)\Bigr)

    over the server's own samples (the ``root`` samples of the data), whose labels are not used. All
    models count equally in q, whatever their weights. The clients' models run without dropout and
    with their own BatchNorm statistics; w is trained with both, so its statistics become those of
    the server's samples. Adam restarts in every round, its rate decays to 0 along a cosine, and
    gradients are clipped to norm 5.

    Args:
        model: the model that the clients train.
        steps: minibatches in a round; 0 changes nothing, bit for bit.
        lr: Adam's initial rate.
        batch_size: samples in a minibatch, redrawn in every step; all samples if there are fewer.

    Raises:
        ValueError: if a number is out of range; in the first round, if the data have no ``root``.

    Source: Lin et al. 2020 <https://arxiv.org/abs/2006.07242>, Algorithm 1; Lin et al. 2020
    <https://github.com/epfml/federated-learning-public-code>, the authors' code, for the optimiser.

    Example:
        >>> import fedjax_sim as fs
        >>> fs.server.distilled(fs.models.mlp((8, 8, 1), 10), steps=20)
        distilled(<Model>, steps=20)
    """

    model: Model
    steps: Natural = 100
    lr: Positive = 1e-3
    _: dataclasses.KW_ONLY
    batch_size: Count = 128

    # It evaluates the models themselves: no rule guards it, and every row must be a model.
    needs = (WHOLE_MODEL, NOT_REFLECTED, ONLY_WEIGHED, PLAIN_MEAN)

    def update(
        self, key: Array, step: Variables, server: Variables, state: PyTree, gathered: Gathered
    ) -> tuple[Variables, PyTree]:
        models = tree.sum_of(gathered.cohort.received, gathered.updates)
        data, mean = gathered.cohort.data, tree.add(server, step)
        end = on_root(self._distil)(key, mean, data, models, gathered.weights > 0)
        return tree.sum_of(step, tree.subtract(end, mean)), state

    def _distil(
        self, key: Array, mean: Variables, client: ClientView, models: Variables, present: Array
    ) -> Variables:
        """Returns the aggregate ``mean`` after its training on the targets."""
        q = self._targets(client, models, present)
        rate = optax.cosine_decay_schedule(self.lr, max(self.steps, 1))
        optimizer = optax.chain(optax.clip_by_global_norm(CLIP), optax.adam(rate))

        def descend(i: Array, carry: tuple[Variables, PyTree]) -> tuple[Variables, PyTree]:
            student, memory = carry
            order_key, own_key = jax.random.split(jax.random.fold_in(key, i))
            position = shuffled(order_key, client.size, client.capacity)[: self.batch_size]
            _, _, mask, *_ = batch = rows_at(client, position)
            target = q[jnp.minimum(position, client.size - 1)]

            def loss(params: PyTree) -> tuple[Array, PyTree]:
                logits, state = self.model.apply(
                    student._replace(params=params), batch.x, train=True, mask=mask, key=own_key
                )
                # KL without the entropy of q, which does not depend on the weights.
                return masked_mean(optax.softmax_cross_entropy(logits, target), mask), state

            gradient, state = jax.grad(loss, has_aux=True)(student.params)
            with jax.numpy_dtype_promotion("standard"):  # for optax's count of steps
                change, memory = optimizer.update(gradient, memory, student.params)
            return Variables(optax.apply_updates(student.params, change), state), memory

        start = mean, optimizer.init(mean.params)
        end: Variables = jax.lax.fori_loop(0, self.steps, descend, start)[0]
        return end

    def _targets(self, client: ClientView, models: Variables, present: Array) -> Array:
        """Returns q of every sample, ``f32[n, M]``; 0 in the rows beyond the last sample."""
        count = jnp.sum(present, dtype=jnp.int32)

        def targets(batch: Batch) -> Array:
            def logits(w: Variables) -> Array:
                return self.model.apply(w, batch.x, train=False, mask=batch.mask)[0]

            every = jax.vmap(logits)(models)
            known = jnp.where(tree.expand(present, every), every, 0)
            return jax.nn.softmax(tree.row_sum(known) / count.astype(every.dtype))

        return of_each(client, AT_ONCE, targets)
