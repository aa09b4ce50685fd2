"""What a run of the command left in its folder, for further work."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fedjax_sim.base import ClientData, Model, Variables
from fedjax_sim.cli.build import Setup, build
from fedjax_sim.cli.folder import checkpoints_in
from fedjax_sim.cli.machine import Machine
from fedjax_sim.cli.resuming import arguments, written
from fedjax_sim.data import EvalSet
from fedjax_sim.run.checkpoints import newest, server_of
from fedjax_sim.run.result import of_runs


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A run of ``python -m fedjax_sim.bench``, finished or not.

    Attributes:
        folder: where it lies.
        settings: of the run, ``config.json``.
        summary: of each algorithm that has finished, ``summary.json``; empty before.
        records: a row for each algorithm, run and evaluation, ``metrics.jsonl``; what
          ``pandas.DataFrame`` takes.
    """

    folder: Path
    settings: dict[str, Any]
    summary: dict[str, Any]
    records: list[dict[str, Any]]

    @property
    def algorithms(self) -> tuple[str, ...]:
        """Those that ran, by name."""
        return (self.settings["algo"], *self.settings["compare"])

    @functools.cached_property
    def _setup(self) -> Setup:
        """Built again from the command: it loads the data."""
        # Not before it is needed: it imports modules that users start by ``python -m``.
        from fedjax_sim.cli.parser import parse

        config = parse(arguments(self.folder))
        return build(dataclasses.replace(config, machine=Machine()))

    @property
    def model(self) -> Model:
        """The model that was trained."""
        return self._setup.model

    @property
    def data(self) -> ClientData:
        """The clients' training samples, of all runs."""
        return self._setup.problem.data

    @property
    def test(self) -> EvalSet:
        """What was scored."""
        return self._setup.problem.test

    def variables(self, algorithm: str) -> Variables:
        """The weights of the server after the last round that was saved, NumPy ``[R, *p]``.

        R is seeds, or seeds and folds, in the order of the records.

        Raises:
            ValueError: if the run has no such algorithm, or nothing was saved of it.
            CheckpointError: if none of its checkpoints is whole.
        """
        if algorithm not in self.algorithms:
            known = ", ".join(self.algorithms)
            raise ValueError(f"algorithm must be one of {known}, got {algorithm!r}")
        group = next((g for g in self.settings.get("programs", []) if algorithm in g), [algorithm])
        saved = newest(checkpoints_in(self.folder, algorithm))
        if saved is None:
            saved = newest(checkpoints_in(self.folder, group[0]))
        if saved is None:
            raise ValueError(f"{self.folder} has no checkpoint of {algorithm}")
        shapes = jax.eval_shape(self.model.init, jax.random.key(0))
        variables: Variables = jax.tree.map(np.asarray, server_of(saved, shapes))
        runs = len(self._setup.problem.runs)
        if len(jax.tree.leaves(variables)[0]) == runs:
            return variables
        place = group.index(algorithm)
        mine: Variables = of_runs(variables, slice(place * runs, (place + 1) * runs))
        return mine


def load_run(folder: str | Path) -> SavedRun:
    """Reads what a run of the command left.

    Args:
        folder: that of the run, its ``--out``.

    Returns:
        Settings, scores, and on request the model, its weights and the data.

    Raises:
        ValueError: if the folder has no run.

    Example:
        >>> import subprocess, sys, tempfile
        >>> import jax, fedjax_sim as fs
        >>> out = tempfile.mkdtemp() + "/run"
        >>> flags = "--algo fedavg --compare none --rounds 1 --seeds 2 --model logistic --out"
        >>> command = [sys.executable, "-m", "fedjax_sim.bench", *flags.split(), out]
        >>> done = subprocess.run(command, capture_output=True)
        >>> run = fs.load_run(out)
        >>> run.algorithms, len(run.records)
        (('fedavg',), 2)
        >>> first = jax.tree.map(lambda a: a[0], run.variables("fedavg"))
        >>> run.model.apply(first, run.test.x[:5], train=False)[0].shape
        (5, 10)
    """
    folder = Path(folder)
    settings, summary, records = written(folder), folder / "summary.json", folder / "metrics.jsonl"
    lines = records.read_text(encoding="utf-8").splitlines() if records.exists() else []
    found = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else {}
    return SavedRun(folder, settings, found, [json.loads(line) for line in lines])
