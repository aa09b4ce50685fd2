"""Terms and adjustments of the loss, ``empirical_risk(term=, adjust=)``, and their memories."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    Batch,
    Context,
    Memory,
    Model,
    NonNegative,
    Part,
    Positive,
    PyTree,
    Share,
    Variables,
)
from fedjax_sim.client.distilling import (
    not_true_distillation,
    past_models,
    teacher_distillation,
)
from fedjax_sim.client.objective import ObjectiveWrapper, ordered_dropout
from fedjax_sim.client.objective import remade as remade
from fedjax_sim.client.prototypes import (
    class_outputs,
    near_outputs,
    near_prototypes,
    own_outputs,
    prototypes,
)
from fedjax_sim.client.pseudo import pseudo_labels, received_labels
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import rows_at
from fedjax_sim.engine.needs import ALL_TRAVELS, FROM_RECEIVED, NO_FLIGHT, ONE_MODEL
from fedjax_sim.models.leaves import features_of
from fedjax_sim.tasks.losses import masked_mean

__all__ = [
    "balanced",
    "calibration",
    "class_outputs",
    "estimated_sharpness",
    "last_model",
    "last_received",
    "model_contrast",
    "near_outputs",
    "near_prototypes",
    "not_true_distillation",
    "ordered_dropout",
    "own_outputs",
    "past_models",
    "prototypes",
    "pseudo_labels",
    "received_labels",
    "restricted",
    "sharpness_aware",
    "teacher_distillation",
]

RARE = 1e-8
"""The number of samples that a class which a client lacks counts as."""


def label_counts(context: Context, classes: int) -> Array:
    """Returns the client's number of samples of each class, ``int32[M]``, after any relabelling."""
    client = context.client
    positions = jnp.arange(client.capacity, dtype=jnp.int32)
    labels = rows_at(client, positions).y
    known = jnp.arange(classes, dtype=labels.dtype)[None]
    mine = (labels[:, None] == known) & (positions < client.size)[:, None]
    return jnp.sum(mine, axis=0, dtype=jnp.int32)


class calibration(Part):
    r"""FedLC's margins: a client's rare classes must win by more.

    .. math:: f_{k,y}(x) - \tau\, n_{k,y}^{-1/4}

    n_{k,y} is the number of the client's samples of class y; a class that it lacks counts as 1e-8.

    Args:
        tau: τ; 0 changes nothing.

    Source: Zhang et al. 2022 <https://arxiv.org/abs/2209.00189>.

    Example:
        >>> from fedjax_sim.base import ClientView
        >>> y = jnp.array([0, 0, 1], jnp.int32)
        >>> client = ClientView(jnp.zeros((3, 1)), y, jnp.arange(3), jnp.int32(0), jnp.int32(3), 3)
        >>> context = Context(None, client, None)
        >>> [round(float(a), 3) for a in calibration(1.0)(jnp.zeros((1, 2)), context)[0]]
        [-0.841, -1.0]
    """

    tau: NonNegative

    for_classes = True

    def __call__(self, logits: Array, context: Context) -> Array:
        counts = label_counts(context, logits.shape[-1]).astype(logits.dtype)
        return logits - self.tau * jnp.maximum(counts, RARE)[None] ** -0.25


class restricted(Part):
    r"""FedRS's restricted softmax: the logits of classes that a client lacks are scaled down.

    .. math:: \alpha^{[n_{k,y} = 0]} f_{k,y}(x)

    n_{k,y} is the number of the client's samples of class y. In evaluation nothing is scaled.

    Args:
        alpha: α; 1 changes nothing.

    Source: Li and Zhan 2021 <https://doi.org/10.1145/3447548.3467254>.

    Example:
        >>> from fedjax_sim.base import ClientView
        >>> y = jnp.array([0, 0, 1], jnp.int32)
        >>> client = ClientView(jnp.zeros((3, 1)), y, jnp.arange(3), jnp.int32(0), jnp.int32(3), 3)
        >>> restricted(0.5)(jnp.ones((1, 3)), Context(None, client, None)).tolist()
        [[1.0, 1.0, 0.5]]
    """

    alpha: Share

    for_classes = True

    def __call__(self, logits: Array, context: Context) -> Array:
        known = label_counts(context, logits.shape[-1])[None] > 0
        return jnp.where(known, logits, self.alpha * logits)


class balanced(Part):
    r"""The balanced softmax: in training, a client's frequent classes are expected to win.

    .. math:: f_{k,y}(x) + \gamma \log n_{k,y}

    n_{k,y} is the number of the client's samples of class y; a class that it lacks counts as 1e-8.
    In evaluation the second term is omitted: all classes count as equally frequent.

    Args:
        gamma: γ; 0 changes nothing.

    Source: Chen and Chao 2022 <https://arxiv.org/abs/2107.00778>, section 4; Ren et al. 2020
    <https://arxiv.org/abs/2007.10740>.

    Example:
        >>> from fedjax_sim.base import ClientView
        >>> y = jnp.array([0, 0, 1], jnp.int32)
        >>> client = ClientView(jnp.zeros((3, 1)), y, jnp.arange(3), jnp.int32(0), jnp.int32(3), 3)
        >>> context = Context(None, client, None)
        >>> jnp.exp(balanced()(jnp.zeros((1, 2)), context)[0]).tolist()
        [2.0, 1.0]
    """

    gamma: NonNegative = 1.0

    for_classes = True

    def __call__(self, logits: Array, context: Context) -> Array:
        counts = label_counts(context, logits.shape[-1]).astype(logits.dtype)
        return logits + self.gamma * jnp.log(jnp.maximum(counts, RARE))[None]


