"""Means of features by class, which clients share in place of a model."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Aggregator,
    Array,
    Batch,
    Context,
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
from fedjax_sim.models.heads import features_of, kernel_of

AT_ONCE = 64  # samples of a client whose features are computed together


class Prototypes(NamedTuple):
    """Means of features by class: a client's, or those of all.

    Attributes:
        mean: ``[M, D]``.
        samples: ``int32[M]``, how many are behind each; 0 for a class that nobody has shown yet.
    """

    mean: Array
    samples: Array


@part
@for_classes
def prototypes(model: Model, classes: int, *, equal_clients: bool = False) -> Shared:
    r"""Mean features of every class, averaged over the clients that have the class.

    .. math:: C_{k,j} = \frac{1}{n_{k,j}} \sum_{i : y_i = j} z_i, \qquad
              \bar C_j = \frac{\sum_{k \in U} n_{k,j} C_{k,j}}{\sum_{k \in U} n_{k,j}}

    z_i are the features of sample i by the model that client k has just trained, without dropout,
    and n_{k,j} the client's samples of class j. A class that nobody of a cohort has keeps its last
    mean. The composition's aggregator takes the mean of each class: a robust one guards it. What
    the authors send are the means of what their last epoch computed, while the model still moved.

    Args:
        model: the model that trains; D is the width of its head.
        classes: M.
        equal_clients: whether all clients that have a class count equally, as in the authors' code.

    Returns:
        What is shared, :class:`Prototypes`: 4 M (D + 1) bytes down, as many up.

    Raises:
        ValueError: if the model has no features, or its head is not a matrix and a bias at most.

    Source: Tan et al. 2022 <https://arxiv.org/abs/2105.00243>, eq. 3 and 6.

    Example:
        >>> from fedjax_sim import models
        >>> shared = prototypes(models.mlp((4,), 3, widths=(5,)), 3)
        >>> shared.init(None).mean.shape
        (3, 5)
    """
    if classes < 1:
        raise ValueError(f"classes must be at least 1, got {classes}")
    features = features_of(model)
    kernel = kernel_of(model)

    def none(variables: Variables) -> Prototypes:
        del variables
        mean = jnp.zeros((classes, kernel.shape[0]), kernel.dtype)
        return Prototypes(mean, jnp.zeros(classes, jnp.int32))

    def send(trained: Variables, context: Context) -> Prototypes:
        def add(sums: Prototypes, batch: Batch) -> Prototypes:
            (_, z), _ = features(trained, batch.x, train=False, mask=batch.mask)
            mine = of_class(batch, classes)
            total = mine.astype(kernel.dtype).T @ z.astype(kernel.dtype)
            count = jnp.sum(mine, axis=0).astype(jnp.int32)
            return Prototypes(sums.mean + total, sums.samples + count)

        sums = sweep(context.client, AT_ONCE, add, none(trained))
        count = jnp.maximum(sums.samples, 1).astype(sums.mean.dtype)
        return sums._replace(mean=sums.mean / count[:, None])

    def reduce(
        last: Prototypes, sent: Prototypes, weights: Array, clients: int, aggregator: Aggregator
    ) -> Prototypes:
        del clients
        shown = jnp.where(weights[:, None] > 0, sent.samples, 0)  # [P, M]
        counted = ((shown > 0) if equal_clients else shown).astype(jnp.float32)
        anyone = jnp.any(counted > 0, axis=0)
        by_class = jax.vmap(aggregator, in_axes=1)
        mean = by_class(sent.mean, jnp.where(anyone, counted, 1))
        return Prototypes(
            jnp.where(anyone[:, None], mean, last.mean),
            jnp.where(anyone, jnp.sum(shown, axis=0, dtype=jnp.int32), last.samples),
        )

    return Shared(none, send, reduce)


@part
@for_classes
def near_prototypes(lam: float = 1.0) -> Term:
    r"""FedProto's term: a sample's features near the prototype of its class.

    .. math:: \frac{\lambda}{|b|} \sum_{i \in b} \frac1D \lVert z_i - \bar C_{y_i} \rVert^2

    A class without a prototype adds nothing, as in the first round. The distance is that of the
    authors' code, of every sample and divided by D; the paper's is between means. Needs
    ``shared=prototypes(...)``.

    Args:
        lam: λ; 0 changes nothing.

    Returns:
        A term of the objective.

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
    if concrete(lam) and not lam >= 0:
        raise ValueError(f"lam must be at least 0, got {lam}")

    def term(logits: Array, features: Array | None, batch: Batch, context: Context) -> Array:
        del logits
        known = context.shared
        if features is None or not isinstance(known, Prototypes):
            raise ValueError(
                "near_prototypes needs shared=prototypes(...) in local_sgd, and a model with "
                "features"
            )
        gap = jnp.mean(jnp.square(features - known.mean[batch.y]), axis=-1)
        return lam * masked_mean(jnp.where(known.samples[batch.y] > 0, gap, 0), batch.mask)

    return term
