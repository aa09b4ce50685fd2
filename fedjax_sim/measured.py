"""Wrappers of a local update that report what the server wants to know of a client."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

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


def with_initial_loss(local: LocalUpdate, objective: Objective) -> LocalUpdate:
    r"""Reports the client's loss at the model it received, as ``initial_loss``.

    .. math:: F_k(w_{recv}) = \frac{1}{n_k} \sum_i \ell_i(w_{recv})

    One forward pass over all its samples, in their stored order, without the local update's
    transforms. The model is in training mode, in minibatches of the local update's size; BatchNorm
    and dropout see those.

    Args:
        local: the local update.
        objective: F.

    Returns:
        The same local update with ``info.extra["initial_loss"]``, ``f32[]``; 0 of nobody.

    Source: Li, Sanjabi, Beirami, Smith, "Fair resource allocation in federated learning", ICLR
    2020, Algorithm 2 (q-FedAvg), where :math:`F_k(w^t)` is sent along.
    """

    def train(
        key: Array, variables: Variables, client: ClientView, memory: PyTree, shared: PyTree
    ) -> Trained:
        params, state = variables
        dropout = jax.random.fold_in(key, 2**31 - 4)

        def add(carry: tuple[Array, Array], batch: Batch) -> tuple[Array, Array]:
            number, total = carry
            batch_key = jax.random.fold_in(dropout, number)
            loss, _ = objective(params, state, params, batch, batch_key)
            return number + 1, total + loss * jnp.sum(batch.mask).astype(jnp.float32)

        start = (jnp.int32(0), jnp.float32(0))
        total = sweep(client, local.batch_size, add, start)[1]
        loss = total / jnp.maximum(client.size, 1).astype(jnp.float32)
        trained = local.train(key, variables, client, memory, shared)
        extra = trained.info.extra | {"initial_loss": loss}
        return trained._replace(info=trained.info._replace(extra=extra))

    def change(**settings: Any) -> LocalUpdate:
        return with_initial_loss(local.change(**settings), objective)

    return local._replace(train=train, change=change)
