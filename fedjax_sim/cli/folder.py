"""The run folder: settings, records, a summary and pictures."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Task
from fedjax_sim.base.files import append, write_text
from fedjax_sim.base.registry import error_text
from fedjax_sim.cli.claims import claim_begun, claim_new
from fedjax_sim.cli.commands import complain
from fedjax_sim.cli.curves import draw_curves
from fedjax_sim.cli.sinks import Sending
from fedjax_sim.partition.pictures import Format
from fedjax_sim.run import Evaluation, Result
from fedjax_sim.run.rows import row_of

FILES = ("config.json", "metrics.jsonl", "times.jsonl", "clients.jsonl", "summary.json")
PICTURES = ("curves", "clients")
FORMAT = 2
"""Of a run's folder, see docs/run_folder.md; a later one is rejected."""

CHECKPOINTS = "checkpoints"
"""The folder of the checkpoints, within that of a run; one for each algorithm."""

LONGEST = 200
"""Bytes of the name of such a folder; file systems end at 255."""


class RunFolder:
    """The folder of one run; each record is on disk as soon as it is known.

    Args:
        path: a folder that is new or empty, unless a run is resumed in it.
        config: the settings, for ``config.json``.
        pictures: the format of pictures.
        resumed: whether the folder belongs to a resumed run, whose records are rewritten.
        named: whether the user chose the name; a default name that is taken gets a suffix.
        sink: a tracker that receives the records too; None: no tracker.

    Attributes:
        path: the folder.
        recorded: whether the folder has a record or a summary.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        pictures: Format = "png",
        *,
        resumed: bool = False,
        named: bool = True,
        sink: str | None = None,
    ) -> None:
        """Claims the folder and writes ``config.json``."""
        self._claim = claim_begun(path) if resumed else claim_new(path, named=named)
        self.path, self.recorded, self._format = self._claim.path, resumed, pictures
        self._sending = None if sink is None else Sending(sink, _plain(config), self.path)
        self._metrics: FileIO | None = None
        self._times: FileIO | None = None
        self._clients: dict[str, list[dict[str, Any]]] = {}
        try:
            write_json(self.path / "config.json", config)
        except OSError:
            self.close()
            raise

    @property
    def checkpoints(self) -> Path:
        """The folder with the checkpoints of all algorithms."""
        return self.path / CHECKPOINTS

    @property
    def saved(self) -> bool:
        """Whether there is a checkpoint."""
        return any(self.checkpoints.rglob("[0-9]*.npz"))

    def picture(self, name: str) -> Path:
        """Returns the path of a picture, one of ``PICTURES``."""
        return self.path / f"{name}.{self._format}"

    def draw(self, name: str, draw: Callable[[Path], None]) -> None:
        """Draws a picture, one of ``PICTURES``; if that fails, the run continues."""
        try:
            draw(self.picture(name))
        except Exception as error:
            warning = f"warning: {self.picture(name)} was not drawn: {error_text(error)}"
            complain("fedjax_sim", warning, 0)

    def log(
        self,
        algorithm: str,
        evaluation: Evaluation,
        runs: Sequence[Mapping[str, int]],
        tables: Sequence[NDArray[np.int64]],
        task: Task,
        names: Sequence[Sequence[str]],
    ) -> None:
        """Adds a line for each run to ``metrics.jsonl``, and one to ``times.jsonl``.

        Each of the R runs has its seed and fold, the table ``int64[N, M]`` of its clients' samples
        by class, and the clients' names for ``clients.jsonl`` (empty if they have none).
        """
        records: list[dict[str, Any]] = []
        self._clients[algorithm] = []
        for i, run in enumerate(runs):
            place = {"algorithm": algorithm, **run}
            record, clients = row_of(evaluation, i, place, tables[i], task, names[i])
            records.append(_plain(record))
            if clients:
                self._clients[algorithm].append(clients)
        if self._metrics is None:  # not before: a run that goes on has its records until now
            self._metrics, self._times = map(self._opened, ("metrics.jsonl", "times.jsonl"))
        assert self._times is not None
        append(self._metrics, "".join(map(_line, records)).encode())
        taken = round(evaluation.wall_seconds, 3)
        timing = {"algorithm": algorithm, "round": evaluation.round, "wall_seconds": taken}
        append(self._times, _line(timing).encode())
        self.recorded = True
        if self._sending is not None:
            self._sending.log(records)

    def _opened(self, name: str) -> FileIO:
        path = self.path / name
        path.unlink(missing_ok=True)  # never what a link there leads to
        return path.open("xb", buffering=0)

    def write_summary(self, summary: Mapping[str, Any], names: Iterable[str]) -> None:
        """Writes ``summary.json``, and ``clients.jsonl`` of the algorithms that have finished."""
        rows = [_line(row) for name in names for row in self._clients.get(name, ())]
        if rows:
            write_text(self.path / "clients.jsonl", "".join(rows))
        write_json(self.path / "summary.json", summary)
        self.recorded = True  # even if it only lists diverged methods

    def draw_results(
        self,
        summary: Mapping[str, Any],
        results: Mapping[str, Result],
        score: str,
        title: str = "",
    ) -> None:
        """Draws the curves of the finished algorithms whose server model is whole."""
        drawn = {
            name: result
            for name, result in results.items()
            if result.evaluations[-1].personal is not None
            or not summary.get(name, {}).get("own_leaves")
        }
        if drawn:
            self.draw("curves", lambda path: draw_curves(drawn, path, score, title))

    def close(self) -> None:
        """Closes the files; removes them, and a new folder, if there is no record or checkpoint."""
        for file in (self._metrics, self._times):
            if file is not None:
                file.close()
        if self._sending is not None:
            self._sending.close()
        kept = self.recorded or self.saved
        if not kept:
            with suppress(OSError):
                for path in (*(self.path / name for name in FILES), *map(self.picture, PICTURES)):
                    path.unlink(missing_ok=True)
                shutil.rmtree(self.checkpoints)
        self._claim.release(remove=not kept)


def checkpoints_in(run: Path, algorithm: str) -> Path:
    """Returns the folder of an algorithm's checkpoints; names of users' methods have a colon.

    A long name ends in a fingerprint: percent-encoded, letters of other scripts are 6 to 12 bytes.
    """
    name = quote(algorithm, safe="")
    if len(name) > LONGEST:
        name = name[: LONGEST - 17] + "-" + hashlib.sha256(algorithm.encode()).hexdigest()[:16]
    return run / CHECKPOINTS / name


def _plain(content: Any) -> Any:
    """Returns values for JSON, with null for infinity and for NaN, a missing score."""
    if isinstance(content, Mapping):
        return {key: _plain(value) for key, value in content.items()}
    if isinstance(content, np.ndarray):
        content = content.tolist()
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    if isinstance(content, float):
        return float(content) if math.isfinite(content) else None
    return content


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(_plain(record)) + "\n"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file atomically: if the process is killed, the old file remains."""
    write_text(path, json.dumps(_plain(content), indent=2) + "\n")
