"""What an objective may have beside the loss of its samples: ``empirical_risk(adjust=, term=)``."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    Batch,
    Context,
    Memory,
    Model,
    Objective,
    PyTree,
    Variables,
    concrete,
    for_classes,
    origin_of,
    part,
)
from fedjax_sim.client.distilling import (
    PastModels,
    not_true_distillation,
    past_models,
    teacher_distillation,
)
from fedjax_sim.client.losses import masked_mean
from fedjax_sim.client.objective import Adjust, Term
from fedjax_sim.client.outputs import (
    Outputs,
    OwnOutputs,
    class_outputs,
    near_outputs,
    own_outputs,
)
from fedjax_sim.client.prototypes import Prototypes, near_prototypes, prototypes
from fedjax_sim.engine import tree
from fedjax_sim.engine.batches import rows_at
from fedjax_sim.engine.needs import ALL_TRAVELS, FROM_RECEIVED, NO_FLIGHT, ONE_MODEL

__all__ = [
    "RARE",
    "Outputs",
    "OwnOutputs",
    "PastModels",
    "Prototypes",
    "balanced",
    "calibration",
    "class_outputs",
    "estimated_sharpness",
    "label_counts",
    "last_model",
    "last_received",
    "model_contrast",
    "near_outputs",
    "near_prototypes",
    "not_true_distillation",
    "own_outputs",
    "past_models",
    "prototypes",
    "remade",
    "sharpness_aware",
    "teacher_distillation",
]

RARE = 1e-8
"""What a class that a client lacks counts as, in samples."""


def remade(objective: Objective, **changes: object) -> Objective:
    """An ``empirical_risk`` with other settings.

    Raises:
        ValueError: if the objective is no ``empirical_risk``.
    """
    origin = origin_of(objective)
    if origin is None or origin.name != "empirical_risk":
        raise ValueError("objective must be an empirical_risk, whose loss is to be changed")
    out: Objective = origin.factory(**{**origin.arguments, **changes})
    return out


def label_counts(context: Context, classes: int) -> Array:
    """The client's samples of each class, ``int32[M]``, as it sees them."""
    client = context.client
    positions = jnp.arange(client.capacity, dtype=jnp.int32)
    labels = rows_at(client, positions).y
    known = jnp.arange(classes, dtype=labels.dtype)[None]
    mine = (labels[:, None] == known) & (positions < client.size)[:, None]
    return jnp.sum(mine, axis=0, dtype=jnp.int32)


@part
@for_classes
def calibration(tau: float) -> Adjust:
    r"""FedLC's margins: a client's rare classes must win by more.

    .. math:: f_{k,y}(x) - \tau\, n_{k,y}^{-1/4}

    n_{k,y} are the client's samples of class y; a class that it lacks counts as 1e-8.

    Args:
        tau: τ; 0 changes nothing.

    Returns:
        A change of the logits in training.

    Raises:
        ValueError: if tau is negative.

    Source: Zhang et al. 2022 <https://arxiv.org/abs/2209.00189>.

    Example:
        >>> from fedjax_sim.base import ClientView
        >>> y = jnp.array([0, 0, 1], jnp.int32)
        >>> client = ClientView(jnp.zeros((3, 1)), y, jnp.arange(3), jnp.int32(0), jnp.int32(3), 3)
        >>> context = Context(None, client, None)
        >>> [round(float(a), 3) for a in calibration(1.0)(jnp.zeros((1, 2)), context)[0]]
        [-0.841, -1.0]
    """
    if concrete(tau) and not tau >= 0:
        raise ValueError(f"tau must be at least 0, got {tau}")

    def adjust(logits: Array, context: Context) -> Array:
        counts = label_counts(context, logits.shape[-1]).astype(logits.dtype)
        return logits - tau * jnp.maximum(counts, RARE)[None] ** -0.25

    return adjust


