"""Objectives for samples without a label, which learn confident predictions."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    Batch,
    Context,
    FinitePositive,
    Model,
    NonNegative,
    PyTree,
    Share,
    Transform,
    Variables,
    concrete,
)
from fedjax_sim.base.arrays import one_array
from fedjax_sim.client.objective import ObjectiveWrapper
from fedjax_sim.engine.streams import Step, stream
from fedjax_sim.tasks.losses import cross_entropy, masked_mean

__all__ = ["pseudo_labels", "received_labels"]


class _PseudoLabels(ObjectiveWrapper):
    model: Model
    threshold: Share = 0.95
    strong: Transform | None = None

    for_classes = True
    learns_unlabelled = True

    def _labels(self, variables: Variables, batch: Batch) -> tuple[Array, Array]:
        """Returns labels ``int32[B]``, and the unlabelled samples with a confident one."""
        outputs, _ = self.model.apply(variables, batch.x, train=False, mask=batch.mask)
        sure = jnp.max(jax.nn.softmax(outputs), axis=-1) >= self.threshold
        label = jnp.argmax(outputs, axis=-1).astype(batch.y.dtype)
        return label, sure & batch.mask & (batch.y < 0)

    def _view(self, key: Array, batch: Batch, context: Context) -> Batch:
        return batch if self.strong is None else self.strong(key, batch, context.client)


class pseudo_labels(_PseudoLabels):
    r"""FixMatch: unlabelled samples learn the model's confident predictions for a weaker view.

    .. math:: F_b(w) + \frac{\lambda}{|u|} \sum_{i \in u} [\max_c q_{i,c} \ge \tau]\;
              \ell\bigl(f(w, A(x_i)), \arg\max_c q_{i,c}\bigr), \qquad q_i = \sigma(f(w, x_i))

    where u are the samples of the minibatch without a label (y = -1), F_b is the objective on the
    others, ℓ is the cross-entropy, and no gradient passes through q. The weak view x_i is the
    sample after the ``transforms`` of the local update; ``strong`` changes it further, to A(x_i).
    It costs two more forward passes.

    Args:
        objective: F.
        model: the model that trains.
        threshold: τ.
        strong: A, a transform such as :class:`fedjax_sim.augment.altered`; None: x_i itself.
        weight: λ; 0 is the objective itself.

    Source: Sohn, Berthelot, Li, Zhang, Carlini, Cubuk, Kurakin, Zhang, Raffel, "FixMatch:
    simplifying semi-supervised learning with consistency and confidence", NeurIPS 2020
    <https://arxiv.org/abs/2001.07685>, eq. 3 and 4.

    Note:
        q comes from the model in evaluation mode; in the paper, from the training pass, which
        differs if there is dropout or BatchNorm.

    Example:
        >>> import fedjax_sim as fs
        >>> model = fs.models.logistic((8, 8, 1), 10)
        >>> strong = fs.augment.altered([fs.augment.noise(0.1)], white=16)
        >>> objective = pseudo_labels(fs.empirical_risk(model), model, strong=strong)
    """

    weight: NonNegative = 1.0

    def __call__(
        self, params: PyTree, state: PyTree, batch: Batch, context: Context
    ) -> tuple[Array, PyTree]:
        risk, new = self.objective(params, state, batch, context)
        if concrete(self.weight) and not self.weight:
            return risk, new
        label, sure = self._labels(jax.lax.stop_gradient(Variables(params, state)), batch)
        keys = jax.random.split(stream(context.key, Step.PSEUDO_LABELS))
        strong = self._view(keys[0], batch, context)
        outputs, new = self.model.apply(
            Variables(params, new), strong.x, train=True, mask=batch.mask, key=keys[1]
        )
        losses = jnp.where(sure, cross_entropy(outputs, label), 0)
        return risk + self.weight * masked_mean(losses, batch.mask & (batch.y < 0)), new


class received_labels(_PseudoLabels):
    r"""SemiFL's clients: the received model labels the samples that have no label.

    .. math:: \frac{1}{|s|} \sum_{i \in s} \ell\bigl(f(w, A(x_i)), \hat y_i\bigr)
              + \frac{\lambda}{|s|} \sum_{i \in s} \Bigl[ \nu\, \ell\bigl(f(w, z_i), \hat y_i\bigr)
              + (1 - \nu)\, \ell\bigl(f(w, z_i), \hat y_{j(i)}\bigr) \Bigr], \qquad
              z_i = \nu x_i + (1 - \nu) x_{j(i)}

    with :math:`\hat y_i = \arg\max_c f_c(w_{recv}, x_i)`, or the true label if the sample has one.
    The set s has the samples of the minibatch with a true label or a confident one,
    :math:`\max_c \sigma(f(w_{recv}, x_i))_c \ge \tau`; without any, the loss is 0. In every step
    :math:`\nu \sim \mathrm{Beta}(\alpha, \alpha)`, and j(i) is any sample of the minibatch. The
    first term is the objective's. The views are those of :class:`pseudo_labels`; it costs one or,
    with mixing, two more forward passes.

    Args:
        objective: its loss is ℓ.
        model: the model that trains.
        threshold: τ.
        strong: A, a transform such as :class:`fedjax_sim.augment.altered`; None: x_i itself.
        mix: λ; 0 mixes nothing.
        alpha: α.

    Raises:
        ValueError: if the threshold is not in [0, 1], mix is negative or alpha is not positive; in
            the first step, if x is a pytree, unless mix is 0.

    Source: Diao et al. 2022 <https://arxiv.org/abs/2106.01432>, as in its authors' code.
    """

    _: dataclasses.KW_ONLY
    mix: NonNegative = 1.0
    alpha: FinitePositive = 0.75

    def __call__(
        self, params: PyTree, state: PyTree, batch: Batch, context: Context
    ) -> tuple[Array, PyTree]:
        guess, sure = self._labels(context.received, batch)
        every = jnp.where(batch.y < 0, guess, batch.y)
        learned = sure | (batch.mask & (batch.y >= 0))
        keys = jax.random.split(stream(context.key, Step.PSEUDO_LABELS), 4)
        strong = self._view(keys[0], batch, context)
        strong = strong._replace(y=jnp.where(learned, every, -1))
        risk, new = self.objective(params, state, strong, context)
        if concrete(self.mix) and not self.mix:
            return risk, new
        x = one_array("x", batch.x, "SemiFL's mixing: ").astype(jnp.float32)
        share = jax.random.beta(keys[1], self.alpha, self.alpha, (), jnp.float32)
        real = jnp.maximum(jnp.sum(batch.mask, dtype=jnp.int32), 1)
        drawn = jax.random.randint(keys[2], batch.mask.shape, 0, real, jnp.int32)
        other = jnp.argsort(~batch.mask)[drawn]
        mixed = share * x + (1 - share) * x[other]
        outputs, new = self.model.apply(
            Variables(params, new), mixed, train=True, mask=batch.mask, key=keys[3]
        )
        losses = share * cross_entropy(outputs, every)
        losses = losses + (1 - share) * cross_entropy(outputs, every[other])
        return risk + self.mix * masked_mean(losses, learned), new
