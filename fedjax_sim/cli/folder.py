"""The folder that a run leaves behind: settings, records, a summary and pictures."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Task
from fedjax_sim.base.files import write_text
from fedjax_sim.cli.curves import draw_curves
from fedjax_sim.cli.sinks import Sending
from fedjax_sim.partition.pictures import Format
from fedjax_sim.run import Evaluation, Result
from fedjax_sim.run.metrics import SetScores, client_accuracy, spread

FILES = ("config.json", "metrics.jsonl", "clients.jsonl", "summary.json")
PICTURES = ("curves", "clients")
FORMAT = 2
"""Of a run's folder, see docs/run_folder.md; a later one is rejected."""

CHECKPOINTS = "checkpoints"
"""The folder of the checkpoints, within that of a run; one for each algorithm."""


class RunFolder:
    """The folder of one run; each record is on disk as soon as it is known.

    Args:
        path: a folder that is new or empty, unless a run is resumed in it.
        config: the settings, for ``config.json``.
        pictures: their format.
        resumed: whether the folder is that of a run which goes on; its records are written anew.
        sink: a tracker that gets them too; None for none.

    Attributes:
        recorded: whether it has a record yet.

    Raises:
        ValueError: if the folder holds something, is none or cannot be made.
    """

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        pictures: Format = "png",
        *,
        resumed: bool = False,
        sink: str | None = None,
    ) -> None:
        """Makes the folder and ``config.json``."""
        self._sending = None if sink is None else Sending(sink, _plain(config), path)
        self.path, self.recorded, self._format = path, resumed, pictures
        self._metrics: TextIO | None = None
        self._clients: dict[str, list[dict[str, Any]]] = {}
        try:
            if not resumed:
                check_free(path)
            self._made = not path.exists()
            path.mkdir(parents=True, exist_ok=True)
            write_json(path / "config.json", config)
        except OSError as error:
            raise ValueError(f"--out {path}: {error.strerror or error}") from error

    @property
    def checkpoints(self) -> Path:
        """The folder of those of all algorithms."""
        return self.path / CHECKPOINTS

    def picture(self, name: str) -> Path:
        """Where the picture of that name lies, one of ``PICTURES``."""
        return self.path / f"{name}.{self._format}"

    def log(
        self,
        algorithm: str,
        evaluation: Evaluation,
        runs: Sequence[Mapping[str, int]],
        tables: Sequence[NDArray[np.int64]],
        task: Task,
        names: Sequence[Sequence[str]],
    ) -> None:
        """Adds a line for each run to ``metrics.jsonl``.

        Args:
            algorithm: its name.
            evaluation: of R runs.
            runs: what sets each apart (its seed, its fold).
            tables: samples per client and class, ``int64[N, M]``, one per seed.
            task: what is learnt.
            names: the names of each run's clients, for ``clients.jsonl``; empty if they have none.
        """
        records: list[dict[str, Any]] = []
        self._clients[algorithm] = []
        for i, run in enumerate(runs):
            told = {"algorithm": algorithm, **run, "round": evaluation.round}
            clients = _client_scores(evaluation, i, tables, task)
            record: dict[str, Any] = {
                **told,
                **_pooled(evaluation.test, i),
                **_spreads(clients),
                "test_loss": evaluation.test_loss[i],
                "train_loss": evaluation.train_loss[i],
                "bytes_up": int(evaluation.bytes_up[i]),
                "bytes_down": int(evaluation.bytes_down[i]),
                "samples": int(evaluation.samples[i]),
                "skipped": int(evaluation.skipped[i]),
            }
            if evaluation.seconds is not None:
                record["seconds"] = float(evaluation.seconds[i])
            for part in ("validation", "personal"):
                scores: SetScores | None = getattr(evaluation, part)
                if scores is not None:
                    record[part] = _pooled(scores, i) | _spreads(_by_client(scores, i))
            own = {} if evaluation.personal is None else _by_client(evaluation.personal, i)
            if clients or own:
                named = {"names": list(names[i])} if names[i] else {}
                personal = {"personal": own} if own else {}
                self._clients[algorithm].append(told | named | clients | personal)
            record |= {name: values[i] for name, values in evaluation.diagnostics.items()}
            if evaluation.uncollected is not None:
                record[f"{task.score}_uncollected"] = evaluation.uncollected[i]
            records.append(_plain(record))
        if self._metrics is None:  # not before: those of a run that goes on stand here until now
            self._metrics = (self.path / "metrics.jsonl").open("w", encoding="utf-8")
        self._metrics.writelines(map(_line, records))
        self._metrics.flush()
        self.recorded = True
        if self._sending is not None:
            self._sending.log(records)

    def write_summary(
        self,
        summary: Mapping[str, Any],
        results: Mapping[str, Result],
        score: str,
        title: str = "",
    ) -> None:
        """Writes ``summary.json``, ``clients.jsonl`` and the curves of what has finished.

        A server's model without the leaves that stay with the clients has no curve.
        """
        rows = [_line(row) for name in results for row in self._clients.get(name, ())]
        if rows:
            write_text(self.path / "clients.jsonl", "".join(rows))
        write_json(self.path / "summary.json", summary)
        drawn = {
            name: result
            for name, result in results.items()
            if result.evaluations[-1].personal is not None
            or not summary.get(name, {}).get("own_leaves")
        }
        if drawn:
            draw_curves(drawn, self.picture("curves"), score, title)

    def close(self) -> None:
        """Closes the files; without a record removes them, and the folder if it was new."""
        if self._metrics is not None:
            self._metrics.close()
        if self._sending is not None:
            self._sending.close()
        if self.recorded:
            return
        for path in (*(self.path / name for name in FILES), *map(self.picture, PICTURES)):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.checkpoints, ignore_errors=True)
        if self._made:
            with suppress(OSError):  # somebody has put something there
                self.path.rmdir()


