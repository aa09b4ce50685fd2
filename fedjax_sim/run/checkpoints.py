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
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_sim.base.files import Arrays, remove_asides
from fedjax_sim.run.archive import CheckpointError, packed, write
from fedjax_sim.run.client_memory import ClientMemory
from fedjax_sim.run.history import Evaluations, History, Joined
from fedjax_sim.run.layout import Layout
from fedjax_sim.run.saved import (
    SERVER,
    VERSION,
    CheckpointWarning,
    Saved,
    files,
    recorded,
    server_file,
    whole,
)
from fedjax_sim.run.stages import Stage

FINGERPRINT = 64
"""Characters of one."""

WAITING = 64 * 1024**2
"""Bytes of models that wait for the next checkpoint; more are written before it."""


class Checkpoints(NamedTuple):
    """Where and how often :func:`fedjax_sim.simulate` saves a run.

    Attributes:
        folder: of this run alone. If it has checkpoints of the run, the run goes on from there.
        seconds: between checkpoints, plus up to ten that a program runs; the end of the run is
            always saved. It costs a copy of the state on the host; writing happens beside the next
            rounds.
        keep: files that stay, the newest.
        weights: whether the server's model of every evaluation stays too, each in a file of its
            own, which is written once.
    """

    folder: str | Path
    seconds: float = 60.0
    keep: int = 2
    weights: bool = False


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
        self._history = History(Evaluations(), Joined(axis=1))
        self._scored = Joined()
        self._recorded: Arrays = {}
        self._of_stages: list[int] = []
        self._last: tuple[int, Stage] | None = None
        self._done = 0 if self.saved is None else self.saved.done
        self._began = time.perf_counter() - (0.0 if self.saved is None else self.saved.seconds)
        self._at = time.perf_counter()
        self._weights: dict[int, Arrays] = {}
        self._handed: dict[int, Arrays] = {}  # to the writer, until they are on disk
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def offer(self, done: int, stage: Stage, history: History) -> None:
        """Takes note of a stage, and saves the run if it is time to.

        Args:
            done: rounds so far.
            stage: the last of them.
            history: of the run, with this stage if it was evaluated.

        Raises:
            CheckpointError: if the folder is gone: nothing can be saved any more.
        """
        if not self._folder.is_dir():
            self._last = None  # nothing is left to save at the end
            raise CheckpointError(f"checkpoints in {self._folder}: it was deleted or moved")
        self._history, self._last = history, (done, stage)
        crowded = stage.scored is not None and self._notes(done, stage)
        self._told(wait=crowded)
        due = time.perf_counter() - self._at >= self._where.seconds
        if done > self._done and (due or done == self._rounds) and self._writing is None:
            self._save()
        elif crowded:
            self._handed, self._weights = self._weights, {}
            self._writing = self._writer.submit(self._write_weights, self._handed)

    def _notes(self, done: int, stage: Stage) -> bool:
        """Notes what an evaluation gives; returns whether it is time to write kept models."""
        i = len(self._of_stages)
        self._recorded |= packed(f"{i}.recorded", stage.recorded)
        self._of_stages.append(stage.rounds)
        self._scored.add(jax.tree.map(lambda a: np.asarray(a)[None], stage.scored))
        if not self._where.weights or jax.process_index() > 0:
            return False
        if stage.run is not None:
            self._weights[done] = packed(SERVER, stage.run.state.server)
        elif self.saved is not None and (old := recorded(self.saved, i)):
            self._weights[done] = old
        return sum(a.nbytes for w in self._weights.values() for a in w.values()) > WAITING

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
        arrays = packed("run", run) | packed("collected", stage.collected) | self._recorded
        if self._of_stages:
            evaluations, metrics = self._history
            arrays |= packed("metrics", metrics.tree()) | packed("scored", self._scored.tree())
            arrays["wall"] = np.array(evaluations.stacked().wall_seconds)
        if stage.scored is None:
            arrays |= packed("begun", stage.metrics)
        told = {
            "version": VERSION,
            "done": done,
            "rounds": [*self._of_stages],  # a copy: it grows while this is written
            "seconds": time.perf_counter() - self._began,
            "identity": self._identity,
        }
        self._at = time.perf_counter()
        if jax.process_index() == 0:
            self._handed, self._weights = self._weights, {}
            self._writing = self._writer.submit(self._write, done, told, arrays, self._handed)
        else:
            self._done = done

    def _write_weights(self, weights: dict[int, Arrays]) -> None:
        for done in [*weights]:
            write(self._folder / server_file(done), {"version": VERSION}, weights[done])
            del weights[done]

    def _write(
        self, done: int, about: Mapping[str, Any], arrays: Arrays, weights: dict[int, Arrays]
    ) -> None:
        if not self._folder.is_dir():
            return  # not to make it again; the next stage ends the run
        self._write_weights(weights)
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
        self._handed, self._weights = {}, self._handed | self._weights

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
