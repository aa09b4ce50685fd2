"""Checkpoints: a run that is killed goes on as if nothing had happened.

One ``.npz`` file holds all of it: state, keys, and what every round and evaluation gave. Its arrays
carry checksums, which Orbax's do not: of 20 Orbax checkpoints with one bit flipped, all were
restored without a word, with other weights.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedjax_sim.base import FedState, PyTree
from fedjax_sim.base.files import Arrays, remove_asides
from fedjax_sim.run.archive import CheckpointError, packed, read, unpacked, write
from fedjax_sim.run.client_memory import ClientMemory
from fedjax_sim.run.layout import Layout, put
from fedjax_sim.run.stages import Collected, Run, Stage

VERSION = 2
"""Of the files; one of another version is refused."""

FINGERPRINT = 64
"""Characters of one."""


class Checkpoints(NamedTuple):
    """Where and how often :func:`fedjax_sim.simulate` saves a run.

    Attributes:
        folder: of this run alone. If it has checkpoints of the run, the run goes on from there.
        seconds: between checkpoints, plus up to ten that a program runs; the end of the run is
            always saved. It costs a copy of the state on the host; writing happens beside the next
            rounds.
        keep: files that stay, the newest.
    """

    folder: str | Path
    seconds: float = 60.0
    keep: int = 2


class CheckpointWarning(RuntimeWarning):
    """A checkpoint could not be written, or is damaged; the run goes on."""


class Saved(NamedTuple):
    """What a checkpoint holds.

    Attributes:
        done: rounds.
        rounds: of each stage that was evaluated.
        seconds: that the run took.
        arrays: by name.
    """

    done: int
    rounds: tuple[int, ...]
    seconds: float
    arrays: Arrays

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
        metrics, scored = shapes["advance"][1:]
        kept = None if record is None else jax.device_get(record(told.state))
        stages, done = [], 0
        begun = self.done - self.evaluated  # and not evaluated yet
        for i, todo in enumerate((*self.rounds, begun) if begun else self.rounds):
            done += todo
            last, whole = done == self.done, i < len(self.rounds)
            stage = Stage(
                todo,
                unpacked(self.arrays, f"{i}.metrics", metrics),
                unpacked(self.arrays, f"{i}.scored", scored) if whole else None,
                server if last else None,
                collected if last else None,
                run if last else None,
                unpacked(self.arrays, f"{i}.recorded", kept) if whole else None,
            )
            stages.append((done, stage))
        return run, stages


class Saver:
    """Saves a run while it goes on.

    Args:
        where: the folder and how often.
        identity: what the run is, by name: settings, or their fingerprints.
        rounds: of the run.
        eval_every: rounds between evaluations.
        layout: of the run.

    Attributes:
        saved: the checkpoint to go on from; None in a new folder.

    Raises:
        CheckpointError: if the folder has checkpoints of another run, or of more rounds.
            Or if it has no name or cannot be made.
    """

    def __init__(
        self,
        where: Checkpoints,
        identity: Mapping[str, Any],
        rounds: int,
        eval_every: int,
        layout: Layout | ClientMemory,
    ) -> None:
        self._layout = layout
        self._where, self._identity = where, json.loads(json.dumps(identity))
        self._folder, self._rounds = Path(where.folder), rounds
        if not os.fspath(where.folder):
            raise CheckpointError("checkpoints must name a folder, got ''")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if jax.process_index() == 0:
                remove_asides(self._folder)
        except OSError as error:
            why = error.strerror or error
            raise CheckpointError(f"checkpoints in {self._folder}: {why}") from error
        self.saved = self._going_on(eval_every)
        self._stages: Arrays = {}
        self._of_stages: list[int] = []
        self._last: tuple[int, Stage] | None = None
        self._done = 0 if self.saved is None else self.saved.done
        self._began = time.perf_counter() - (0.0 if self.saved is None else self.saved.seconds)
        self._at = time.perf_counter()
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def offer(self, done: int, stage: Stage) -> None:
        """Takes note of a stage, and saves the run if it is time to.

        Raises:
            CheckpointError: if the folder is gone: nothing can be saved any more.
        """
        if not self._folder.is_dir():
            self._last = None  # nothing is left to save at the end
            raise CheckpointError(f"checkpoints in {self._folder}: it was deleted or moved")
        i = len(self._of_stages)
        if stage.scored is not None:
            self._of_stages.append(stage.rounds)
        for name in ("metrics", "scored", "recorded"):
            self._stages |= packed(f"{i}.{name}", getattr(stage, name))
        self._last = done, stage
        self._told()
        due = time.perf_counter() - self._at >= self._where.seconds
        if done > self._done and (due or done == self._rounds) and self._writing is None:
            self._save()

    def close(self) -> None:
        """Waits for what is being written, after the newest stage if that is not on disk yet."""
        self._told(wait=True)
        if self._last is not None and self._last[0] > self._done:
            run = self._last[1].run
            if run is not None and not any(a.is_deleted() for a in jax.tree.leaves(run)):
                self._save()
        self._told(wait=True)
        self._writer.shutdown()

    def _save(self) -> None:
        assert self._last is not None
        done, stage = self._last
        assert stage.run is not None
        run = self._layout.told(stage.run)
        arrays = packed("run", run) | packed("collected", stage.collected) | self._stages
        told = {
            "version": VERSION,
            "done": done,
            "rounds": [*self._of_stages],  # a copy: it grows while this is written
            "seconds": time.perf_counter() - self._began,
            "identity": self._identity,
        }
        self._at = time.perf_counter()
        if jax.process_index() == 0:
            self._writing = self._writer.submit(self._write, done, told, arrays)
        else:
            self._done = done

    def _write(self, done: int, about: Mapping[str, Any], arrays: Arrays) -> None:
        if not self._folder.is_dir():
            return  # not to make it again; the next stage ends the run
        write(self._folder / f"{done:08d}.npz", about, arrays)
        self._done = done
        for old in files(self._folder)[: -self._where.keep]:
            with suppress(OSError):
                old.unlink()

    def _told(self, *, wait: bool = False) -> None:
        """Warns if the last checkpoint could not be written: the run goes on, and tries again."""
        if self._writing is None or not (wait or self._writing.done()):
            return
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except OSError as error:
            if not self._folder.is_dir():
                return
            warnings.warn(
                f"no checkpoint in {self._folder}: {error.strerror or error}; the run goes on",
                CheckpointWarning,
                stacklevel=2,
            )

    def _going_on(self, eval_every: int) -> Saved | None:
        """The newest checkpoint that is whole and that a run of so many rounds goes through."""
        saved = None
        for path, about, saved in whole(self._folder):
            self._check(path, about)
            if saved.done > self._rounds:
                raise CheckpointError(
                    f"rounds must be at least {saved.done}, which {path} has, got {self._rounds}"
                )
            after = saved.evaluated
            if after == self._rounds or (after % eval_every == 0 and saved.done < self._rounds):
                return saved
        if saved is not None:
            raise CheckpointError(
                f"rounds cannot be {self._rounds}: the run in {self._folder} was evaluated after "
                f"{saved.evaluated}, and would not be now, every {eval_every} rounds"
            )
        return None

    def _check(self, path: Path, about: Mapping[str, Any]) -> None:
        if about["version"] != VERSION:
            raise CheckpointError(f"{path} is of version {about['version']}, not {VERSION}")
        for name, ours in self._identity.items():
            # Older checkpoints do not have JAX's settings.
            theirs = about["identity"].get(name, ours if name.startswith("jax_") else None)
            if name == "code":
                _check_code(path, ours, theirs)
            elif theirs != ours:
                # Neither fingerprints nor long texts say anything to a reader.
                long = max(len(str(theirs)), len(str(ours))) >= FINGERPRINT
                shown = "" if long else f": {theirs}, not {ours}"
                raise CheckpointError(f"{path} is of a run with another {name}{shown}")


def _check_code(path: Path, ours: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> None:
    """Warns of functions whose code has changed since a checkpoint was written.

    Another Python has other instructions for the same code: nothing is known then.
    """
    if theirs is None or theirs["python"] != ours["python"]:
        return
    before, now = theirs["functions"], ours["functions"]
    changed = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if changed:
        warnings.warn(
            f"{path} is of a run with other code of {', '.join(changed)}: its rounds are of the "
            "old code, and those that follow of the new one. Begin anew for a run of one code",
            CheckpointWarning,
            stacklevel=2,
        )


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
            saved = Saved(about["done"], tuple(about["rounds"]), about["seconds"], arrays)
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(
                f"{error}; the run goes on from the checkpoint before it, or from the beginning",
                CheckpointWarning,
                stacklevel=4,
            )
            continue
        yield path, about, saved


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
    """The same after an earlier evaluation, if ``record`` was the server's model.

    Raises:
        ValueError: if there was no evaluation, or nothing was recorded there.
    """
    ends = [sum(saved.rounds[: i + 1]) for i in range(len(saved.rounds))]
    if round not in ends:
        known = ", ".join(map(str, ends))
        raise ValueError(f"at must be a round that was evaluated, one of {known}, got {round!r}")
    if round == ends[-1]:
        return server_of(saved, shapes)
    try:
        return unpacked(saved.arrays, f"{ends.index(round)}.recorded", shapes)
    except CheckpointError as error:
        raise ValueError(f"the weights of round {round} were not kept: --keep-weights") from error
