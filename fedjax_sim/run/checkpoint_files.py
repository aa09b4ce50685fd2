"""Checkpoint files: a ``.npz`` with a checksum for every array, and the run restored from it."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import FedState, PyTree, Variables
from fedjax_sim.base.files import Arrays, DamagedError, read_npz, write_npz
from fedjax_sim.run.client_memory import ClientMemory, ClientRows, client_rows
from fedjax_sim.run.layout import Layout, put_on_devices
from fedjax_sim.run.records import Collected, Interval, Run

SERVER = "server"
"""Prefix of the arrays of a kept server model."""

COLLECTED = "collected"
"""Prefix of the final models, after models in flight were collected."""

VERSION = 3
"""Version of the files; others are rejected."""

NAMES = "arrays"
"""Key of a file's list of its arrays."""

_SERVER_STATE = "run.state.server"
_CLIENTS = ".clients"
"""Suffix of the clients whose rows a compact array has."""


class CheckpointError(ValueError):
    """Checkpoints that belong to another run, or cannot be used."""


class CheckpointWarning(RuntimeWarning):
    """A checkpoint could not be written, or is damaged; the run continues."""


def write_arrays(path: Path, about: Mapping[str, Any], arrays: Arrays) -> None:
    """Writes a file atomically; if interrupted, the old file remains.

    Raises:
        OSError: if it cannot be written.
    """
    description = json.dumps({**about, NAMES: list(arrays)})
    write_npz(path, {"about": np.array(description), **arrays})


def read_arrays(path: Path) -> tuple[dict[str, Any], Arrays]:
    """Returns the description in a file, and its arrays.

    Raises:
        OSError: if it cannot be opened.
        DamagedError: if it is damaged.
    """
    arrays = read_npz(path)
    try:
        about = dict(json.loads(str(arrays.pop("about"))))
        complete = about.pop(NAMES) == list(arrays)  # the list of a zip file has no checksum
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedError(f"{path}: it has no valid description") from error
    if not complete:
        raise DamagedError(f"{path}: some arrays are missing")
    return about, arrays


def pack(prefix: str, tree: PyTree) -> Arrays:
    """Returns the leaves on the host, by their paths."""
    arrays: Arrays = {}
    for path, leaf in _leaves(tree):
        if isinstance(leaf, ClientRows):
            arrays[f"{prefix}{path}{_CLIENTS}"] = leaf.clients
            leaf = leaf.rows
        arrays[f"{prefix}{path}"] = _on_host(leaf)
    return arrays


