"""Pytrees as files: one ``.npz`` with a checksum for every array, and what it says of itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import PyTree
from fedjax_sim.base.files import Arrays, DamagedError, read_npz, write_npz
from fedjax_sim.run.client_rows import ClientRows, client_rows


class CheckpointError(ValueError):
    """The checkpoints of a folder are of another run, or cannot be used."""


_CLIENTS = ".clients"
"""Ends the name of the clients of rows that not all clients have."""

NAMES = "arrays"
"""What a file says of itself besides: the names of its arrays."""


def write(path: Path, about: Mapping[str, Any], arrays: Arrays) -> None:
    """Writes a file as a whole or not at all: one that is killed leaves what was there before.

    Raises:
        OSError: if it cannot be written.
    """
    told = json.dumps({**about, NAMES: list(arrays)})
    write_npz(path, {"about": np.array(told), **arrays})


def read(path: Path) -> tuple[dict[str, Any], Arrays]:
    """Returns what a file says of itself, and its arrays.

    Raises:
        OSError: if it cannot be opened.
        DamagedError: if it is not whole.
    """
    arrays = read_npz(path)
    try:
        about = dict(json.loads(str(arrays.pop("about"))))
        whole = about.pop(NAMES) == list(arrays)  # the list of a zip file has no checksum
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"{path}: it does not describe itself") from error
    if not whole:
        raise DamagedError(f"{path}: some arrays are missing")
    return about, arrays


def packed(prefix: str, tree: PyTree) -> Arrays:
    """The leaves on the host, by their paths."""
    found: Arrays = {}
    for path, leaf in _leaves(tree):
        if isinstance(leaf, ClientRows):
            found[f"{prefix}{path}{_CLIENTS}"] = leaf.clients
            leaf = leaf.rows
        found[f"{prefix}{path}"] = _on_host(leaf)
    return found


def _leaves(tree: PyTree) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield jax.tree_util.keystr(path), leaf


def _on_host(leaf: Any) -> NDArray[Any]:
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    # A copy, unless it is one: the next rounds are written into the buffers of a device's arrays.
    own = isinstance(leaf, np.ndarray) and leaf.flags.owndata
    array: NDArray[Any] = leaf if own else np.array(leaf)
    if array.dtype.hasobject:
        raise CheckpointError(f"record must give arrays, to be saved, got {type(leaf).__name__}")
    return array


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def unpacked(
    arrays: Arrays,
    prefix: str,
    shapes: PyTree,
    *,
    exact: bool = False,
) -> Any:
    """The tree of which :func:`packed` has the leaves.

    Args:
        arrays: by name.
        prefix: of the names.
        shapes: what the tree is like.
        exact: whether the shapes must be those; rows of a stage are as many as it has rounds.
    """
    leaves = []
    for path, like in _leaves(shapes):
        name, shape = f"{prefix}{path}", np.shape(like)
        array: Any = arrays.get(name)
        if array is not None and array.dtype.kind == "V":  # NumPy's files do not know bfloat16
            array = array.view(like.dtype)
        if (clients := arrays.get(f"{name}{_CLIENTS}")) is not None:
            array = client_rows(array, clients, shape[1])
        if array is None or (exact and array.shape[: len(shape)] != shape):
            raise CheckpointError(f"the checkpoint lacks {name} {list(shape)}")
        leaves.append(jax.random.wrap_key_data(jnp.asarray(array)) if _is_key(like) else array)
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)
