"""Checkpoints, from which a killed run resumes with the same results.

One ``.npz`` file holds the state, the keys, and the results of every round and evaluation. Its
arrays carry checksums, which Orbax's do not: of 20 Orbax checkpoints with one bit flipped, all were
restored without a warning, with wrong weights.
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
from fedjax_sim.run.checkpoint_files import (
    COLLECTED,
    SERVER,
    VERSION,
    Checkpoint,
    CheckpointError,
    CheckpointWarning,
    checkpoint_paths,
    intact_checkpoints,
    pack,
    server_file,
    write_arrays,
)
from fedjax_sim.run.checks import whole_number
from fedjax_sim.run.client_memory import ClientMemory
from fedjax_sim.run.layout import Layout
from fedjax_sim.run.records import Evaluations, Interval, TreeBuffer

FINGERPRINT = 64
"""Characters of a fingerprint."""


class Checkpoints(NamedTuple):
    """Where and how often :func:`fedjax_sim.simulate` saves a run.

    Attributes:
        folder: folder of this run only. If it has checkpoints of the run, the run resumes from
          them.
        seconds: seconds between checkpoints, plus up to ten that a program runs; the end of the
            run is always saved. A checkpoint costs a copy of the state on the host; the next
            rounds run while it is written.
        keep: number of files to keep, the newest; at least 1.
        weights: whether to keep the server's model of every evaluation too, each in its own file.
    """

    folder: str | Path
    seconds: float = 60.0
    keep: int = 2
    weights: bool = False


def rounds_saved(where: Checkpoints | str | Path) -> int:
    """Returns the rounds of the newest checkpoint of a run; 0 if it has none."""
    folder = where.folder if isinstance(where, Checkpoints) else where
    return max((int(path.stem) for path in checkpoint_paths(Path(folder))), default=0)


class Saver:
    """Saves a run while it is in progress.

    Args:
        where: folder and frequency.
        identity: settings, or their fingerprints, that identify the run, by name.
        rounds: rounds of the run.
        eval_every: rounds between evaluations.
        layout: layout of the run.

    Attributes:
        saved: the checkpoint to resume from; None in a new folder.

    Raises:
        CheckpointError: if the folder has checkpoints of another run, or of more rounds, if its
            name is empty, or if it cannot be made.
        ValueError: if ``where.seconds`` or ``where.keep`` is out of range.
    """

    def __init__(
        self,
        where: Checkpoints,
        identity: Mapping[str, Any],
        rounds: int,
        eval_every: int,
        layout: Layout | ClientMemory,
    ) -> None:
        whole_number("keep", where.keep)
        if not isinstance(where.seconds, int | float) or not where.seconds >= 0:
            raise ValueError(f"seconds must be a number at least 0, got {where.seconds!r}")
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
        self.saved = self._resumable(eval_every)
        self._evaluations, self._metrics = Evaluations(), TreeBuffer(axis=1)
        self._scored = TreeBuffer()
        self._recorded: Arrays = {}
        self._interval_rounds: list[int] = []
        self._last: tuple[int, Interval] | None = None
        self._done = 0 if self.saved is None else self.saved.done
        self._began = time.perf_counter() - (0.0 if self.saved is None else self.saved.seconds)
        self._at = time.perf_counter()
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[None] | None = None

    def offer(
        self, done: int, interval: Interval, evaluations: Evaluations, metrics: TreeBuffer
    ) -> None:
        """Adds an interval, and saves the run if a checkpoint is due."""
        self._evaluations, self._metrics = evaluations, metrics
        self._last = done, interval
        if interval.scored is not None:
            self._add(done, interval)
        self._check_writer()
        due = time.perf_counter() - self._at >= self._where.seconds
        if done > self._done and (due or done == self._rounds) and self._writing is None:
            self._save()

    def _add(self, done: int, interval: Interval) -> None:
        """Adds an evaluated interval, and writes its model if models are kept."""
        i = len(self._interval_rounds)
        self._recorded |= pack(f"{i}.recorded", interval.recorded)
        self._interval_rounds.append(interval.rounds)
        self._scored.add(jax.tree.map(lambda a: np.asarray(a)[None], interval.scored))
        if self._where.weights and interval.run is not None and jax.process_index() == 0:
            model = pack(SERVER, interval.run.state.server)
            try:
                write_arrays(self._folder / server_file(done), {"version": VERSION}, model)
            except OSError as error:
                self._warn(error)

    def close(self) -> None:
        """Waits for the writer, and saves the newest interval if it is not on disk yet."""
        self._check_writer(wait=True)
        if self._last is not None and self._last[0] > self._done:
            run = self._last[1].run
            if run is not None and not any(a.is_deleted() for a in jax.tree.leaves(run)):
                self._save()
        self._check_writer(wait=True)
        self._writer.shutdown()

    def _save(self) -> None:
        assert self._last is not None
        done, interval = self._last
        assert interval.run is not None
        run = self._layout.exported(interval.run)
        arrays = pack("run", run) | pack(COLLECTED, interval.collected) | self._recorded
        if self._interval_rounds:
            arrays |= pack("metrics", self._metrics.tree()) | pack("scored", self._scored.tree())
            arrays["wall"] = np.array(self._evaluations.stacked().wall_seconds)
        if interval.scored is None:
            arrays |= pack("begun", interval.metrics)
        about = {
            "version": VERSION,
            "done": done,
            "rounds": [*self._interval_rounds],  # a copy: it grows while this is written
            "seconds": time.perf_counter() - self._began,
            "identity": self._identity,
        }
        self._at = time.perf_counter()
        if jax.process_index() == 0:
            self._writing = self._writer.submit(self._write, done, about, arrays)
        else:
            self._done = done

    def _write(self, done: int, about: Mapping[str, Any], arrays: Arrays) -> None:
        write_arrays(self._folder / f"{done:08d}.npz", about, arrays)
        self._done = done
        for old in checkpoint_paths(self._folder)[: -self._where.keep]:
            with suppress(OSError):
                old.unlink()

    def _check_writer(self, *, wait: bool = False) -> None:
        """Warns if the last checkpoint could not be written; the run continues and tries again."""
        if self._writing is None or not (wait or self._writing.done()):
            return
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        warnings.warn(
            f"no checkpoint in {self._folder}: {error.strerror or error}; the run continues",
            CheckpointWarning,
            stacklevel=2,
        )

    def _resumable(self, eval_every: int) -> Checkpoint | None:
        """Returns the newest intact checkpoint that a run of ``rounds`` rounds passes through."""
        saved = None
        for path, about, saved in intact_checkpoints(self._folder):
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
                f"rounds cannot be {self._rounds} with an evaluation every {eval_every}: the run "
                f"in {self._folder} has {saved.done} and was last evaluated after {saved.evaluated}"
            )
        return None

    def _check(self, path: Path, about: Mapping[str, Any]) -> None:
        if about["version"] != VERSION:
            raise CheckpointError(f"{path} is of version {about['version']}, not {VERSION}")
        for name, ours in self._identity.items():
            theirs = about["identity"].get(name)
            if theirs != ours:
                # Fingerprints and long texts do not help a reader.
                long = max(len(str(theirs)), len(str(ours))) >= FINGERPRINT
                values = "" if long else f": {theirs}, not {ours}"
                raise CheckpointError(f"{path} is of a run with another {name}{values}")
