"""A model's weights in a file, and as what a model starts from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Array, Model, PyTree, Variables
from fedjax_sim.base.files import read_npz, write_npz
from fedjax_sim.models.leaves import path_of

Shapes = dict[str, Any]


def save_weights(file: str | os.PathLike[str], variables: Variables) -> None:
    """Writes the weights of one model to a .npz file, an array for each leaf.

    Args:
        file: the file, which is replaced as a whole.
        variables: parameters and state; of a result of several runs those of one:
            ``jax.tree.map(lambda w: w[0], result.variables)``. Arrays have the names that
            :func:`fedjax_sim.leaves.named` takes; floats shorter than 32 bits become float32.

    Raises:
        ValueError: if two leaves have one name.

    Example:
        >>> import tempfile, fedjax_sim as fs
        >>> model = fs.models.logistic((4,), 3)
        >>> file = Path(tempfile.mkdtemp()) / "weights.npz"
        >>> save_weights(file, model.init(jax.random.key(0)))
        >>> sorted(np.load(file))
        ['Dense_0/Dense_0/bias', 'Dense_0/Dense_0/kernel']
    """
    arrays = {path: _plain(np.asarray(leaf)) for path, leaf in _by_path(variables).items()}
    write_npz(Path(file), arrays)


def load_weights(file: str | os.PathLike[str], model: Model) -> Variables:
    """The weights that :func:`save_weights` has written.

    Args:
        file: the .npz file.
        model: whose weights they are; ``simulate(initial=)`` starts from them, and so does
            :func:`fedjax_sim.models.starting_from`.

    Returns:
        The variables, in the model's dtypes.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no .npz file of finite numbers, or leaves are missing, unknown or of
            other shapes; names them.

    Example:
        >>> import tempfile, fedjax_sim as fs
        >>> file = Path(tempfile.mkdtemp()) / "weights.npz"
        >>> save_weights(file, fs.models.logistic((4,), 3).init(jax.random.key(0)))
        >>> load_weights(file, fs.models.logistic((4,), 2))
        Traceback (most recent call last):
        ValueError: weights.npz: Dense_0/Dense_0/bias must have the shape [2], got [3]
    """
    place = Path(file)
    if not place.is_file():
        raise FileNotFoundError(f"there is no file {place}")
    like = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    wanted, found = _by_path(like), read_npz(place)
    lacking = [path for path in wanted if path not in found]
    unknown = [path for path in found if path not in wanted]
    if lacking or unknown:
        told = [f"lacks {_some(lacking)}"] * bool(lacking)
        told += [f"has {_some(unknown)}, which the model has not"] * bool(unknown)
        raise ValueError(f"{place.name} must have the leaves of the model: it {' and '.join(told)}")
    for path, leaf in wanted.items():
        given = found[path]
        if given.shape != leaf.shape:
            runs = given.shape[1:] == leaf.shape
            hint = f": save the weights of one of the {len(given)} runs" if runs else ""
            raise ValueError(
                f"{place.name}: {path} must have the shape {list(leaf.shape)}, got "
                f"{list(given.shape)}{hint}"
            )
        numbers = np.issubdtype(given.dtype, np.floating) == jax.numpy.issubdtype(
            leaf.dtype, np.floating
        )
        if given.dtype.kind not in "biuf" or not numbers or not np.isfinite(given).all():
            raise ValueError(
                f"{place.name}: {path} must be finite numbers of {leaf.dtype}, got {given.dtype}"
            )
    leaves = [found[path].astype(leaf.dtype) for path, leaf in wanted.items()]
    loaded: Variables = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return loaded


def starting_from(model: Model, variables: Variables) -> Model:
    """The model with given initial weights, the same for every key.

    Args:
        model: any.
        variables: its weights, such as :func:`fedjax_sim.models.load_weights` returns them.

    Returns:
        The model; within :func:`fedjax_sim.models.lora` they are the trunk's.

    Example:
        >>> import fedjax_sim as fs
        >>> model = fs.models.logistic((4,), 3)
        >>> trained = model.init(jax.random.key(7))
        >>> tuned = fs.models.lora(starting_from(model, trained), rank=2)
        >>> tuned.init(jax.random.key(0)).params["trunk"] is trained.params
        True
    """

    def init(key: Array) -> Variables:
        del key
        return variables

    return model._replace(init=init)


def _by_path(variables: PyTree) -> Shapes:
    """The leaves by their path without "params" and "state"."""
    found = jax.tree_util.tree_leaves_with_path(variables)
    named = {path_of(entries[1:]): leaf for entries, leaf in found}
    if len(named) < len(found):
        raise ValueError("weights must have one name for each leaf, got two of one name")
    return named


def _plain(leaf: NDArray[Any]) -> NDArray[Any]:
    """In a dtype that .npz knows: it has no bfloat16."""
    return leaf if leaf.dtype.kind in "biuf" else leaf.astype(np.float32)


def _some(paths: list[str]) -> str:
    return ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
