"""Distillation from the outputs of older models on the client's samples."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    Batch,
    Context,
    Count,
    Gathered,
    Model,
    NonNegative,
    Part,
    Positive,
    Shared,
    Variables,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.needs import NO_FLIGHT, ONE_MODEL, PLAIN_SERVER
from fedjax_sim.tasks.losses import masked_mean


class not_true_distillation(Part):
    r"""FedNTD's term, which preserves the received model's outputs for the classes that are wrong.

    .. math:: \beta\, \mathrm{KL}\bigl(\tilde q_{recv} \,\|\, \tilde q_k\bigr), \qquad
              \tilde q(c) = \frac{e^{f_c / \tau}}{\sum_{c' \ne y} e^{f_{c'} / \tau}}, \quad
              c \ne y

    It costs one more forward pass, without dropout. The authors' code multiplies the term by τ².

    Args:
        model: the model that trains.
        beta: β; 0 changes nothing.
        temperature: τ.

    Source: Lee et al. 2022 <https://arxiv.org/abs/2106.03097>, section 4.
    """

    model: Model
    beta: NonNegative = 1.0
    temperature: Positive = 1.0

    for_classes = True

    def __call__(
        self, logits: Array, features: Array | None, batch: Batch, context: Context
    ) -> Array:
        theirs, _ = self.model.apply(context.received, batch.x, train=False, mask=batch.mask)
        true = batch.y[:, None] == jnp.arange(logits.shape[-1], dtype=batch.y.dtype)[None]

        def log_share(logits: Array) -> Array:
            return jax.nn.log_softmax(jnp.where(true, -jnp.inf, logits / self.temperature))

        teacher, student = log_share(theirs), log_share(logits)
        gap = jnp.where(true, 0, teacher) - jnp.where(true, 0, student)
        divergence = jnp.sum(jnp.where(true, 0, jnp.exp(teacher)) * gap, axis=-1)
        return self.beta * masked_mean(divergence, batch.mask)


class PastModels(NamedTuple):
    """The last server models, whose mean is sent to the clients.

    Attributes:
        mean: ``[*p]``, the mean of the models so far.
        models: ``[M, *p]``, a ring; the model after n updates is row ``n % M``.
        updates: ``int32[]``, n, the updates so far.
    """

    mean: Variables
    models: Variables
    updates: Array


class past_models(Shared):
    r"""The mean of the last server models, which the server sends along.

    .. math:: \bar w_t = \frac{1}{\min(M, t + 1)} \sum_{i = 0}^{\min(M, t + 1) - 1} w_{t-i}

    Every download has the size of two models; clients send nothing for it. Running statistics
    (BatchNorm) are averaged like weights. The state is ``PastModels``.

    Args:
        buffer: M; the server keeps that many models, and their mean.

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

    buffer: Count = 5

    needs = (ONE_MODEL, NO_FLIGHT, PLAIN_SERVER)

    def init(self, variables: Variables) -> PastModels:
        copies = tree.stack_copies(variables, self.buffer, "buffer")
        return PastModels(variables, copies, jnp.int32(0))

    def follow(self, state: PastModels, step: Variables, gathered: Gathered) -> PastModels:
        updates = state.updates + 1
        new = tree.add(gathered.cohort.server, step)
        models = jax.tree.map(lambda a, w: a.at[updates % self.buffer].set(w), state.models, new)
        known = jnp.arange(self.buffer, dtype=jnp.int32) <= updates
        return PastModels(tree.mean(models, known.astype(jnp.float32)), models, updates)

    def downloaded(self, state: PastModels) -> Variables:
        return state.mean


class teacher_distillation(Part):
    r"""FedGKD's term: the client's outputs stay near those of a teacher, a past server model.

    .. math:: \gamma \tau^2\, \mathrm{KL}\Bigl(\sigma\bigl(f(\bar w, x) / \tau\bigr) \,\|\,
              \sigma\bigl(f(w, x) / \tau\bigr)\Bigr)

    The teacher w̄ is the mean model of ``shared=past_models(...)``; without it, the received model.
    It costs one more forward pass, without dropout.

    Args:
        model: the model that trains.
        gamma: γ; 0 changes nothing.
        temperature: τ.

    Source: Yao et al. 2021 <https://arxiv.org/abs/2107.00051>, as in its authors' code.
    """

    model: Model
    gamma: NonNegative = 0.1
    temperature: Positive = 1.0

    for_classes = True

    def __call__(
        self, logits: Array, features: Array | None, batch: Batch, context: Context
    ) -> Array:
        past, temperature = context.shared, self.temperature
        teacher = past.mean if isinstance(past, PastModels) else context.received
        theirs, _ = self.model.apply(teacher, batch.x, train=False, mask=batch.mask)
        wanted, found = (jax.nn.log_softmax(f / temperature) for f in (theirs, logits))
        divergence = jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1)
        return self.gamma * temperature**2 * masked_mean(divergence, batch.mask)
