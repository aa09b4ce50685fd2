"""Names for arrays and pytrees, and for the leaves of a pytree."""

from __future__ import annotations

from typing import Any

import jax

Array = jax.Array
"""JAX's array; the docstring of each says its shape and dtype: ``f32[P]``, ``[S, *p]``."""
PyTree = Any
"""A nested container of arrays; ``[S, *p]`` marks a stack of S of them on a leading axis."""


def named_leaves(name: str, values: PyTree) -> dict[str, Any]:
    """Returns the leaves of a pytree by the expressions that read them.

    >>> named_leaves("x", {"a": 1, "b": {"c": 2}}), named_leaves("x", 1)
    ({"x['a']": 1, "x['b']['c']": 2}, {'x': 1})
    """
    leaves = jax.tree_util.tree_leaves_with_path(values, is_leaf=is_array_like)
    return {name + jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def is_array_like(value: Any) -> bool:
    """Returns whether NumPy reads a list or a tuple as one array: tuples only without arrays.

    >>> is_array_like([[1], [2]]), is_array_like((1, 2)), is_array_like((jax.numpy.ones(2),))
    (True, True, False)
    """
    if type(value) is tuple:
        return not any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(value))
    return isinstance(value, list)


def one_array(name: str, values: Any, reader: str = "") -> Any:
    """Returns the values; raises ValueError if they are a pytree of several arrays.

    >>> one_array("x", {"a": 1, "b": 2}, "with_scaling: ")
    Traceback (most recent call last):
    ValueError: with_scaling: x must be one array, got a pytree with x['a'], x['b']
    """
    leaves = [*named_leaves(name, values)]
    if leaves != [name]:
        got = ", ".join(leaves) or "no array"
        raise ValueError(f"{reader}{name} must be one array, got a pytree with {got}")
    return values


def concrete(*values: Any) -> bool:
    """Whether the values are concrete; the range of a traced setting cannot be checked.

    >>> concrete(0.1), jax.eval_shape(lambda rate: rate if concrete(rate) else (), 0.1)
    (True, ())
    """
    return not any(isinstance(value, jax.core.Tracer) for value in values)
