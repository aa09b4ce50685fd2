"""Checkpoints as they are read: what a run was when it was saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_sim.base import FedState, PyTree
from fedjax_sim.base.files import Arrays
from fedjax_sim.run.archive import CheckpointError, read, unpacked
from fedjax_sim.run.client_memory import ClientMemory
from fedjax_sim.run.layout import Layout, put
from fedjax_sim.run.stages import Collected, Run, Stage

SERVER = "server"
"""Begins the names of the arrays of a kept model."""

VERSION = 3
"""Of the files. Those of version 2 are read too: they have arrays for each evaluation."""

_BY_STAGE = ("metrics", "scored")


class CheckpointWarning(RuntimeWarning):
    """A checkpoint could not be written, or is damaged; the run goes on."""


class Saved(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        done: rounds.
        rounds: of each stage that was evaluated.
        seconds: that the run took.
        arrays: by name.
        folder: of the checkpoint.
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

    def restored(
        self,
        shapes: Mapping[str, PyTree],
        layout: Layout | ClientMemory,
        rounds: int,
        record: Callable[[FedState], PyTree] | None,
    ) -> tuple[Run, list[tuple[int, Stage]]]:
        """The run, and the stages with the rounds done after each.

        Args:
            shapes: what the programs of the experiment give, by name.
            layout: where the state goes.
            rounds: of the whole run; models in flight are collected at its end alone.
            record: what was kept of each state.

        Raises:
            CheckpointError: if the arrays are not those of the programs.
        """
        like = layout.like(shapes["start"])
        told: Run = unpacked(self.arrays, "run", like, exact=True)
        run = layout.put(told)
        collected: Collected | None = None
        if self.done == rounds and "finish" in shapes:
            end = unpacked(self.arrays, "collected", shapes["finish"], exact=True)
            collected = put(layout.execution.replicated, end)
        server = run.state.server if collected is None else collected.variables
        of_rounds, of_scores = shapes["advance"][1:]
        metrics, scored = None, None
        if self.rounds:
            metrics = unpacked(self.arrays, "metrics", of_rounds)
            scored = unpacked(self.arrays, "scored", of_scores)
        wall = self.arrays.get("wall", np.full(len(self.rounds), np.nan))  # older files lack it
        kept = None if record is None else jax.device_get(record(told.state))
        stages, done = [], 0
        for i, todo in enumerate(self.rounds):
            done += todo
            last = done == self.done
            stage = Stage(
                todo,
                jax.tree.map(lambda a, end=done, n=todo: a[:, end - n : end], metrics),
                jax.tree.map(lambda a, i=i: a[i], scored),
                server if last else None,
                collected if last else None,
                run if last else None,
                unpacked(self.arrays, f"{i}.recorded", kept),
                float(wall[i]),
            )
            stages.append((done, stage))
        if done < self.done:
            begun = unpacked(self.arrays, "begun", of_rounds)
            stage = Stage(self.done - done, begun, None, server, None, run, None)
            stages.append((self.done, stage))
        return run, stages


def files(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the oldest first."""
    return sorted(folder.glob("[0-9]*.npz"))


def whole(folder: Path) -> Iterator[tuple[Path, dict[str, Any], Saved]]:
    """The checkpoints that can be read, the newest first: what they say of the run, and the rest.

    Warns of each that is damaged.
    """
    for path in reversed(files(folder)):
        try:
            about, arrays = read(path)
            if about["version"] == 2:
                about["version"], arrays = VERSION, _joined(arrays, len(about["rounds"]))
            saved = Saved(about["done"], tuple(about["rounds"]), about["seconds"], arrays, folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(
                f"{error}; the run goes on from the checkpoint before it, or from the beginning",
                CheckpointWarning,
                stacklevel=4,
            )
            continue
        yield path, about, saved


def _joined(arrays: Arrays, stages: int) -> Arrays:
    """The arrays of a file of version 2, which has metrics and scores of each stage apart."""
    kept = {n: a for n, a in arrays.items() if not n.partition(".")[2].startswith(_BY_STAGE)}
    for name in {n.removeprefix("0.") for n in arrays if n.startswith("0.")}:
        if name.startswith(_BY_STAGE):
            parts = [arrays[f"{i}.{name}"] for i in range(stages)]
            joins = name.startswith("metrics")
            kept[name] = np.concatenate(parts, axis=1) if joins else np.stack(parts)
    for name in [*kept]:  # of the command: the server's models
        i, _, path = name.partition(".recorded")
        if i.isdigit():
            kept[f"{_of_stage(int(i))}{path}"] = kept[name]
    return kept


def _of_stage(i: int) -> str:
    return f"{SERVER} {i} "


def newest(folder: Path) -> Saved | None:
    """The newest checkpoint of a folder; None if it has none.

    Raises:
        CheckpointError: if it has some, but none that is whole.
    """
    for _, _, saved in whole(folder):
        return saved
    if files(folder):
        raise CheckpointError(f"{folder} has no whole checkpoint")
    return None


def server_of(saved: Saved, shapes: PyTree) -> PyTree:
    """The server's model in a checkpoint, ``[R, *p]``, of the structure ``shapes [*p]``."""
    collected = any(name.startswith("collected") for name in saved.arrays)
    prefix = "collected.variables" if collected else "run.state.server"
    return unpacked(saved.arrays, prefix, shapes)


def server_at(saved: Saved, shapes: PyTree, round: int) -> PyTree:
    """The same after an earlier evaluation, if the weights were kept.

    Raises:
        ValueError: if there was no evaluation, or nothing was kept there.
    """
    ends = [sum(saved.rounds[: i + 1]) for i in range(len(saved.rounds))]
    if round not in ends:
        known = ", ".join(map(str, ends))
        raise ValueError(f"at must be a round that was evaluated, one of {known}, got {round!r}")
    if round == ends[-1]:
        return server_of(saved, shapes)
    path = saved.folder / server_file(round)
    arrays = read(path)[1] if path.exists() else recorded(saved, ends.index(round))
    if not arrays:
        raise ValueError(f"the weights of round {round} were not kept: --keep-weights")
    return unpacked(arrays, SERVER, shapes)


def server_file(done: int) -> str:
    """Returns the name of the file with the server's model after so many rounds."""
    return f"server-{done:08d}.npz"


def recorded(saved: Saved, i: int) -> Arrays:
    """Returns the server's model after the i-th stage, which older checkpoints hold."""
    prefix = _of_stage(i)
    found = {name: a for name, a in saved.arrays.items() if name.startswith(prefix)}
    return {f"{SERVER}{name.removeprefix(prefix)}": a for name, a in found.items()}
