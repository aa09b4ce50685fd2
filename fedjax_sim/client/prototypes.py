"""Means of features by class, which clients share in place of a model."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Aggregator,
    Array,
    Batch,
    Context,
    Count,
    Model,
    NonNegative,
    Part,
    Shared,
    Variables,
)
from fedjax_sim.client.losses import masked_mean
from fedjax_sim.engine.batches import of_class, sweep
from fedjax_sim.models.heads import features_of, kernel_of

AT_ONCE = 64
"""The number of a client's samples whose features are computed together."""


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
    cohort has keeps its last mean. The composition's aggregator averages each class: a robust one
    guards it. The authors' clients send the means of the features of their last epoch, during which
    the model still changed. The state is ``Prototypes``, of 4 M (D + 1) bytes in either
    direction.

    Args:
        model: the model that trains; D is the width of its head.
        classes: M.
        equal_clients: whether all clients that have a class count equally, as in the authors' code.

    Raises:
        ValueError: if the model has no features, or its head is not a matrix and at most a bias.

    Source: Tan et al. 2022 <https://arxiv.org/abs/2105.00243>, eq. 3 and 6.

    Example:
        >>> from fedjax_sim import models
        >>> shared = prototypes(models.mlp((4,), 3, widths=(5,)), 3)
        >>> shared.init(None).mean.shape
        (3, 5)
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
        features, dtype = features_of(self.model), self._kernel.dtype

        def add(sums: Prototypes, batch: Batch) -> Prototypes:
            (_, z), _ = features(trained, batch.x, train=False, mask=batch.mask)
            mine = of_class(batch, self.classes)
            total = mine.astype(dtype).T @ z.astype(dtype)
            count = jnp.sum(mine, axis=0).astype(jnp.int32)
            return Prototypes(sums.mean + total, sums.samples + count)

        sums = sweep(context.client, AT_ONCE, add, self.init(trained))
        count = jnp.maximum(sums.samples, 1).astype(sums.mean.dtype)
        return sums._replace(mean=sums.mean / count[:, None])

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
        ValueError: if lam is negative; in the first step, if the model has no features or the
            clients share no prototypes.

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