class model_contrast(Part):
    r"""MOON's term: features near the received model's and away from the client's last model's.

    .. math:: \mu\,\ell_{con}, \qquad \ell_{con} = -\log \frac{e^{\cos(z, z_{recv}) / \tau}}
              {e^{\cos(z, z_{recv}) / \tau} + e^{\cos(z, z_{prev}) / \tau}}

    z are the features of a sample, the inputs of the model's head; the authors add a projection
    head before it, which a model may have. The other two models are evaluated without dropout,
    which costs two more forward passes. Needs ``memory=last_model()``.

    Args:
        model: the model that trains.
        mu: μ; 0 changes nothing.
        temperature: τ.

    Raises:
        ValueError: if the model has no features; in the first step, if the client has no memory.

    Source: Li, He, Song 2021 <https://arxiv.org/abs/2103.16257>, section 3.3 and Algorithm 1.
    """

    model: Model
    mu: NonNegative = 1.0
    temperature: Positive = 0.5

    def __post_init__(self) -> None:
        features_of(self.model)

    def __call__(
        self, logits: Array, features: Array | None, batch: Batch, context: Context
    ) -> Array:
        if not isinstance(context.memory, Variables):
            raise ValueError("model_contrast needs memory=last_model() in local_sgd")
        evaluate = features_of(self.model)

        def similarity(variables: Variables) -> Array:
            (_, other), _ = evaluate(variables, batch.x, train=False, mask=batch.mask)
            return _cosine(features, other) / self.temperature

        near, far = similarity(context.received), similarity(context.memory)
        return self.mu * masked_mean(jnp.logaddexp(near, far) - near, batch.mask)


class last_model(Memory):
    """The client's model at the end of its last visit; before the first, the initial model.

    Every client keeps a model.
    """

    def init(self, variables: Variables) -> Variables:
        return variables

    def keep(self, trained: Variables, context: Context) -> Variables:
        return trained


class last_received(Memory):
    """The model that the client received at its last visit; before the first, the initial model.

    Every client keeps a model.
    """

    needs = (ONE_MODEL, NO_FLIGHT, ALL_TRAVELS, FROM_RECEIVED)

    def init(self, variables: Variables) -> Variables:
        return variables

    def keep(self, trained: Variables, context: Context) -> Variables:
        return context.received


class sharpness_aware(ObjectiveWrapper):
    r"""The loss at the worst point nearby, whose gradient is SAM's.

    .. math:: F_b\Bigl(w + \rho\, \frac{\nabla F_b(w)}{\lVert \nabla F_b(w) \rVert}\Bigr)

    The point is treated as a constant. Dropout draws the same numbers in both passes; BatchNorm's
    statistics are those of the second pass. It costs twice the objective's gradient. The reported
    loss is the loss at that point.

    Args:
        objective: F_b.
        rho: ρ, the distance; with 0 it is the objective itself.

    Source: Qu et al. 2022 <https://arxiv.org/abs/2206.02618>, Algorithm 1; Foret et al. 2021
    <https://arxiv.org/abs/2010.01412>, section 2.
    """

    rho: NonNegative = 0.05

    def __call__(
        self, params: PyTree, state: PyTree, batch: Batch, context: Context
    ) -> tuple[Array, PyTree]:
        here = jax.lax.stop_gradient(params)
        slope, _ = jax.grad(self.objective, has_aux=True)(here, state, batch, context)
        square = sum(jnp.vdot(g, g).astype(jnp.float32) for g in jax.tree.leaves(slope))
        length = self.rho / jnp.maximum(jnp.sqrt(square), 1e-12)
        there = jax.tree.map(lambda w, g: w + length.astype(w.dtype) * g, params, slope)
        return self.objective(there, state, batch, context)


class estimated_sharpness(ObjectiveWrapper):
    r"""The loss at the worst point nearby, estimated from the server's last steps.

    .. math:: F_b\Bigl(w + \rho\, \frac{w_{last} - w_{recv}}{\lVert w_{last} - w_{recv} \rVert}
              \Bigr)

    w_last is the model that the client received at its last visit: the way back along the server's
    steps since then replaces the client's gradient in :class:`sharpness_aware`, and costs no
    gradient. If the server model has not changed, it is the objective itself. The reported loss is
    the loss at that point. Needs ``memory=last_received()``.

    Args:
        objective: F_b.
        rho: ρ, the distance; with 0 it is the objective itself.

    Raises:
        ValueError: in the first step, if the client has no memory.

    Source: Fan et al. 2024 <https://arxiv.org/abs/2405.18890>, Algorithm 1.
    """

    rho: NonNegative = 0.1

    def __call__(
        self, params: PyTree, state: PyTree, batch: Batch, context: Context
    ) -> tuple[Array, PyTree]:
        if not isinstance(context.memory, Variables):
            raise ValueError("estimated_sharpness needs memory=last_received() in local_sgd")
        back = tree.subtract(context.memory.params, context.received.params)
        square = sum(jnp.vdot(w, w).astype(jnp.float32) for w in jax.tree.leaves(back))
        # The root of 0 has an infinite derivative: before a first visit nothing has changed.
        length = self.rho / jnp.sqrt(jnp.maximum(square, 1e-24))
        return self.objective(tree.add(params, tree.scale(length, back)), state, batch, context)


def _cosine(a: Array | None, b: Array) -> Array:
    """Returns the cosines of the rows ``[B, D]``, or of stacks of rows, flattened."""
    assert a is not None  # a model with features returns them
    a, b = (v.reshape(len(v), -1) for v in (a, b))
    squares = jnp.sum(a * a, axis=-1) * jnp.sum(b * b, axis=-1)
    # The root of 0 has an infinite gradient: a ReLU may leave a sample without a feature.
    return jnp.sum(a * b, axis=-1) / jnp.sqrt(jnp.maximum(squares, 1e-16))