def unpack(arrays: Arrays, prefix: str, shapes: PyTree, *, exact: bool = False) -> Any:
    """Returns the tree whose leaves :func:`pack` returned, with the structure of ``shapes``.

    Shapes must be the same if ``exact``; the rows of an interval vary in number.

    Raises:
        CheckpointError: if an array is missing or has another shape.
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


def _leaves(tree: PyTree) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield jax.tree_util.keystr(path), leaf


def _on_host(leaf: Any) -> NDArray[Any]:
    if _is_key(leaf):
        leaf = jax.random.key_data(leaf)
    # Copied unless it owns its data: the next rounds overwrite the buffers of a device's arrays.
    owner = isinstance(leaf, np.ndarray) and leaf.flags.owndata
    array: NDArray[Any] = leaf if owner else np.array(leaf)
    if array.dtype.hasobject:
        raise CheckpointError(f"record must give arrays, to be saved, got {type(leaf).__name__}")
    return array


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class Checkpoint(NamedTuple):
    """A saved run.

    Attributes:
        done: number of rounds.
        rounds: rounds of each interval that was evaluated.
        seconds: seconds that the run took.
        arrays: arrays by name.
        folder: folder of the file.
    """

    done: int
    rounds: tuple[int, ...]
    seconds: float
    arrays: Arrays
    folder: Path

    @property
    def evaluated(self) -> int:
        """The rounds up to the last evaluation."""
        return sum(self.rounds)

    @property
    def has_end(self) -> bool:
        """Whether the models in flight were collected, as after the last round."""
        return any(name.startswith(COLLECTED) for name in self.arrays)

    def restored(
        self,
        shapes: Mapping[str, PyTree],
        layout: Layout | ClientMemory,
        rounds: int,
        record: Callable[[FedState], PyTree] | None,
    ) -> tuple[Run, list[tuple[int, Interval]]]:
        """Restores the run and its intervals, each with the rounds done after it.

        ``shapes`` are the results of the experiment's programs by name. Models in flight are
        collected only after the ``rounds`` of the whole run; ``record`` is the function that
        returned the recorded part of each state.

        Raises:
            CheckpointError: if the arrays do not fit the programs.
        """
        exported: Run = unpack(
            self.arrays, "run", layout.exported_shapes(shapes["start"]), exact=True
        )
        run = layout.restored(exported)
        collected: Collected | None = None
        if self.done == rounds and self.has_end and "finish" in shapes:
            end = unpack(self.arrays, COLLECTED, shapes["finish"], exact=True)
            placed = layout.execution.shardings(end, None)
            collected = jax.tree.map(put_on_devices, placed, end)
        of_rounds, of_counts = shapes["advance"][1:]
        metrics, scored = None, None
        if self.rounds:
            metrics = unpack(self.arrays, "metrics", of_rounds)
            scored = unpack(self.arrays, "scored", of_counts)
        kept = None if record is None else jax.device_get(record(exported.state))
        intervals, done = [], 0
        for i, todo in enumerate(self.rounds):
            done += todo
            last = done == self.done
            interval = Interval(
                metrics=jax.tree.map(lambda a, end=done, n=todo: a[:, end - n : end], metrics),
                scored=jax.tree.map(lambda a, i=i: a[i], scored),
                run=run if last else None,
                collected=collected if last else None,
                recorded=unpack(self.arrays, f"{i}.recorded", kept),
                wall=float(self.arrays["wall"][i]),
            )
            intervals.append((done, interval))
        if done < self.done:
            begun = unpack(self.arrays, "begun", of_rounds)
            intervals.append((self.done, Interval(begun, None, run)))
        return run, intervals


def checkpoint_paths(folder: Path) -> list[Path]:
    """Returns the checkpoints of a folder, the oldest first; other files there are left alone."""
    own = (path for path in folder.glob("*.npz") if re.fullmatch("[0-9]{8,}", path.stem))
    return sorted(own, key=lambda path: int(path.stem))


def intact_checkpoints(folder: Path) -> Iterator[tuple[Path, dict[str, Any], Checkpoint]]:
    """Yields path, description and content of readable checkpoints, the newest first.

    Warns of each that is damaged.
    """
    for path in reversed(checkpoint_paths(folder)):
        try:
            about, arrays = read_arrays(path)
            rounds, seconds = tuple(about["rounds"]), about["seconds"]
            checkpoint = Checkpoint(about["done"], rounds, seconds, arrays, folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(
                f"{error}; the run continues from the checkpoint before it, or from the beginning",
                CheckpointWarning,
                stacklevel=4,
            )
            continue
        yield path, about, checkpoint


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """Returns the newest readable checkpoint of a folder; None if it has no checkpoints.

    Raises:
        CheckpointError: if all of its checkpoints are damaged.
    """
    for _, _, checkpoint in intact_checkpoints(folder):
        return checkpoint
    if checkpoint_paths(folder):
        raise CheckpointError(f"{folder} has no whole checkpoint")
    return None


def server_model(checkpoint: Checkpoint, shapes: PyTree) -> PyTree:
    """Returns the server's model in a checkpoint, ``[R, *p]``, given the ``shapes [*p]``.

    Raises:
        CheckpointError: if it has other shapes.
    """
    prefix = f"{COLLECTED}.variables" if checkpoint.has_end else _SERVER_STATE
    return _server_model(checkpoint.arrays, prefix, shapes)


def _server_model(arrays: Arrays, prefix: str, shapes: PyTree) -> PyTree:
    found = unpack(arrays, prefix, shapes)
    for (path, like), model in zip(_leaves(shapes), jax.tree.leaves(found), strict=True):
        if model.shape[1:] != like.shape:
            saved = f"{[*model.shape[1:]]} is saved, {[*like.shape]} is the model's"
            raise CheckpointError(f"the weights are of another model: of {path} {saved}")
    return found


def write_server_model(folder: Path, ends: Sequence[int], variables: Variables) -> None:
    """Writes a checkpoint of a finished run with only the server's model ``[R, *p]``.

    ``ends`` are the rounds done at each evaluation.

    Raises:
        OSError: if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rounds = np.diff([0, *ends]).tolist()
    about = {"version": VERSION, "done": ends[-1], "rounds": rounds, "seconds": 0.0, "identity": {}}
    write_arrays(folder / f"{ends[-1]:08d}.npz", about, pack(_SERVER_STATE, variables))


def server_model_at(checkpoint: Checkpoint, shapes: PyTree, round: int) -> PyTree:
    """Returns the server's model after an earlier evaluation, if the weights were kept.

    Raises:
        ValueError: if there was no evaluation, or the weights were not kept.
    """
    ends = [sum(checkpoint.rounds[: i + 1]) for i in range(len(checkpoint.rounds))]
    if round not in ends:
        known = ", ".join(map(str, ends))
        raise ValueError(f"at must be a round that was evaluated, one of {known}, got {round!r}")
    if round == ends[-1]:
        return server_model(checkpoint, shapes)
    path = checkpoint.folder / server_file(round)
    if not path.exists():
        raise ValueError(f"the weights of round {round} were not kept: --keep-weights")
    return _server_model(read_arrays(path)[1], SERVER, shapes)


def server_file(done: int) -> str:
    """Returns the name of the file with the server's model after ``done`` rounds."""
    return f"server-{done:08d}.npz"