def checkpoints_in(run: Path, algorithm: str) -> Path:
    """The folder of an algorithm's checkpoints; a method of a user's own has a colon."""
    return run / CHECKPOINTS / quote(algorithm, safe="")


def check_free(path: Path) -> None:
    """Raises ValueError unless ``path`` is new or an empty folder."""
    if path.exists() and not path.is_dir():
        raise ValueError(f"--out {path} is a file; name a new folder")
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"--out {path} is not empty; name a new folder")


def _client_scores(
    evaluation: Evaluation, run: int, tables: Sequence[NDArray[np.int64]], task: Task
) -> dict[str, NDArray[np.float64]]:
    """What the server's model scores at each client in one run, ``f64[K]`` by name."""
    if evaluation.test.by_client is not None or task.classes is None:
        return _by_client(evaluation.test, run)
    # Nobody has test samples of its own: what their label mix lets expect.
    correct, count = evaluation.correct[run], evaluation.total[run]
    return {"client_accuracy": client_accuracy(correct, count, tables[run])}


def _pooled(scores: SetScores, run: int) -> dict[str, float]:
    """One run's scores of all samples of an evaluation set."""
    return {m: scores.pooled[m][run] for m in scores.metrics}


def _by_client(scores: SetScores, run: int) -> dict[str, NDArray[np.float64]]:
    """One run's scores of each client of an evaluation set, ``f64[K]``; nothing without clients."""
    if scores.by_client is None:
        return {}
    return {f"client_{m}": scores.by_client[m][run] for m in scores.metrics}


def _spreads(by_client: Mapping[str, NDArray[np.float64]]) -> dict[str, dict[str, float]]:
    return {name: spread(values) for name, values in by_client.items()}


def _plain(content: Any) -> Any:
    """As JSON knows it: null for NaN, a score that does not exist, and for infinity."""
    if isinstance(content, Mapping):
        return {key: _plain(value) for key, value in content.items()}
    if isinstance(content, np.ndarray):
        content = content.tolist()
    if isinstance(content, list | tuple):
        return [_plain(value) for value in content]
    if isinstance(content, float):
        return float(content) if math.isfinite(content) else None
    return content


def as_json(content: Mapping[str, Any]) -> str:
    """As text; null for NaN and infinity."""
    return json.dumps(_plain(content), indent=2)


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(_plain(record)) + "\n"


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file as a whole or not at all: one that is killed leaves what was there before."""
    write_text(path, as_json(content) + "\n")


def versions() -> dict[str, str]:
    """Of Python and of the packages that results depend on."""
    found = {"python": sys.version.split()[0]}
    for name in ("fedjax_sim", "jax", "jaxlib", "flax", "optax", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
