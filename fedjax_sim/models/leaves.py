"""Leaves of a model, chosen by name or position: personal, frozen or trained ones."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

import jax

from fedjax_sim.base import Leaves, Model, ModelFeatures, Part, PyTree, Variables
from fedjax_sim.engine import tree

__all__ = ["all_but", "head", "named", "strided"]


class named(Part):
    """The leaves of some layers.

    Args:
        patterns: patterns of the path of a layer or leaf, starting with the outermost name:
            ``Dense_1``, ``Dense_1/*/kernel``. ``*`` and ``?`` match any characters, including
            slashes: ``*BatchNorm*`` matches scales, biases and statistics of all norms. Statistics
            are in their collection, ``batch_stats/BatchNorm_0/mean``.

    Raises:
        ValueError: if there is no pattern; when it is called, if a pattern matches no leaf.

    Example:
        >>> variables = Variables({"Dense_0": {"bias": 1, "kernel": 2}}, {})
        >>> named("Dense_0/bias")(variables).params
        {'Dense_0': {'bias': True, 'kernel': False}}
    """

    patterns: tuple[str, ...]

    def __init__(self, *patterns: str) -> None:
        if not patterns or not all(isinstance(p, str) and p for p in patterns):
            raise ValueError(f"patterns must be names of layers or leaves, got {patterns!r}")
        object.__setattr__(self, "patterns", patterns)

    def __call__(self, variables: Variables) -> Variables:
        found = jax.tree_util.tree_leaves_with_path(variables)
        paths = [path_of(entries[1:]) for entries, _ in found]  # without "params" and "state"
        for pattern in self.patterns:
            if not any(_matches(pattern, path) for path in paths):
                known = ", ".join(paths)
                raise ValueError(f"named: {pattern!r} must match a leaf, the model has {known}")
        chosen = [any(_matches(pattern, path) for pattern in self.patterns) for path in paths]
        out: Variables = jax.tree.unflatten(jax.tree.structure(variables), chosen)
        return out


class head(Part):
    """The last dense layer of a network.

    Args:
        model: a model of :mod:`fedjax_sim.models`, or one made by ``from_linen``.

    Raises:
        ValueError: if the model does not declare its head.

    Example:
        >>> from fedjax_sim import models
        >>> model = models.mlp((4,), 3, widths=(5,))
        >>> mask = head(model)(jax.eval_shape(model.init, jax.random.key(0)))
        >>> jax.tree.map(lambda chosen: int(chosen), mask.params["Dense_1"])
        {'Dense_0': {'bias': 1, 'kernel': 1}}
        >>> any(jax.tree.leaves(mask.params["Dense_0"]))
        False
    """

    model: Model

    def __post_init__(self) -> None:
        if self.model.head is None:
            raise ValueError(
                "model must declare its head, as models of from_linen with a dense layer do: use "
                "leaves.named(...), or give Model(head=...)"
            )

    def __call__(self, variables: Variables) -> Variables:
        assert self.model.head is not None
        return self.model.head(variables)


class all_but(Part):
    """All other leaves.

    Args:
        leaves: the excluded leaves.

    Example:
        >>> all_but(named("w"))(Variables({"b": 1, "w": 2}, {})).params
        {'b': True, 'w': False}
    """

    leaves: Leaves

    def __call__(self, variables: Variables) -> Variables:
        out: Variables = jax.tree.map(lambda chosen: not chosen, self.leaves(variables))
        return out


class strided(Part):
    """Every ``stride``-th layer, starting with layer ``first``.

    A layer holds leaves: a kernel and its bias, a norm with its statistics. Layers are counted in
    the order of their names, with numbers in names ordered by value.

    Args:
        first: the index of the first layer, from 0.
        stride: the distance between two chosen layers.

    Raises:
        ValueError: if first is not below stride; when it is called, if the model has too few
            layers.

    Example:
        >>> layers = {name: {"bias": 1} for name in ("Dense_0", "Dense_1", "Dense_10", "Dense_2")}
        >>> chosen = strided(1, 2)(Variables(layers, {})).params
        >>> [name for name in chosen if chosen[name]["bias"]]
        ['Dense_1', 'Dense_10']
    """

    first: int
    stride: int

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.stride:
            raise ValueError(
                f"first must be at least 0 and below the stride {self.stride}, got {self.first}"
            )

    def __call__(self, variables: Variables) -> Variables:
        found = jax.tree_util.tree_leaves_with_path(variables)
        # Statistics are in their collection, and belong to the layer of the same name.
        layers = [
            tuple(path_of(entries[1:]).split("/")[1 if entries[0].name == "state" else 0 : -1])
            for entries, _ in found
        ]
        numbered = sorted(set(layers), key=lambda layer: [_by_number(name) for name in layer])
        if self.first >= len(numbered):
            raise ValueError(f"{self} needs a model with more layers than {len(numbered)}")
        chosen = [numbered.index(layer) % self.stride == self.first for layer in layers]
        out: Variables = jax.tree.unflatten(jax.tree.structure(variables), chosen)
        return out


def _by_number(name: str) -> list[tuple[str, int]]:
    """Returns a key that sorts ``Dense_2`` before ``Dense_10``."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name)]


def path_of(entries: tuple[object, ...]) -> str:
    """Returns the path of a leaf in a pytree, for example ``Dense_0/kernel``."""
    return jax.tree_util.keystr(entries, simple=True, separator="/")


def _matches(pattern: str, path: str) -> bool:
    """Returns whether a pattern matches a leaf or a layer around it."""
    parts = path.split("/")
    return any(fnmatchcase("/".join(parts[: i + 1]), pattern) for i in range(len(parts)))


def features_of(model: Model) -> ModelFeatures:
    """Returns the function that computes the inputs of a model's head."""
    if model.features is None:
        raise ValueError("model must have features: use from_linen, or give Model(features=...)")
    return model.features


def kernel_of(model: Model) -> jax.ShapeDtypeStruct:
    """Returns shape ``[D, M]`` and dtype of the matrix of a model's head.

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
