"""Class means that clients share instead of a model: outputs (FD) and features (FedProto)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Aggregator,
    Array,
    Batch,
    Context,
    Count,
    Memory,
    Model,
    NonNegative,
    Part,
    Shared,
    Variables,
)
from fedjax_sim.engine.batches import of_class, sweep
from fedjax_sim.models.leaves import features_of, kernel_of
from fedjax_sim.tasks.losses import masked_mean

AT_ONCE = 64
"""The number of a client's samples that pass through the model together."""

NEVER = -2
"""The round of a client's last visit before its first one; no round follows it."""


class Outputs(NamedTuple):
    """Mean outputs of the last cohort by class.

    Attributes:
        mean: ``f32[M, M]``; row j is the mean over the clients that have class j.
        clients: ``int32[M]``, the number of these clients.
    """

    mean: Array
    clients: Array


class OwnOutputs(NamedTuple):
    """The outputs that a client sent at its last visit.

    Attributes:
        mean: ``f32[M, M]``; rows of classes that the client lacks are 0.
        round: ``int32[]``, the round of that visit.
    """

    mean: Array
    round: Array


class class_outputs(Shared):
    r"""The mean output of every class, over the clients of the last cohort that have it.

    .. math:: q_{k,j} = \frac{1}{n_{k,j}} \sum_{i : y_i = j} \sigma(f(w_k, x_i)), \qquad
              \bar q_j = \frac{1}{|U_j|} \sum_{k \in U_j} q_{k,j}, \quad
              U_j = \{k \in U : n_{k,j} > 0\}

    f are the logits, without dropout, of the model that client k has just trained, and σ is the
    softmax. (The paper averages over an epoch, during which the model still changes.) The
    composition's aggregator averages each class, so a robust one protects it. The state is
    ``Outputs``: 4 M (M + 1) bytes down, 4 M² up.

    Args:
        model: the model that trains.
        classes: M.

    Source: Jeong et al. 2018 <https://arxiv.org/abs/1811.11479>, Algorithm 1.
    """

    model: Model
    classes: Count

    for_classes = True

    def init(self, variables: Variables) -> Outputs:
        mean = jnp.zeros((self.classes, self.classes), jnp.float32)
        return Outputs(mean, jnp.zeros(self.classes, jnp.int32))

    def send(self, trained: Variables, context: Context) -> Array:
        return _mean_outputs(self.model, self.classes, trained, context)

    def reduce(
        self, last: Outputs, sent: Array, weights: Array, clients: int, aggregator: Aggregator
    ) -> Outputs:
        has = (weights[:, None] > 0) & (jnp.sum(sent, axis=-1) > 0)  # [P, M]
        anyone = jnp.any(has, axis=0)
        counted = jnp.where(anyone, has, True).astype(jnp.float32)
        mean = jax.vmap(aggregator, in_axes=1)(sent, counted)
        count = jnp.sum(has, axis=0, dtype=jnp.int32)
        return Outputs(jnp.where(anyone[:, None], mean, 0), count)


class own_outputs(Memory):
    """The outputs that the client sent itself, to be subtracted from the cohort's mean.

    Each client keeps ``OwnOutputs``, 4 M² + 4 bytes.

    Args:
        model: the model that trains.
        classes: M.
    """

    model: Model
    classes: Count

    for_classes = True

    def init(self, variables: Variables) -> OwnOutputs:
        return OwnOutputs(jnp.zeros((self.classes, self.classes), jnp.float32), jnp.int32(NEVER))

    def keep(self, trained: Variables, context: Context) -> OwnOutputs:
        now, mean = context.client.round, _mean_outputs(self.model, self.classes, trained, context)
        return OwnOutputs(mean, jnp.int32(NEVER) if now is None else now)


