"""Weights in files, and models that start from given weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Array, Model, PyTree, Variables
from fedjax_sim.base.files import read_npz, write_npz
from fedjax_sim.base.words import shortened
from fedjax_sim.models.leaves import path_of

Shapes = dict[str, Any]


def save_weights(file: str | os.PathLike[str], variables: Variables) -> None:
    """Writes the weights of one model to a .npz file, with one array per leaf.

    Arrays are named by the paths that :class:`fedjax_sim.leaves.named` matches; floats shorter than
    32 bits are stored as float32.

    Args:
        file: the file, which is overwritten.
        variables: parameters and state of a single run; index a multi-seed result first:
            ``jax.tree.map(lambda w: w[0], result.variables)``.

    Raises:
        ValueError: if two leaves have the same name.

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
    """Reads weights that :func:`save_weights` has written.

    ``simulate(initial=)`` and :func:`fedjax_sim.models.starting_from` start from them.

    Args:
        file: the .npz file.
        model: the model that the weights belong to.

    Returns:
        The variables, in the model's dtypes.

    Raises:
        FileNotFoundError: if the file does not exist.
        ValueError: if it is not a .npz file of finite numbers, or leaves are missing, unknown or of
            other shapes; names them.

    Example:
        >>> import tempfile, fedjax_sim as fs
        >>> file = Path(tempfile.mkdtemp()) / "weights.npz"
        >>> save_weights(file, fs.models.logistic((4,), 3).init(jax.random.key(0)))
        >>> load_weights(file, fs.models.logistic((4,), 2))
        Traceback (most recent call last):
        ValueError: weights.npz: Dense_0/Dense_0/bias must have the shape [2], got [3]
    """
    source = Path(file)
    if not source.is_file():
        raise FileNotFoundError(f"there is no file {source}")
    return variables_of(source.name, read_npz(source), model)


def variables_of(name: str, found: Shapes, model: Model) -> Variables:
    """Returns arrays by path as a model's variables; ``name`` is the file in error messages."""
    like = jax.eval_shape(model.init, jax.eval_shape(lambda: jax.random.key(0)))
    wanted = _by_path(like)
    missing = [path for path in wanted if path not in found]
    unknown = [path for path in found if path not in wanted]
    if missing or unknown:
        faults = [f"lacks {shortened(missing, 3)}"] * bool(missing)
        faults += [f"has {shortened(unknown, 3)}, which the model does not have"] * bool(unknown)
        raise ValueError(f"{name} must have the model's leaves: it {' and '.join(faults)}")
    for path, leaf in wanted.items():
        given = found[path]
        if given.shape != leaf.shape:
            runs = given.shape[1:] == leaf.shape
            hint = f": save the weights of one of the {len(given)} runs" if runs else ""
            raise ValueError(
                f"{name}: {path} must have the shape {list(leaf.shape)}, got "
                f"{list(given.shape)}{hint}"
            )
        numbers = np.issubdtype(given.dtype, np.floating) == jax.numpy.issubdtype(
            leaf.dtype, np.floating
        )
        if given.dtype.kind not in "biuf" or not numbers or not np.isfinite(given).all():
            raise ValueError(
                f"{name}: {path} must be finite numbers of {leaf.dtype}, got {given.dtype}"
            )
    leaves = [found[path].astype(leaf.dtype) for path, leaf in wanted.items()]
    loaded: Variables = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return loaded


def starting_from(model: Model, variables: Variables) -> Model:
    """Returns a model with fixed initial weights, whatever the key.

    Args:
        model: any model.
        variables: its weights, for instance from :func:`fedjax_sim.models.load_weights`.

    Returns:
        The model; inside :func:`fedjax_sim.models.lora` its weights are the trunk's.

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
    """Returns the leaves by path, without "params" and "state"."""
    found = jax.tree_util.tree_leaves_with_path(variables)
    named = {path_of(entries[1:]): leaf for entries, leaf in found}
    if len(named) < len(found):
        raise ValueError(
            "weights must have a unique name for each leaf, got two with the same name"
        )
    return named


def _plain(leaf: NDArray[Any]) -> NDArray[Any]:
    """Converts dtypes that .npz lacks, such as bfloat16, to float32."""
    return leaf if leaf.dtype.kind in "biuf" else leaf.astype(np.float32)
