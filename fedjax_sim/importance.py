"""How much a client would still move a model: the scores of importance sampling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fedjax_sim import tree
from fedjax_sim.base import (
    Array,
    Batch,
    ClientView,
    LocalUpdate,
    Objective,
    PyTree,
    Trained,
    Variables,
)
from fedjax_sim.batches import sweep

Kind = Literal["minibatch", "sample"]
Score = Callable[[Variables, ClientView], Array]
"""``(variables, client) -> f32[]``, q_k of one client at a model."""


def squared_gradient(objective: Objective, batch_size: int, kind: Kind = "minibatch") -> Score:
    r"""The mean squared norm of a client's gradients, of its minibatches or of its samples.

    .. math:: q_k(w) = \frac{1}{\lceil n_k/B \rceil} \sum_b \lVert \nabla F_b(w) \rVert^2
              \qquad\text{or}\qquad
              q_k(w) = \frac{1}{n_k} \sum_i \lVert \nabla \ell_i(w) \rVert^2

    Minibatches are taken in the stored order; a short last one counts as much as the others, as in
    the authors' code. Samples are as they are stored, without the local update's transforms; the
    model is in training mode.

    Args:
        objective: the loss of a minibatch; any regularisation of its own belongs to ℓ.
        batch_size: B.
        kind: "minibatch", of the first version of the paper and of the authors' code; "sample", of
          the second version's Algorithm 2, which takes B times the memory of a gradient. BatchNorm
          has no statistics of a single sample: use "minibatch" there.

    Returns:
        The score of one client, 0 of nobody.

    Raises:
        ValueError: if batch_size or kind is out of range.

    Source: Xue, Klabjan, Luo, "Aggregation delayed federated learning", section III-B and
    Algorithm 2.

    Example:
        >>> def squared_error(params, state, received, batch, key):
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
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if kind not in ("minibatch", "sample"):
        raise ValueError(f"kind must be 'minibatch' or 'sample', got {kind!r}")

    def score(variables: Variables, client: ClientView) -> Array:
        def squared_norm(batch: Batch) -> Array:
            grads, _ = jax.grad(objective, has_aux=True)(
                variables.params, variables.state, variables.params, batch, jax.random.key(0)
            )
            return jnp.square(tree.norm(grads))

        def add(carry: tuple[Array, Array], batch: Batch) -> tuple[Array, Array]:
            total, count = carry
            if kind == "minibatch":
                return total + squared_norm(batch), count + 1
            alone = jax.tree.map(lambda a: a[:, None], batch._replace(mask=batch.mask | True))
            norms = jax.vmap(squared_norm)(alone)
            return total + jnp.sum(jnp.where(batch.mask, norms, 0)), count + jnp.sum(batch.mask)

        total, count = sweep(client, batch_size, add, (jnp.float32(0), jnp.int32(0)))
        return total / jnp.maximum(count, 1).astype(jnp.float32)

    return score


def with_importance(local: LocalUpdate, score: Score) -> LocalUpdate:
    """Reports the client's score at the weights that it has just trained, as ``importance``.

    Where local compresses, those are the weights as they are sent, from which others go on.

    Args:
        local: the local update.
        score: e.g. :func:`squared_gradient`; one more pass over the client's samples.

    Returns:
        The same local update with ``info.extra["importance"]``, ``f32[]``.

    Source: Xue, Klabjan, Luo, Algorithm 2, ClientUpdate line 3.
    """

    def train(
        key: Array, variables: Variables, client: ClientView, memory: PyTree, shared: PyTree
    ) -> Trained:
        trained = local.train(key, variables, client, memory, shared)
        extra = trained.info.extra | {"importance": score(trained.variables, client)}
        return trained._replace(info=trained.info._replace(extra=extra))

    def change(**settings: Any) -> LocalUpdate:
        return with_importance(local.change(**settings), score)

    return local._replace(train=train, change=change)
