"""Mean outputs by class, which clients share in place of a model: federated distillation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Aggregator,
    Array,
    Batch,
    Context,
    Memory,
    Model,
    Shared,
    Variables,
    concrete,
    for_classes,
    part,
)
from fedjax_sim.client.losses import masked_mean
from fedjax_sim.client.objective import Term
from fedjax_sim.engine.batches import of_class, sweep

AT_ONCE = 64  # samples of a client whose outputs are computed together
NEVER = -2  # the round of a visit that was not: none has it as the round before


class Outputs(NamedTuple):
    """Mean outputs of the last cohort by class.

    Attributes:
        mean: ``f32[M, M]``; row j is the mean over the clients that have class j.
        clients: ``int32[M]``, how many they are.
    """

    mean: Array
    clients: Array


class OwnOutputs(NamedTuple):
    """What a client told when it was last there.

    Attributes:
        mean: ``f32[M, M]``; a row of 0 for a class that it lacks.
        round: ``int32[]``, when.
    """

    mean: Array
    round: Array


@part
@for_classes
def class_outputs(model: Model, classes: int) -> Shared:
    r"""The mean output of every class, over the clients of the last cohort that have it.

    .. math:: q_{k,j} = \frac{1}{n_{k,j}} \sum_{i : y_i = j} \sigma(f(w_k, x_i)), \qquad
              \bar q_j = \frac{1}{|U_j|} \sum_{k \in U_j} q_{k,j}, \quad
              U_j = \{k \in U : n_{k,j} > 0\}

    with the logits f and the softmax σ, by the model that client k has just trained, without
    dropout. (The paper's are means of what the epoch computed while the model still moved.) The
    composition's aggregator takes the mean of each class: a robust one guards it.

    Args:
        model: the model that trains.
        classes: M.

    Returns:
        What is shared, :class:`Outputs`: 4 M (M + 1) bytes down, 4 M² up.

    Raises:
        ValueError: if classes is not positive.

    Source: Jeong et al. 2018 <https://arxiv.org/abs/1811.11479>, Algorithm 1.

    Example:
        >>> from fedjax_sim import models
        >>> class_outputs(models.mlp((4,), 3), 3).init(None).mean.shape
        (3, 3)
    """
    mean_outputs = _mean_outputs(model, classes)

    def none(variables: Variables) -> Outputs:
        del variables
        return Outputs(jnp.zeros((classes, classes), jnp.float32), jnp.zeros(classes, jnp.int32))

    def reduce(
        last: Outputs, sent: Array, weights: Array, clients: int, aggregator: Aggregator
    ) -> Outputs:
        del last, clients
        has = (weights[:, None] > 0) & (jnp.sum(sent, axis=-1) > 0)  # [P, M]
        anyone = jnp.any(has, axis=0)
        counted = jnp.where(anyone, has, True).astype(jnp.float32)
        mean = jax.vmap(aggregator, in_axes=1)(sent, counted)
        count = jnp.sum(has, axis=0, dtype=jnp.int32)
        return Outputs(jnp.where(anyone[:, None], mean, 0), count)

    return Shared(none, mean_outputs, reduce)


@part
@for_classes
def own_outputs(model: Model, classes: int) -> Memory:
    """What the client itself told of its outputs, to be left out of the others' mean.

    Args:
        model: the model that trains.
        classes: M.

    Returns:
        A memory, :class:`OwnOutputs`: 4 M² + 4 bytes for every client.
    """
    mean_outputs = _mean_outputs(model, classes)

    def init(variables: Variables) -> OwnOutputs:
        del variables
        return OwnOutputs(jnp.zeros((classes, classes), jnp.float32), jnp.int32(NEVER))

    def keep(trained: Variables, context: Context) -> OwnOutputs:
        now = context.client.round
        return OwnOutputs(mean_outputs(trained, context), jnp.int32(NEVER) if now is None else now)

    return Memory(init, keep)


@part
@for_classes
def near_outputs(gamma: float = 1.0) -> Term:
    r"""FD's term: a sample's output near the others' mean output of its class.

    .. math:: -\frac{\gamma}{|b|} \sum_{i \in b} \sum_c \hat q_{k,y_i}(c) \log \sigma(f(w, x_i))_c,
              \qquad \hat q_{k,j} = \frac{1}{|U_j \setminus k|} \sum_{l \in U_j \setminus k} q_{l,j}

    A class that none of the others has shown in the last round adds nothing. Needs
    ``shared=class_outputs(...)`` and ``memory=own_outputs(...)``.

    Args:
        gamma: γ; 0 changes nothing.

    Returns:
        A term of the objective.

    Raises:
        ValueError: if gamma is negative; in the first step, if the clients share no outputs or do
            not remember their own.

    Source: Jeong et al. 2018 <https://arxiv.org/abs/1811.11479>, Algorithm 1.

    Example:
        >>> from types import SimpleNamespace
        >>> told = Outputs(jnp.array([[0.5, 0.5], [0.2, 0.8]]), jnp.array([0, 2]))
        >>> own = OwnOutputs(jnp.array([[0.0, 0], [0.4, 0.6]]), jnp.int32(6))
        >>> client = SimpleNamespace(round=jnp.int32(7))
        >>> context = Context(None, client, None, own, told)  # the other's is (0, 1)
        >>> batch = Batch(jnp.zeros((1, 2)), jnp.array([1]), jnp.array([True]))
        >>> logits = jnp.log(jnp.array([[0.75, 0.25]]))
        >>> round(float(jnp.exp(-near_outputs()(logits, None, batch, context))), 4)
        0.25
    """
    if concrete(gamma) and not gamma >= 0:
        raise ValueError(f"gamma must be at least 0, got {gamma}")

    def term(logits: Array, seen: Array | None, batch: Batch, context: Context) -> Array:
        del seen
        told, own, now = context.shared, context.memory, context.client.round
        if not (isinstance(told, Outputs) and isinstance(own, OwnOutputs)) or now is None:
            raise ValueError(
                "near_outputs needs shared=class_outputs(...) and memory=own_outputs(...) in "
                "local_sgd"
            )
        mine = (own.round == now - 1) & (jnp.sum(own.mean, axis=-1) > 0)  # [M]
        others = told.clients - mine.astype(jnp.int32)
        count = told.clients.astype(told.mean.dtype)[:, None]
        total = told.mean * count - jnp.where(mine[:, None], own.mean, 0)
        teacher = total / jnp.maximum(others, 1).astype(total.dtype)[:, None]
        gap = -jnp.sum(teacher[batch.y] * jax.nn.log_softmax(logits), axis=-1)
        return gamma * masked_mean(jnp.where(others[batch.y] > 0, gap, 0), batch.mask)

    return term


def _mean_outputs(model: Model, classes: int) -> Callable[[Variables, Context], Array]:
    """A client's mean outputs by class, ``f32[M, M]``; a row of 0 for a class that it lacks."""
    if classes < 1:
        raise ValueError(f"classes must be at least 1, got {classes}")

    def mean_outputs(trained: Variables, context: Context) -> Array:
        def add(sums: tuple[Array, Array], batch: Batch) -> tuple[Array, Array]:
            logits, _ = model.apply(trained, batch.x, train=False, mask=batch.mask)
            mine = of_class(batch, classes).astype(jnp.float32)
            outputs = jax.nn.softmax(logits.astype(jnp.float32))
            return sums[0] + mine.T @ outputs, sums[1] + jnp.sum(mine, axis=0)

        none = jnp.zeros((classes, classes), jnp.float32), jnp.zeros(classes, jnp.float32)
        total, count = sweep(context.client, AT_ONCE, add, none)
        return total / jnp.maximum(count, 1)[:, None]

    return mean_outputs
