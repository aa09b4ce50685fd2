"""What a client reports besides its model: its importance, its loss at the start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    Batch,
    ClientView,
    Context,
    LocalUpdate,
    Model,
    Objective,
    PyTree,
    Trained,
    Variables,
    and_then,
    for_classes,
    part,
    wrap,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import sweep
from fedjax_sim.engine.streams import Client, stream

Kind = Literal["minibatch", "sample"]
Score = Callable[[Variables, ClientView], Array]
"""``(variables, client) -> f32[]``, q_k of one client at a model."""


@part
def squared_gradient(objective: Objective, batch_size: int, kind: Kind = "minibatch") -> Score:
    r"""The mean squared norm of a client's gradients, over its minibatches or over its samples.

    .. math:: q_k(w) = \frac{1}{\lceil n_k/B \rceil} \sum_b \lVert \nabla F_b(w) \rVert^2
              \qquad\text{or}\qquad
              q_k(w) = \frac{1}{n_k} \sum_i \lVert \nabla \ell_i(w) \rVert^2

    Minibatches are taken in the stored order; a short last one counts as much as the others, as in
    the authors' code. Samples are as they are stored, without the local update's transforms; the
    model is in training mode.

    Args:
        objective: the loss of a minibatch; if it has a regularisation, that belongs to ℓ.
        batch_size: B.
        kind: "minibatch", as in the first version of the paper and in the authors' code; "sample",
          as in the second version's Algorithm 2, which takes B times the memory of a gradient.
          BatchNorm has no statistics of a single sample: use "minibatch" with it.

    Returns:
        The score of one client; 0 for a client without samples.

    Raises:
        ValueError: if batch_size or kind is out of range.

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
    _check_batch(batch_size)
    if kind not in ("minibatch", "sample"):
        raise ValueError(f"kind must be 'minibatch' or 'sample', got {kind!r}")

    def score(variables: Variables, client: ClientView) -> Array:
        def squared_norm(batch: Batch) -> Array:
            context = Context(variables, client, jax.random.key(0))
            grads, _ = jax.grad(objective, has_aux=True)(
                variables.params, variables.state, batch, context
            )
            return jnp.square(tree.norm(grads)).astype(jnp.float32)

        def add(carry: tuple[Array, Array], batch: Batch) -> tuple[Array, Array]:
            total, count = carry
            if kind == "minibatch":
                return total + squared_norm(batch), count + 1
            norms = jax.vmap(squared_norm)(_alone(batch))
            real = jnp.sum(batch.mask, dtype=jnp.int32)
            return total + jnp.sum(jnp.where(batch.mask, norms, 0)), count + real

        total, count = sweep(client, batch_size, add, (jnp.float32(0), jnp.int32(0)))
        return total / jnp.maximum(count, 1).astype(jnp.float32)

    return score


@part
def mean_loss(objective: Objective, batch_size: int = 128) -> Score:
    r"""A client's mean loss over its samples: one pass forward.

    .. math:: F_k(w) = \frac{1}{n_k} \sum_i \ell_i(w)

    Samples are in their stored order and without the local update's transforms; the model is in
    training mode: BatchNorm sees minibatches of B.

    Args:
        objective: F.
        batch_size: B.

    Returns:
        A function of a model and a client, f32[]; 0 for a client without samples.

    Raises:
        ValueError: if batch_size is not positive.

    >>> def squared_error(params, state, batch, context):
    ...     return jnp.mean((params - batch.x) ** 2, where=batch.mask), state
    >>> client = ClientView(jnp.array([1.0, 3.0, 6.0]), jnp.zeros(3, jnp.int32), jnp.arange(3),
    ...                     start=jnp.int32(0), size=jnp.int32(3), capacity=3)
    >>> round(float(mean_loss(squared_error, 2)(Variables(jnp.float32(0), {}), client)), 4)
    15.3333
    """
    _check_batch(batch_size)

    def score(variables: Variables, client: ClientView) -> Array:
        return _mean_loss(objective, batch_size, variables, client, jax.random.key(0))

    return score


@part
@for_classes
def accuracy(model: Model, batch_size: int = 128) -> Score:
    """The share of a client's samples whose class is the model's first: one pass forward.

    Args:
        model: its logits are by class, in evaluation mode.
        batch_size: B.

    Returns:
        A function of a model and a client, f32[]; 0 for a client without samples.

    Raises:
        ValueError: if batch_size is not positive.
    """
    _check_batch(batch_size)

    def score(variables: Variables, client: ClientView) -> Array:
        def add(right: Array, batch: Batch) -> Array:
            logits, _ = model.apply(variables, batch.x, train=False)
            hit = (jnp.argmax(logits, axis=-1).astype(jnp.int32) == batch.y) & batch.mask
            return right + jnp.sum(hit, dtype=jnp.int32)

        right = sweep(client, batch_size, add, jnp.int32(0)).astype(jnp.float32)
        return right / jnp.maximum(client.size, 1).astype(jnp.float32)

    return score


@part
def with_importance(local: LocalUpdate, score: Score) -> LocalUpdate:
    """Reports the client's score at the weights that it has just trained, as ``importance``.

    Args:
        local: the local update.
        score: e.g. :func:`squared_gradient`; one more pass over the client's samples.

    Returns:
        The same local update with ``info.extra["importance"]``, ``f32[]``.

    Source: Xue et al. 2021 <https://arxiv.org/abs/2108.07433>, Algorithm 2, ClientUpdate line 3.
    """

    def scored(
        local: LocalUpdate, variables: Variables, client: ClientView, trained: Trained, key: Array
    ) -> Array:
        del local, variables, key
        return score(trained.variables, client)

    return _reporting(local, "importance", scored)