@part
@for_classes
def balanced(gamma: float = 1.0) -> Adjust:
    r"""The balanced softmax: in training, a client's frequent classes are expected to win.

    .. math:: f_{k,y}(x) + \gamma \log n_{k,y}

    n_{k,y} are the client's samples of class y; a class that it lacks counts as 1e-8. Without the
    second term, in evaluation, the logits are those of classes that are all as frequent.

    Args:
        gamma: γ; 0 changes nothing.

    Returns:
        A change of the logits in training.

    Raises:
        ValueError: if gamma is negative.

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
    if concrete(gamma) and not gamma >= 0:
        raise ValueError(f"gamma must be at least 0, got {gamma}")

    def adjust(logits: Array, context: Context) -> Array:
        counts = label_counts(context, logits.shape[-1]).astype(logits.dtype)
        return logits + gamma * jnp.log(jnp.maximum(counts, RARE))[None]

    return adjust


@part
def model_contrast(model: Model, mu: float = 1.0, temperature: float = 0.5) -> Term:
    r"""MOON's term: features near those of the received model, away from the client's last.

    .. math:: \mu\,\ell_{con}, \qquad \ell_{con} = -\log \frac{e^{\cos(z, z_{recv}) / \tau}}
              {e^{\cos(z, z_{recv}) / \tau} + e^{\cos(z, z_{prev}) / \tau}}

    z are the features of a sample, the inputs of the model's head; the authors add a projection
    head before it, which a model may have. The two other models are evaluated without dropout. It
    costs two forward passes more. Needs ``memory=last_model()``.

    Args:
        model: the model that trains.
        mu: μ; 0 changes nothing.
        temperature: τ.

    Returns:
        A term of the objective.

    Raises:
        ValueError: if the model has no features, mu is negative or the temperature not positive; in
            the first step, if the client has no memory.

    Source: Li, He, Song 2021 <https://arxiv.org/abs/2103.16257>, section 3.3 and Algorithm 1.
    """
    if model.features is None:
        raise ValueError("model must have features, such as those of from_linen have")
    if concrete(mu) and not mu >= 0:
        raise ValueError(f"mu must be at least 0, got {mu}")
    if concrete(temperature) and not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    features = model.features

    def term(logits: Array, seen: Array | None, batch: Batch, context: Context) -> Array:
        del logits
        if not isinstance(context.memory, Variables):
            raise ValueError("model_contrast needs memory=last_model() in local_sgd")

        def likeness(variables: Variables) -> Array:
            (_, other), _ = features(variables, batch.x, train=False, mask=batch.mask)
            return _cosine(seen, other) / temperature

        near, far = likeness(context.received), likeness(context.memory)
        return mu * masked_mean(jnp.logaddexp(near, far) - near, batch.mask)

    return term


@part
def last_model() -> Memory:
    """The client's own model at the end of its last visit; before the first, the initial model.

    Returns:
        A memory, ``Variables``: a model for every client.
    """
    return Memory(init=lambda variables: variables, keep=lambda trained, context: trained)


@part
def last_received() -> Memory:
    """The model that the client received at its last visit; before the first, the initial model.

    Returns:
        A memory, ``Variables``: a model for every client.
    """
    return Memory(
        init=lambda variables: variables,
        keep=lambda trained, context: context.received,
        needs=(ONE_MODEL, NO_FLIGHT, ALL_TRAVELS, FROM_RECEIVED),
    )


@part
def sharpness_aware(objective: Objective, rho: float = 0.05) -> Objective:
    r"""The loss at the worst point nearby, of which the gradient is that of SAM.

    .. math:: F_b\Bigl(w + \rho\, \frac{\nabla F_b(w)}{\lVert \nabla F_b(w) \rVert}\Bigr)

    The point is taken as a constant. Dropout draws the same numbers in both passes; BatchNorm's
    statistics are those of the second. It costs twice the objective's gradient.

    Args:
        objective: F_b.
        rho: ρ, the distance; 0 is the objective itself.

    Returns:
        The objective; it reports the loss at that point.

    Raises:
        ValueError: if rho is negative.

    Source: Qu et al. 2022 <https://arxiv.org/abs/2206.02618>, Algorithm 1; Foret et al. 2021
    <https://arxiv.org/abs/2010.01412>, section 2.
    """
    if concrete(rho) and not rho >= 0:
        raise ValueError(f"rho must be at least 0, got {rho}")

    def sharp(
        params: PyTree, state: PyTree, batch: Batch, context: Context
    ) -> tuple[Array, PyTree]:
        here = jax.lax.stop_gradient(params)
        slope, _ = jax.grad(objective, has_aux=True)(here, state, batch, context)
        square = sum(jnp.vdot(g, g).astype(jnp.float32) for g in jax.tree.leaves(slope))
        length = rho / jnp.maximum(jnp.sqrt(square), 1e-12)
        there = jax.tree.map(lambda w, g: w + length.astype(w.dtype) * g, params, slope)
        return objective(there, state, batch, context)

    return sharp


@part
def estimated_sharpness(objective: Objective, rho: float = 0.1) -> Objective:
    r"""The loss at the worst point nearby, as the server's last steps let expect it.

    .. math:: F_b\Bigl(w + \rho\, \frac{w_{last} - w_{recv}}{\lVert w_{last} - w_{recv} \rVert}
              \Bigr)

    w_last is the model that the client received at its last visit: the way back along the server's
    steps since then takes the place of the client's gradient, that of :func:`sharpness_aware`, and
    costs none. If the server has not moved, it is the objective itself. Needs
    ``memory=last_received()``.

    Args:
        objective: F_b.
        rho: ρ, the distance; 0 is the objective itself.

    Returns:
        The objective; it reports the loss at that point.

    Raises:
        ValueError: if rho is negative; in the first step, if the client has no memory.

    Source: Fan et al. 2024 <https://arxiv.org/abs/2405.18890>, Algorithm 1.
    """
    if concrete(rho) and not rho >= 0:
        raise ValueError(f"rho must be at least 0, got {rho}")

    def sharp(
        params: PyTree, state: PyTree, batch: Batch, context: Context
    ) -> tuple[Array, PyTree]:
        if not isinstance(context.memory, Variables):
            raise ValueError("estimated_sharpness needs memory=last_received() in local_sgd")
        back = tree.subtract(context.memory.params, context.received.params)
        square = sum(jnp.vdot(w, w).astype(jnp.float32) for w in jax.tree.leaves(back))
        # Not the root of 0, whose derivative is infinite: at a first visit nothing has moved.
        length = rho / jnp.sqrt(jnp.maximum(square, 1e-24))
        return objective(tree.add(params, tree.scale(length, back)), state, batch, context)

    return sharp


def _cosine(a: Array | None, b: Array) -> Array:
    """Of the rows ``[B, D]``, or of stacks of them, flattened."""
    assert a is not None  # a model with features gives them
    a, b = (v.reshape(len(v), -1) for v in (a, b))
    squares = jnp.sum(a * a, axis=-1) * jnp.sum(b * b, axis=-1)
    # Not the root of 0, whose gradient is infinite: a ReLU may leave a sample no feature.
    return jnp.sum(a * b, axis=-1) / jnp.sqrt(jnp.maximum(squares, 1e-16))
