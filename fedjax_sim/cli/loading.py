"""Loads the results of a run folder."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import Array, ClientData, FedState, Model, PyTree, Variables
from fedjax_sim.base.brief import Text, brief, over_runs
from fedjax_sim.cli.build import Setup, build
from fedjax_sim.cli.folder import checkpoints_in
from fedjax_sim.cli.machine import Machine
from fedjax_sim.cli.reading import read_object, read_rows
from fedjax_sim.cli.resuming import read_settings
from fedjax_sim.data import EvalSet
from fedjax_sim.run.checkpoint_files import (
    Checkpoint,
    newest_checkpoint,
    server_model,
    server_model_at,
    unpack,
)
from fedjax_sim.run.client_memory import with_all_rows
from fedjax_sim.run.layout import RunAxes
from fedjax_sim.run.records import Run
from fedjax_sim.run.result import select_runs

if TYPE_CHECKING:
    import pandas


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A run of ``python -m fedjax_sim.bench``, finished or not, or a result saved from Python.

    Attributes:
        folder: its path.
        settings: the settings of the run, ``config.json``.
        summary: an entry for each finished algorithm, ``summary.json``.
        records: a row for each algorithm, run and evaluation, ``metrics.jsonl``; see
          :meth:`to_pandas`.
        clients: the last row of each finished algorithm, with lists of all clients' scores,
          ``clients.jsonl``; null for a client without a score.
        trust: the modules from which its settings may import.
        given: the model, for a result saved from Python.
    """

    folder: Path
    settings: dict[str, Any]
    summary: dict[str, Any]
    records: list[dict[str, Any]]
    clients: list[dict[str, Any]]
    trust: tuple[str, ...] = ()
    given: Model | None = None

    def __repr__(self) -> str:
        kept = ("dataset", "partition", "clients", "rounds", "seeds")
        known = {name: self.settings.get(name) for name in kept}
        last = dict(zip(self.algorithms, map(self._last, self.algorithms), strict=True))
        return brief(self, {"folder": str(self.folder), **known, **last})

    def _last(self, algorithm: str) -> Text:
        """Returns the score of an algorithm after the last round, over its runs."""
        summary = self.summary.get(algorithm, {})
        if "diverged" in summary or not summary:
            return Text("diverged" if summary else "not finished")
        return over_runs(summary.get("score_last_per_run", []))

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The names of the algorithms that ran."""
        return (self.settings["algo"], *self.settings["compare"])

    @property
    def _runs(self) -> int:
        """R, the number of seeds, or of seeds and folds."""
        return len(self.settings["seeds"]) * (self.settings["folds"] or 1)

    @functools.cached_property
    def _setup(self) -> Setup:
        """The run's parts, built again from the command; this loads the data."""
        # Not before it is needed: it imports modules that users start by ``python -m``.
        from fedjax_sim.cli.parser import parse_folder

        config = parse_folder(self.folder, self.trust)
        machine = Machine(resume=str(self.folder))
        return build(dataclasses.replace(config, machine=machine))

    @property
    def model(self) -> Model:
        """The model that was trained."""
        return self._setup.model if self.given is None else self.given

    @property
    def data(self) -> ClientData:
        """The clients' training samples, of all runs."""
        return self._setup.problem.data

    @property
    def test(self) -> EvalSet:
        """The scored samples."""
        return self._setup.problem.test

    @property
    def validation(self) -> EvalSet | None:
        """The samples by which settings and rounds are selected; None without them."""
        return self._setup.problem.validation

    def to_pandas(self) -> pandas.DataFrame:
        """Returns the records as a table; the columns are those of :meth:`Result.to_pandas`."""
        import pandas

        return pandas.json_normalize(self.records)

    def variables(self, algorithm: str, at: int | Literal["validated"] | None = None) -> Variables:
        """Loads the weights of the server, NumPy ``[R, *p]``.

        R is seeds, or seeds and folds, in the order of the records.

        Args:
            algorithm: its name.
            at: for runs with ``--keep-weights``, an evaluated round, or "validated" for each run's
              best round on its validation set; None: the last saved round.

        Raises:
            ValueError: if the algorithm is unknown, or its weights in that round were not saved.
            CheckpointError: if none of its checkpoints is whole.
        """
        saved, mine = self._saved(algorithm)
        shapes = jax.eval_shape(self.model.init, jax.random.key(0))
        found: Variables
        if at == "validated":
            rounds, chosen = self._validated(algorithm)
            every = [mine(server_model_at(saved, shapes, int(r))) for r in rounds]
            found = jax.tree.map(
                lambda *leaves: np.stack([leaves[c][i] for i, c in enumerate(chosen)]), *every
            )
        else:
            kept = server_model(saved, shapes) if at is None else server_model_at(saved, shapes, at)
            found = mine(kept)
        return found

    def personal(self, algorithm: str) -> Variables:
        """Loads the clients' own models after the last saved round, NumPy ``[R, N, *p]``.

        They are the models that are scored: a client's stored model, or the one that it makes from
        the server model and its samples. R is seeds, or seeds and folds; N clients need N times the
        memory of one model, in each run.

        Args:
            algorithm: its name.

        Raises:
            ValueError: if the algorithm is unknown, has no personal models, or was not saved.
            CheckpointError: if none of its checkpoints is whole.
        """
        saved, mine = self._saved(algorithm)
        made, model, data = self._setup.algorithms[algorithm], self.model, self.data
        if made.personal is None:
            raise ValueError(f"{algorithm} has no models of the clients' own: see variables")
        axes = RunAxes.of(data, (), len(self._setup.problem.runs))

        def begin(key: Array, data: ClientData) -> FedState:
            return made.init(key, model.init(key), data)

        def own(key: Array, state: FedState, data: ClientData) -> Variables:
            key = jax.random.fold_in(key, state.round)
            everyone = jnp.arange(data.clients, dtype=jnp.int32)
            found: Variables = made.score_personal(
                key, state, data, lambda constants, own, client: own, (), everyone
            )
            return found

        keys = jax.random.split(jax.random.key(0), axes.runs)
        shapes = jax.eval_shape(axes.map(begin, (0, axes.data), axes.state), keys, data)
        kept: Run = with_all_rows(mine(unpack(saved.arrays, "run", Run(keys, shapes))))
        server = mine(server_model(saved, jax.eval_shape(model.init, keys[0])))
        state = kept.state._replace(server=server)
        made_of = jax.jit(axes.map(own, (0, axes.state, axes.data)))
        models: Variables = jax.device_get(made_of(kept.keys, state, data))
        return models

    def _saved(self, algorithm: str) -> tuple[Checkpoint, Callable[[PyTree], Any]]:
        """Returns an algorithm's newest checkpoint, and a function that selects its runs."""
        if algorithm not in self.algorithms:
            known = ", ".join(self.algorithms)
            raise ValueError(f"algorithm must be one of {known}, got {algorithm!r}")
        group = next((g for g in self.settings.get("programs", []) if algorithm in g), [algorithm])
        names = (algorithm, group[0])
        found = (newest_checkpoint(checkpoints_in(self.folder, name)) for name in names)
        saved = next((checkpoint for checkpoint in found if checkpoint is not None), None)
        if saved is None:
            raise ValueError(f"{self.folder} has no checkpoint of {algorithm}")
        runs, place = self._runs, group.index(algorithm)
        own = slice(place * runs, (place + 1) * runs)

        def mine(values: PyTree) -> Any:
            several = len(jax.tree.leaves(values)[0]) > runs
            return select_runs(values, own if several else slice(None))

        return saved, mine

    def _validated(self, algorithm: str) -> tuple[list[int], NDArray[np.int64]]:
        """Returns the rounds that were evaluated, and the index of each run's best round."""
        rows = [row for row in self.records if row["algorithm"] == algorithm]
        rounds, runs = [*dict.fromkeys(row["round"] for row in rows)], self._runs
        if not rows or "validation" not in rows[0]:
            raise ValueError('at="validated" is for a run with --validation or --split clients')
        scores = [_validation_score(row, self.settings["score"]) for row in rows]
        values = np.array(scores, np.float64).reshape(len(rounds), runs)
        sign = -1 if self.settings["metric"]["best"] == "lowest" else 1
        return rounds, np.nan_to_num(sign * values, nan=-np.inf).argmax(axis=0)