@part
def with_initial_loss(local: LocalUpdate, objective: Objective) -> LocalUpdate:
    r"""Reports the client's loss at the model it received, as ``initial_loss``.

    .. math:: F_k(w_{recv}) = \frac{1}{n_k} \sum_i \ell_i(w_{recv})

    This is one forward pass over all its samples, in their stored order, without the local update's
    transforms. The model is in training mode: BatchNorm and dropout see minibatches of the local
    update's size. The clients of q-FedAvg and of AFL send this loss along.

    Args:
        local: the local update.
        objective: F.

    Returns:
        The same local update with ``info.extra["initial_loss"]``, ``f32[]``; 0 for a client without
        samples.
    """

    def loss(
        local: LocalUpdate, variables: Variables, client: ClientView, trained: Trained, key: Array
    ) -> Array:
        del trained
        dropout = stream(key, Client.INITIAL_LOSS)
        return _mean_loss(objective, local.batch_size, variables, client, dropout)

    return _reporting(local, "initial_loss", loss)


@part
def with_final_loss(local: LocalUpdate, objective: Objective) -> LocalUpdate:
    r"""Reports the client's loss at the model that it has trained, as ``final_loss``.

    .. math:: F_k(w_k) = \frac{1}{n_k} \sum_i \ell_i(w_k)

    It is taken as :func:`with_initial_loss` takes that at the model received.

    Args:
        local: the local update.
        objective: F.

    Returns:
        The same local update with ``info.extra["final_loss"]``, ``f32[]``; 0 for a client without
        samples.
    """

    def loss(
        local: LocalUpdate, variables: Variables, client: ClientView, trained: Trained, key: Array
    ) -> Array:
        del variables
        dropout = stream(key, Client.FINAL_LOSS)
        return _mean_loss(objective, local.batch_size, trained.variables, client, dropout)

    return _reporting(local, "final_loss", loss)


@part
def with_utility(local: LocalUpdate, objective: Objective) -> LocalUpdate:
    r"""Reports Oort's statistical utility at the model that the client received, as ``utility``.

    .. math:: n_k \sqrt{\frac{1}{n_k} \sum_i \ell_i(w_{recv})^2}

    This is one pass forward over its samples, one by one, in their stored order, without the local
    update's transforms. The authors' clients add up the losses of their first epoch instead, as
    they train.

    Args:
        local: the local update.
        objective: its loss of a single sample is ℓ.

    Returns:
        The same local update with ``info.extra["utility"]``, ``f32[]``; 0 for a client without
        samples.

    Source: Lai et al. 2021 <https://arxiv.org/abs/2010.06081>, section 4.2.
    """

    def utility(
        local: LocalUpdate, variables: Variables, client: ClientView, trained: Trained, key: Array
    ) -> Array:
        del trained
        params, state = variables
        context = Context(variables, client, stream(key, Client.INITIAL_LOSS))

        def squared(batch: Batch) -> Array:
            return jnp.square(objective(params, state, batch, context)[0]).astype(jnp.float32)

        def add(total: Array, batch: Batch) -> Array:
            each = jax.vmap(squared)(_alone(batch))
            return total + jnp.sum(jnp.where(batch.mask, each, 0))

        total = sweep(client, local.batch_size, add, jnp.float32(0))
        return jnp.sqrt(client.size.astype(jnp.float32) * total)

    return _reporting(local, "utility", utility)


def _alone(batch: Batch) -> Batch:
    """Each sample as a minibatch of its own, ``[B, 1, ...]``; padding counts as a sample."""
    alone: Batch = jax.tree.map(lambda a: a[:, None], batch._replace(mask=batch.mask | True))
    return alone


def _check_batch(batch_size: int) -> None:
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")


def _mean_loss(
    objective: Objective, batch_size: int, variables: Variables, client: ClientView, key: Array
) -> Array:
    """The mean over all samples, in minibatches: ``f32[]``; ``key`` is that of dropout."""
    params, state = variables

    def add(carry: tuple[Array, Array], batch: Batch) -> tuple[Array, Array]:
        number, total = carry
        batch_key = jax.random.fold_in(key, number)
        loss, _ = objective(params, state, batch, Context(variables, client, batch_key))
        real = jnp.sum(batch.mask).astype(jnp.float32)
        return number + 1, total + loss.astype(jnp.float32) * real

    total = sweep(client, batch_size, add, (jnp.int32(0), jnp.float32(0)))[1]
    return total / jnp.maximum(client.size, 1).astype(jnp.float32)


def _reporting(
    local: LocalUpdate,
    name: str,
    number: Callable[[LocalUpdate, Variables, ClientView, Trained, Array], Array],
) -> LocalUpdate:
    """Adds ``number(local, received, client, trained, key)`` to the client's report."""

    def wrapper(local: LocalUpdate) -> LocalUpdate:
        def reported(
            trained: Trained,
            key: Array,
            variables: Variables,
            client: ClientView,
            client_state: PyTree,
            shared_state: PyTree,
        ) -> Trained:
            del client_state, shared_state
            extra = trained.info.extra | {name: number(local, variables, client, trained, key)}
            return trained._replace(info=trained.info._replace(extra=extra))

        return dataclasses.replace(local, train=and_then(local.train, reported))

    return wrap(wrapper, local)