class near_outputs(Part):
    r"""FD's term: a sample's output stays near the other clients' mean output of its class.

    .. math:: -\frac{\gamma}{|b|} \sum_{i \in b} \sum_c \hat q_{k,y_i}(c) \log \sigma(f(w, x_i))_c,
              \qquad \hat q_{k,j} = \frac{1}{|U_j \setminus k|} \sum_{l \in U_j \setminus k} q_{l,j}

    A class that no other client had in the last round adds nothing. Needs
    ``shared=class_outputs(...)`` and ``memory=own_outputs(...)``.

    Args:
        gamma: γ; 0 changes nothing.

    Raises:
        ValueError: in the first step, if the clients share no outputs or do not remember theirs.

    Source: Jeong et al. 2018 <https://arxiv.org/abs/1811.11479>, Algorithm 1.

    Example:
        >>> from types import SimpleNamespace
        >>> cohort = Outputs(jnp.array([[0.5, 0.5], [0.2, 0.8]]), jnp.array([0, 2]))
        >>> own = OwnOutputs(jnp.array([[0.0, 0], [0.4, 0.6]]), jnp.int32(6))
        >>> client = SimpleNamespace(round=jnp.int32(7))
        >>> context = Context(None, client, None, own, cohort)  # the other client's is (0, 1)
        >>> batch = Batch(jnp.zeros((1, 2)), jnp.array([1]), jnp.array([True]))
        >>> logits = jnp.log(jnp.array([[0.75, 0.25]]))
        >>> round(float(jnp.exp(-near_outputs()(logits, None, batch, context))), 4)
        0.25
    """

    gamma: NonNegative = 1.0

    for_classes = True

    def __call__(
        self, logits: Array, features: Array | None, batch: Batch, context: Context
    ) -> Array:
        cohort, own, now = context.shared, context.memory, context.client.round
        if not (isinstance(cohort, Outputs) and isinstance(own, OwnOutputs)) or now is None:
            raise ValueError(
                "near_outputs needs shared=class_outputs(...) and memory=own_outputs(...) in "
                "local_sgd"
            )
        mine = (own.round == now - 1) & (jnp.sum(own.mean, axis=-1) > 0)  # [M]
        others = cohort.clients - mine.astype(jnp.int32)
        count = cohort.clients.astype(cohort.mean.dtype)[:, None]
        total = cohort.mean * count - jnp.where(mine[:, None], own.mean, 0)
        teacher = total / jnp.maximum(others, 1).astype(total.dtype)[:, None]
        gap = -jnp.sum(teacher[batch.y] * jax.nn.log_softmax(logits), axis=-1)
        known = (batch.y >= 0) & (others[batch.y] > 0)
        return self.gamma * masked_mean(jnp.where(known, gap, 0), batch.mask)


class Prototypes(NamedTuple):
    """Means of features by class, of one client or of all.

    Attributes:
        mean: ``[M, D]``.
        samples: ``int32[M]``, the number of samples behind each mean; 0: no client had the class.
    """

    mean: Array
    samples: Array


class prototypes(Shared):
    r"""Mean features of every class, averaged over the clients that have the class.

    .. math:: C_{k,j} = \frac{1}{n_{k,j}} \sum_{i : y_i = j} z_i, \qquad
              \bar C_j = \frac{\sum_{k \in U} n_{k,j} C_{k,j}}{\sum_{k \in U} n_{k,j}}

    z_i are the features of sample i under the model that client k has just trained, without
    dropout, and n_{k,j} the number of the client's samples of class j. A class that no client of a
    cohort has keeps its last mean. The composition's aggregator averages each class, so a robust
    one protects it. The authors' clients send the means of the features of their last epoch, during
    which the model still changed. The state is ``Prototypes``, of 4 M (D + 1) bytes in either
    direction.

    Args:
        model: the model that trains; D is the width of its head.
        classes: M.
        equal_clients: whether all clients that have a class count equally, as in the authors' code.

    Raises:
        ValueError: if the model has no features, or its head is not a matrix with an optional bias.

    Source: Tan et al. 2022 <https://arxiv.org/abs/2105.00243>, eq. 3 and 6.
    """

    model: Model
    classes: Count
    _: dataclasses.KW_ONLY
    equal_clients: bool = False

    for_classes = True

    def __post_init__(self) -> None:
        features_of(self.model)
        _ = self._kernel  # checks the head

    @functools.cached_property
    def _kernel(self) -> jax.ShapeDtypeStruct:
        return kernel_of(self.model)

    def init(self, variables: Variables) -> Prototypes:
        mean = jnp.zeros((self.classes, self._kernel.shape[0]), self._kernel.dtype)
        return Prototypes(mean, jnp.zeros(self.classes, jnp.int32))

    def send(self, trained: Variables, context: Context) -> Prototypes:
        features = features_of(self.model)

        def read(batch: Batch) -> Array:
            return features(trained, batch.x, train=False, mask=batch.mask)[0][1]

        return _means(read, self.init(trained), context)

    def reduce(
        self,
        last: Prototypes,
        sent: Prototypes,
        weights: Array,
        clients: int,
        aggregator: Aggregator,
    ) -> Prototypes:
        shown = jnp.where(weights[:, None] > 0, sent.samples, 0)  # [P, M]
        counted = ((shown > 0) if self.equal_clients else shown).astype(jnp.float32)
        anyone = jnp.any(counted > 0, axis=0)
        by_class = jax.vmap(aggregator, in_axes=1)
        mean = by_class(sent.mean, jnp.where(anyone, counted, 1))
        return Prototypes(
            jnp.where(anyone[:, None], mean, last.mean),
            jnp.where(anyone, jnp.sum(shown, axis=0, dtype=jnp.int32), last.samples),
        )