def _validation_score(row: Mapping[str, Any], score: str) -> float | None:
    """Returns the validation score of a record: the mean over clients if clients are scored."""
    found = row["validation"]
    by_client = found.get(f"client_{score}")
    value: float | None = found[score] if by_client is None else by_client["mean"]
    return value


def load_run(
    folder: str | Path, trust: Collection[str] = (), *, model: Model | None = None
) -> SavedRun:
    """Reads a run folder as data: no code from the folder is run.

    Args:
        folder: the ``--out`` of a command, or the folder of :func:`fedjax_sim.save_run`.
        trust: the modules, or packages, from which the model, the methods and the data set of the
            run may come, if its settings name them as ``package.module:function``.
        model: the model of a result that was saved from Python, to load its weights; None: the
            model that the command names.

    Returns:
        Settings, scores, and on request the model, its weights and the data.

    Raises:
        ValueError: if the folder has no run, or a file is damaged; names the file.

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
    settings, summary = read_settings(folder), read_summary(folder)
    metrics, clients = (folder / f"{name}.jsonl" for name in ("metrics", "clients"))
    records, last = read_rows(metrics), read_rows(clients)
    return SavedRun(folder, settings, summary, records, last, tuple(trust), model)


def read_summary(folder: Path) -> dict[str, Any]:
    """Reads ``summary.json``; empty if no algorithm has finished."""
    path = folder / "summary.json"
    return read_object(path) if path.exists() else {}
