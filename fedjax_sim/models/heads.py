"""The inputs and the weights of a model's head."""

from __future__ import annotations

import jax

from fedjax_sim.base import Model, ModelFeatures, PyTree
from fedjax_sim.engine import tree
from fedjax_sim.models.leaves import head


def features_of(model: Model) -> ModelFeatures:
    """Returns the function that computes the inputs of a model's head.

    Raises:
        ValueError: if the model has none.
    """
    if model.features is None:
        raise ValueError("model must have features; models made by from_linen have them")
    return model.features


def kernel_of(model: Model) -> jax.ShapeDtypeStruct:
    """Returns shape ``[D, M]`` and dtype of the matrix of a model's head.

    Raises:
        ValueError: if the model declares no head, or the head is not one matrix with at most a
            bias.

    >>> from fedjax_sim import models
    >>> kernel_of(models.mlp((4,), 3, widths=(5,))).shape
    (5, 3)
    """
    shapes: PyTree = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    chosen = tree.only(head(model)(shapes), shapes)
    found = sorted(jax.tree.leaves(chosen), key=lambda leaf: -leaf.ndim)
    if [leaf.ndim for leaf in found] not in ([2], [2, 1]):
        shapes = [list(leaf.shape) for leaf in found]
        raise ValueError(f"model must have a head of one matrix and at most a bias, got {shapes}")
    kernel: jax.ShapeDtypeStruct = found[0]
    return kernel