class near_prototypes(Part):
    r"""FedProto's term: a sample's features stay near the prototype of its class.

    .. math:: \frac{\lambda}{|b|} \sum_{i \in b} \frac1D \lVert z_i - \bar C_{y_i} \rVert^2

    A class without a prototype adds nothing, as in the first round. The distance is the one in the
    authors' code, of every sample and divided by D; the paper's is between means. Needs
    ``shared=prototypes(...)``.

    Args:
        lam: λ; 0 changes nothing.

    Raises:
        ValueError: in the first step, if there are no features or the clients share no prototypes.

    Source: Tan et al. 2022 <https://arxiv.org/abs/2105.00243>, eq. 7 and 8; Tan 2022
    <https://github.com/yuetan031/FedProto>, the authors' code.

    Example:
        >>> batch = Batch(jnp.zeros((1, 2)), jnp.array([1]), jnp.array([True]))
        >>> shared = Prototypes(jnp.array([[0.0, 0], [3, 4]]), jnp.array([0, 2]))
        >>> context = Context(None, None, None, shared=shared)
        >>> float(near_prototypes(2.0)(jnp.zeros((1, 2)), jnp.zeros((1, 2)), batch, context))
        25.0
    """

    lam: NonNegative = 1.0

    for_classes = True

    def __call__(
        self, logits: Array, features: Array | None, batch: Batch, context: Context
    ) -> Array:
        known = context.shared
        if features is None or not isinstance(known, Prototypes):
            raise ValueError(
                "near_prototypes needs shared=prototypes(...) in local_sgd, and a model with "
                "features"
            )
        gap = jnp.mean(jnp.square(features - known.mean[batch.y]), axis=-1)
        has_mean = (batch.y >= 0) & (known.samples[batch.y] > 0)
        return self.lam * masked_mean(jnp.where(has_mean, gap, 0), batch.mask)


def _mean_outputs(model: Model, classes: int, trained: Variables, context: Context) -> Array:
    """Returns a client's mean outputs, ``f32[M, M]``; rows of classes that it lacks are 0."""

    def read(batch: Batch) -> Array:
        logits, _ = model.apply(trained, batch.x, train=False, mask=batch.mask)
        return jax.nn.softmax(logits.astype(jnp.float32))

    mean, samples = jnp.zeros((classes, classes), jnp.float32), jnp.zeros(classes, jnp.int32)
    return _means(read, Prototypes(mean, samples), context).mean


def _means(read: Callable[[Batch], Array], none: Prototypes, context: Context) -> Prototypes:
    """Returns the mean of what ``read`` returns for a client's samples, by class."""
    dtype, classes = none.mean.dtype, len(none.samples)

    def add(sums: Prototypes, batch: Batch) -> Prototypes:
        mine = of_class(batch, classes)
        total = mine.astype(dtype).T @ read(batch).astype(dtype)
        return Prototypes(sums.mean + total, sums.samples + jnp.sum(mine, axis=0).astype(jnp.int32))

    sums = sweep(context.client, AT_ONCE, add, none)
    count = jnp.maximum(sums.samples, 1).astype(dtype)
    return sums._replace(mean=sums.mean / count[:, None])
