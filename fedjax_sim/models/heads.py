"""What a model's head sees and what it is made of."""

from __future__ import annotations

import jax

from fedjax_sim.base import Model, ModelFeatures, PyTree
from fedjax_sim.engine import tree
from fedjax_sim.models.leaves import head


def features_of(model: Model) -> ModelFeatures:
    """The function that shows the inputs of a model's head.

    Raises:
        ValueError: if it has none.
    """
    if model.features is None:
        raise ValueError("model must have features, such as those of from_linen have")
    return model.features


def kernel_of(model: Model) -> jax.ShapeDtypeStruct:
    """``[D, M]``, shape and dtype of the matrix of a model's head.

    Raises:
        ValueError: if the model does not say which layer that is, or it is more or less than one
            matrix and, if it has one, a bias.

    >>> from fedjax_sim import models
    >>> kernel_of(models.mlp((4,), 3, widths=(5,))).shape
    (5, 3)
    """
    shapes: PyTree = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    chosen = tree.only(head(model)(shapes), shapes)
    found = sorted(jax.tree.leaves(chosen), key=lambda leaf: -leaf.ndim)
    if [leaf.ndim for leaf in found] not in ([2], [2, 1]):
        shapes = [list(leaf.shape) for leaf in found]
        raise ValueError(f"model must have a head of a matrix and a bias at most, got {shapes}")
    kernel: jax.ShapeDtypeStruct = found[0]
    return kernel
