"""Clients that learn from what older models say of their samples."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Aggregator,
    Array,
    Batch,
    Context,
    Gathered,
    Model,
    PyTree,
    Shared,
    Variables,
    concrete,
    for_classes,
    part,
)
from fedjax_sim.client.losses import masked_mean
from fedjax_sim.client.objective import Term
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import NO_FLIGHT, ONE_MODEL, PLAIN_SERVER


@part
@for_classes
def not_true_distillation(model: Model, beta: float = 1.0, temperature: float = 1.0) -> Term:
    r"""FedNTD's term: what the received model says of the classes that are not true is kept.

    .. math:: \beta\, \mathrm{KL}\bigl(\tilde q_{recv} \,\|\, \tilde q_k\bigr), \qquad
              \tilde q(c) = \frac{e^{f_c / \tau}}{\sum_{c' \ne y} e^{f_{c'} / \tau}}, \quad
              c \ne y

    It costs one forward pass more, without dropout.

    Args:
        model: the model that trains.
        beta: β; 0 changes nothing.
        temperature: τ.

    Returns:
        A term of the objective.

    Raises:
        ValueError: if beta is negative or the temperature not positive.

    Source: Lee et al. 2022 <https://arxiv.org/abs/2106.03097>, section 4.
    """
    if concrete(beta) and not beta >= 0:
        raise ValueError(f"beta must be at least 0, got {beta}")
    if concrete(temperature) and not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")

    def term(logits: Array, seen: Array | None, batch: Batch, context: Context) -> Array:
        del seen
        theirs, _ = model.apply(context.received, batch.x, train=False, mask=batch.mask)
        true = batch.y[:, None] == jnp.arange(logits.shape[-1], dtype=batch.y.dtype)[None]

        def log_share(logits: Array) -> Array:
            return jax.nn.log_softmax(jnp.where(true, -jnp.inf, logits / temperature))

        teacher, student = log_share(theirs), log_share(logits)
        gap = jnp.where(true, 0, teacher) - jnp.where(true, 0, student)
        divergence = jnp.sum(jnp.where(true, 0, jnp.exp(teacher)) * gap, axis=-1)
        return beta * masked_mean(divergence, batch.mask)

    return term


class PastModels(NamedTuple):
    """The last server models, of which clients know the mean.

    Attributes:
        mean: ``[*p]``, of those that there are.
        models: ``[M, *p]``, a ring; the model after n updates is row ``n % M``.
        updates: ``int32[]``, n, the updates so far.
    """

    mean: Variables
    models: Variables
    updates: Array


@part
def past_models(buffer: int = 5) -> Shared:
    r"""The mean of the last server models, which the server sends along.

    .. math:: \bar w_t = \frac{1}{\min(M, t + 1)} \sum_{i = 0}^{\min(M, t + 1) - 1} w_{t-i}

    Clients send nothing for it. Running statistics (BatchNorm) are averaged like weights.

    Args:
        buffer: M; the server keeps that many models, and their mean.

    Returns:
        What is shared, :class:`PastModels`; a model more goes down with every model.

    Raises:
        ValueError: if buffer is not positive.

    Source: Yao et al. 2021 <https://arxiv.org/abs/2107.00051>.

    Example:
        >>> from types import SimpleNamespace
        >>> shared, w = past_models(2), lambda value: Variables(jnp.float32(value), ())
        >>> state, server = shared.init(w(8.0)), 8.0
        >>> for step in (2.0, -6.0):  # to 10 and to 4
        ...     gathered = Gathered(None, None, SimpleNamespace(server=w(server)))
        ...     state, server = shared.follow(state, w(step), gathered), server + step
        ...     print(float(state.mean.params))
        9.0
        7.0
    """
    if buffer < 1:
        raise ValueError(f"buffer must be at least 1, got {buffer}")

    def init(variables: Variables) -> PastModels:
        copies = tree.stack_copies(variables, buffer, "buffer")
        return PastModels(variables, copies, jnp.int32(0))

    def follow(state: PastModels, step: Variables, gathered: Gathered) -> PastModels:
        updates = state.updates + 1
        new = tree.add(gathered.cohort.server, step)
        models = jax.tree.map(lambda a, w: a.at[updates % buffer].set(w), state.models, new)
        known = jnp.arange(buffer, dtype=jnp.int32) <= updates
        return PastModels(tree.mean(models, known.astype(jnp.float32)), models, updates)

    def reduce(
        state: PastModels, sent: PyTree, weights: Array, clients: int, aggregator: Aggregator
    ) -> PastModels:
        del sent, weights, clients, aggregator
        return state

    return Shared(
        init,
        lambda trained, context: (),
        reduce,
        follow=follow,
        told=lambda state: state.mean,
        needs=(ONE_MODEL, NO_FLIGHT, PLAIN_SERVER),
    )


@part
@for_classes
def teacher_distillation(model: Model, gamma: float = 0.1, temperature: float = 1.0) -> Term:
    r"""FedGKD's term: a client's answers stay near those of a teacher, the server's past.

    .. math:: \gamma \tau^2\, \mathrm{KL}\Bigl(\sigma\bigl(f(\bar w, x) / \tau\bigr) \,\Big\|\,
              \sigma\bigl(f(w, x) / \tau\bigr)\Bigr)

    The teacher w̄ is the mean model of ``shared=past_models(...)``, or without it the model that the
    client received. It speaks without dropout, and costs one forward pass more.

    Args:
        model: the model that trains.
        gamma: γ; 0 changes nothing.
        temperature: τ.

    Returns:
        A term of the objective.

    Raises:
        ValueError: if gamma is negative or the temperature not positive.

    Source: Yao et al. 2021 <https://arxiv.org/abs/2107.00051>, as in its authors' code.
    """
    if concrete(gamma) and not gamma >= 0:
        raise ValueError(f"gamma must be at least 0, got {gamma}")
    if concrete(temperature) and not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")

    def term(logits: Array, seen: Array | None, batch: Batch, context: Context) -> Array:
        del seen
        past = context.shared
        teacher = past.mean if isinstance(past, PastModels) else context.received
        theirs, _ = model.apply(teacher, batch.x, train=False, mask=batch.mask)
        wanted, said = (jax.nn.log_softmax(f / temperature) for f in (theirs, logits))
        divergence = jnp.sum(jnp.exp(wanted) * (wanted - said), axis=-1)
        return gamma * temperature**2 * masked_mean(divergence, batch.mask)

    return term
