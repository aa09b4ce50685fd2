"""Scores of a client, and local updates that report an additional number."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    Batch,
    ClientView,
    Context,
    Count,
    Model,
    Objective,
    Part,
    Train,
    Trained,
    Variables,
    Wrapper,
    and_then,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import sweep
from fedjax_sim.engine.streams import Client, stream

__all__ = ["accuracy", "gradient_norm", "mean_loss", "squared_gradient"]

Kind = Literal["minibatch", "sample"]
Score = Callable[[Variables, ClientView], Array]
"""``(variables, client) -> f32[]``, a number of one client at a model."""


class squared_gradient(Part):
    r"""The mean squared norm of a client's gradients, over its minibatches or over its samples.

    .. math:: q_k(w) = \frac{1}{\lceil n_k/B \rceil} \sum_b \lVert \nabla F_b(w) \rVert^2
              \qquad\text{or}\qquad
              q_k(w) = \frac{1}{n_k} \sum_i \lVert \nabla \ell_i(w) \rVert^2

    Minibatches are taken in the stored order; a last, smaller one counts as much as the others, as
    in the authors' code. Samples are used as they are stored, without the local update's
    transforms; the model is in training mode. The score of a client without samples is 0.

    Args:
        objective: the loss of a minibatch; its regularisation, if any, belongs to ℓ.
        batch_size: B.
        kind: "minibatch", as in the paper's text and in the authors' code; "sample", as in the
          second version's Algorithm 2, which needs the memory of B gradients. BatchNorm
          has no statistics of a single sample: use "minibatch" with it.

    Source: Xue et al. 2021 <https://arxiv.org/abs/2108.07433>, section III-B and Algorithm 2; Xue
    et al. 2021 <https://github.com/yxsub/RADFed>, the authors' code, for minibatches.

    Example:
        >>> def squared_error(params, state, batch, context):
        ...     return 0.5 * jnp.mean((batch.x - params) ** 2, where=batch.mask), state
        >>> client = ClientView(jnp.array([1.0, 3.0, 6.0]), jnp.zeros(3, jnp.int32), jnp.arange(3),
        ...                     jnp.int32(0), jnp.int32(3), 3)
        >>> model = Variables(jnp.float32(0), {})
        >>> float(squared_gradient(squared_error, 2)(model, client))  # (2² + 6²) / 2
        20.0
        >>> score = squared_gradient(squared_error, 2, "sample")
        >>> round(float(score(model, client)), 4)  # (1² + 3² + 6²) / 3
        15.3333
    """

    objective: Objective
    batch_size: Count
    kind: Kind = "minibatch"

    def __call__(self, variables: Variables, client: ClientView) -> Array:
        def squared_norm(batch: Batch) -> Array:
            context = Context(variables, client, jax.random.key(0))
            grads, _ = jax.grad(self.objective, has_aux=True)(
                variables.params, variables.state, batch, context
            )
            return jnp.square(tree.norm(grads)).astype(jnp.float32)

        def add(carry: tuple[Array, Array], batch: Batch) -> tuple[Array, Array]:
            total, count = carry
            if self.kind == "minibatch":
                return total + squared_norm(batch), count + 1
            norms = jax.vmap(squared_norm)(_alone(batch))
            real = jnp.sum(batch.mask, dtype=jnp.int32)
            return total + jnp.sum(jnp.where(batch.mask, norms, 0)), count + real

        total, count = sweep(client, self.batch_size, add, (jnp.float32(0), jnp.int32(0)))
        return total / jnp.maximum(count, 1).astype(jnp.float32)


class gradient_norm(squared_gradient):
    r"""The root of a client's mean squared gradient norm: of :class:`squared_gradient`.

    .. math:: q_k(w) = \Bigl( \frac{1}{\lceil n_k/B \rceil} \sum_b
              \lVert \nabla F_b(w) \rVert^2 \Bigr)^{1/2}

    Args:
        objective: the loss of a minibatch.
        batch_size: B.
        kind: see :class:`squared_gradient`.

    Source: Rizk et al. 2020 <https://arxiv.org/abs/2012.07383>, whose optimal probabilities combine
    the variance of a client's gradients and the norm of their mean in this way.
    """

    def __call__(self, variables: Variables, client: ClientView) -> Array:
        return jnp.sqrt(super().__call__(variables, client))


class mean_loss(Part):
    r"""A client's mean loss over its samples, by one forward pass.

    .. math:: F_k(w) = \frac{1}{n_k} \sum_i \ell_i(w)

    Samples are in their stored order and without the local update's transforms; the model is in
    training mode: BatchNorm sees minibatches of B. The score of a client without samples is 0.

    Args:
        objective: F.
        batch_size: B.

    >>> def squared_error(params, state, batch, context):
    ...     return jnp.mean((params - batch.x) ** 2, where=batch.mask), state
    >>> client = ClientView(jnp.array([1.0, 3.0, 6.0]), jnp.zeros(3, jnp.int32), jnp.arange(3),
    ...                     start=jnp.int32(0), size=jnp.int32(3), capacity=3)
    >>> round(float(mean_loss(squared_error, 2)(Variables(jnp.float32(0), {}), client)), 4)
    15.3333
    """

    objective: Objective
    batch_size: Count = 128

    def __call__(self, variables: Variables, client: ClientView) -> Array:
        return _mean_loss(self.objective, self.batch_size, variables, client, jax.random.key(0))


class accuracy(Part):
    """A client's accuracy on its samples, by one forward pass.

    The score of a client without samples is 0.

    Args:
        model: has one logit per class, and is in evaluation mode.
        batch_size: B.
    """

    model: Model
    batch_size: Count = 128

    for_classes = True

    def __call__(self, variables: Variables, client: ClientView) -> Array:
        def add(right: Array, batch: Batch) -> Array:
            logits, _ = self.model.apply(variables, batch.x, train=False)
            hit = (jnp.argmax(logits, axis=-1).astype(jnp.int32) == batch.y) & batch.mask
            return right + jnp.sum(hit, dtype=jnp.int32)

        right = sweep(client, self.batch_size, add, jnp.int32(0)).astype(jnp.float32)
        return right / jnp.maximum(client.size, 1).astype(jnp.float32)


class Reporting(Wrapper):
    """A local update that adds the number ``report`` to the client's report.

    Attributes:
        name: the name of the number in ``info.extra``.
    """

    name = ""

    def report(
        self, variables: Variables, client: ClientView, trained: Trained, key: Array
    ) -> Array:
        """Returns ``f32[]``, given the received and the trained model."""
        raise NotImplementedError

    @functools.cached_property
    def train(self) -> Train:
        return and_then(self.local.train, self._add)

    def _add(
        self, trained: Trained, key: Array, variables: Variables, client: ClientView, *states: Any
    ) -> Trained:
        extra = trained.info.extra | {self.name: self.report(variables, client, trained, key)}
        return trained._replace(info=trained.info._replace(extra=extra))


class with_importance(Reporting):
    """A local update that reports the client's score at a model as ``importance``.

    Args:
        local: the local update.
        score: e.g. :class:`squared_gradient`, which costs one more pass over the client's samples.
        received: whether the score is that of the received model, not of the trained one.

    Source: Xue et al. 2021 <https://arxiv.org/abs/2108.07433>, Algorithm 2, ClientUpdate line 3.
    """

    score: Score
    received: bool = False

    name = "importance"

    def report(
        self, variables: Variables, client: ClientView, trained: Trained, key: Array
    ) -> Array:
        return self.score(variables if self.received else trained.variables, client)


class with_initial_loss(Reporting):
    r"""A local update that reports the client's loss at the received model as ``initial_loss``.

    .. math:: F_k(w_{recv}) = \frac{1}{n_k} \sum_i \ell_i(w_{recv})

    It costs one forward pass over all its samples, in their stored order, without the local
    update's transforms. The model is in training mode: BatchNorm and dropout see minibatches of the
    local update's size. The clients of q-FedAvg and AFL send this loss. It is 0 for a client
    without samples.

    Args:
        local: the local update.
        objective: F.
    """

    objective: Objective

    name = "initial_loss"

    def report(
        self, variables: Variables, client: ClientView, trained: Trained, key: Array
    ) -> Array:
        dropout = stream(key, Client.INITIAL_LOSS)
        return _mean_loss(self.objective, self.local.batch_size, variables, client, dropout)


class with_final_loss(Reporting):
    r"""A local update that reports the client's loss at the trained model as ``final_loss``.

    .. math:: F_k(w_k) = \frac{1}{n_k} \sum_i \ell_i(w_k)

    It is computed like the loss of :class:`with_initial_loss`.

    Args:
        local: the local update.
        objective: F.
    """

    objective: Objective

    name = "final_loss"

    def report(
        self, variables: Variables, client: ClientView, trained: Trained, key: Array
    ) -> Array:
        size, dropout = self.local.batch_size, stream(key, Client.FINAL_LOSS)
        return _mean_loss(self.objective, size, trained.variables, client, dropout)


class with_utility(Reporting):
    r"""A local update that reports Oort's statistical utility as ``utility``.

    .. math:: n_k \sqrt{\frac{1}{n_k} \sum_i \ell_i(w_{recv})^2}

    It costs one forward pass of the received model over the client's samples, one by one, in their
    stored order, without the local update's transforms. The authors' clients add up the losses of
    their first epoch instead, while they train. It is 0 for a client without samples.

    Args:
        local: the local update.
        objective: its loss of a single sample is ℓ.

    Source: Lai et al. 2021 <https://arxiv.org/abs/2010.06081>, section 4.2.
    """

    objective: Objective

    name = "utility"

    def report(
        self, variables: Variables, client: ClientView, trained: Trained, key: Array
    ) -> Array:
        params, state = variables
        context = Context(variables, client, stream(key, Client.INITIAL_LOSS))

        def squared(batch: Batch) -> Array:
            loss = self.objective(params, state, batch, context)[0]
            return jnp.square(loss).astype(jnp.float32)

        def add(total: Array, batch: Batch) -> Array:
            each = jax.vmap(squared)(_alone(batch))
            return total + jnp.sum(jnp.where(batch.mask, each, 0))

        total = sweep(client, self.local.batch_size, add, jnp.float32(0))
        return jnp.sqrt(client.size.astype(jnp.float32) * total)


def _alone(batch: Batch) -> Batch:
    """Returns minibatches of one sample each, ``[B, 1, ...]``; padding counts as a sample."""
    alone: Batch = jax.tree.map(lambda a: a[:, None], batch._replace(mask=batch.mask | True))
    return alone


def _mean_loss(
    objective: Objective, batch_size: int, variables: Variables, client: ClientView, key: Array
) -> Array:
    """Returns the mean over all samples, ``f32[]``, in minibatches; ``key`` is for dropout."""
    params, state = variables

    def add(carry: tuple[Array, Array], batch: Batch) -> tuple[Array, Array]:
        number, total = carry
        batch_key = jax.random.fold_in(key, number)
        loss, _ = objective(params, state, batch, Context(variables, client, batch_key))
        real = jnp.sum(batch.mask).astype(jnp.float32)
        return number + 1, total + loss.astype(jnp.float32) * real

    total = sweep(client, batch_size, add, (jnp.int32(0), jnp.float32(0)))[1]
    return total / jnp.maximum(client.size, 1).astype(jnp.float32)
