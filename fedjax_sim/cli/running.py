"""Runs the algorithms of a command, and records their results."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedjax_sim.cli import ending
from fedjax_sim.cli.adapting import fingerprint
from fedjax_sim.cli.attacking import malicious_of
from fedjax_sim.cli.build import Setup
from fedjax_sim.cli.commands import default_folder
from fedjax_sim.cli.config import Config
from fedjax_sim.cli.folder import CHECKPOINTS, FORMAT, RunFolder, checkpoints_in
from fedjax_sim.cli.loading import read_summary
from fedjax_sim.cli.processes import largest_of_all
from fedjax_sim.cli.report import digits
from fedjax_sim.cli.resuming import read_settings
from fedjax_sim.cli.stopping import STOPPING
from fedjax_sim.cli.summary import summarise
from fedjax_sim.cli.watching import Forecast, Watch
from fedjax_sim.engine.memory import MB, TooLargeError, trim
from fedjax_sim.partition import draw_partition, partition_hash
from fedjax_sim.run import Checkpoints, DivergedError, Evaluation, Result
from fedjax_sim.run.cache import forget_programs
from fedjax_sim.run.candidates import divergence, run_candidates
from fedjax_sim.run.checkpoints import rounds_saved
from fedjax_sim.run.environment import environment
from fedjax_sim.run.identity import random_settings
from fedjax_sim.tasks.sums import mean_known


class Outcome(NamedTuple):
    """The outcome of a run: results and the entries of ``summary.json``, by algorithm."""

    results: dict[str, Result]  # in the order in which they ended
    summaries: dict[str, dict[str, Any]]  # in the order of the command
    diverged: dict[str, str]  # why each algorithm has no result


def work_of(label: str, setup: Setup) -> float:
    """Returns the relative work of an algorithm: rounds times models times epochs."""
    epochs = setup.config.training_of(label).epochs
    return setup.rounds[label] * setup.algorithms[label].slots * epochs


def open_folder(setup: Setup, argv: Sequence[str]) -> RunFolder:
    """Makes the run folder, with the settings."""
    config = setup.config
    resume, standardise = config.machine.resume, config.scores.standardise
    out = config.machine.out if resume is None else resume
    path = default_folder(config.experiment.dataset, config.algo) if out is None else Path(out)
    malicious = malicious_of(config.attack, setup.problem.data.clients)
    found = {
        "model": setup.model_name,
        "partition": setup.sampler,
        "task": repr(setup.task),
        "score": setup.score,
        "metric": setup.task.metrics[setup.score]._asdict(),
        "clients": setup.clients,
        "clients_per_round": setup.clients_per_round,
        "malicious": None if malicious is None else np.flatnonzero(malicious).tolist(),
        "initial_sha256": fingerprint(config.weights.initial),
        "standardise": (standardise or "global") if setup.problem.scaled else None,
        "test_fraction": setup.problem.held_out,
        "data": setup.about.as_dict(),
        "partitions": [p.name for p in setup.partitions],
        "partition_hashes": [partition_hash(p) for p in setup.partitions],
        "programs": setup.programs,
        "jax": random_settings(),
    }
    if resume is not None:
        begun = read_settings(path)
        for name in ("clients", "partition_hashes"):
            if begun[name] != found[name]:
                raise ValueError(f"--resume {path}: {name} is another now: the data have changed")
        for name, ours in random_settings().items():
            theirs = begun["jax"].get(name)
            if theirs != ours:
                raise ValueError(
                    f"--resume {path}: JAX draws other random numbers now: {name} is {ours}, and "
                    f"{theirs} in the run"
                )
        argv = begun["arguments"]
        if begun["rounds"] != config.experiment.rounds:
            argv = [*argv, "--rounds", str(config.experiment.rounds)]
    settings = {"format": FORMAT, **config.record(), **found, "arguments": argv}
    return RunFolder(
        path,
        settings,
        config.machine.pictures,
        resumed=resume is not None,
        named=out is not None,
        sink=config.machine.sink,
    )


def finished_status(config: Config, folder: Path) -> int | None:
    """Prints that a run has finished, and returns the status of its command.

    It is None, and nothing is printed, if the run has not finished.
    """
    found, rounds = read_summary(folder), read_settings(folder)["rounds"]
    if rounds != config.experiment.rounds or not {*config.algorithms} <= found.keys():
        return None
    print(f"done before: {folder}")
    return int(any("diverged" in found[name] for name in config.algorithms))


def title(setup: Setup) -> str:
    """Returns the title of pictures: the data set and the partition."""
    asked = setup.sampler
    sampler = setup.partitions[0].name if asked.endswith(".npz") else asked
    return f"{setup.config.experiment.dataset}, {sampler or asked}, {setup.clients:,} clients"


def draw_clients(setup: Setup, path: Path) -> None:
    """Draws the clients' samples of each class, for up to four seeds."""
    seeds, most = setup.config.experiment.seeds, min(4, len(setup.partitions))
    one_for_all = len(setup.partitions) < len(seeds)
    titles = ["all seeds"] if one_for_all else [f"seed {s}" for s in seeds[:most]]
    head, classes = title(setup), setup.class_names
    draw_partition(setup.tables[:most], path, titles, title=head, classes=classes)


def run(setup: Setup, folder: RunFolder | None, command: str, watch: Watch) -> Outcome:
    """Runs every algorithm, and records it if there is a folder, which only one process has."""
    STOPPING.patient = True
    if folder is not None:
        folder.draw("clients", lambda path: draw_clients(setup, path))
    common = {**environment(command), "devices": [str(d) for d in setup.execution.devices]}
    results: dict[str, Result] = {}
    summaries: dict[str, dict[str, Any]] = {}
    diverged: dict[str, str] = {}
    forecast = Forecast({name: work_of(name, setup) for name in setup.algorithms})
    waiting = [*setup.programs]
    while waiting:
        group = waiting.pop(0)
        try:
            found = _Program(group, setup, folder, forecast).run(watch)
        except DivergedError as error:
            found = {group[0]: str(error)}
        except TooLargeError:
            if len(group) == 1:
                raise
            waiting = [[name] for name in group] + waiting  # one by one they may fit
            continue
        STOPPING.patient = True
        for name, result in found.items():
            if isinstance(result, str):
                diverged[name] = result
                summaries[name] = {"diverged": result}
            else:
                results[name] = result
                summaries[name] = summarise(name, result, setup, beside=len(group) - 1)
        forecast.ended(group)
        in_order = {name: summaries[name] for name in setup.algorithms if name in summaries}
        if folder is not None:
            head = f"{title(setup)}, {setup.model_name}"
            folder.write_summary({**in_order, **common}, results)
            folder.draw_results(in_order, results, setup.score, head)
        for name in group:
            forget_programs(setup.algorithms[name])
        trim()
        STOPPING.check(largest_of_all)
    return Outcome(results, in_order, diverged)


class _Program:
    """A program: runs the algorithms that share it, and records and shows their evaluations.

    If there are other algorithms too, the ``forecast`` of all is shown.
    """

    def __init__(
        self, names: Sequence[str], setup: Setup, folder: RunFolder | None, forecast: Forecast
    ) -> None:
        self.names, self.setup, self.folder, self.forecast = names, setup, folder, forecast
        runs = setup.problem.runs
        folds = len(runs) // len(setup.tables)
        self.tables = [table for table in setup.tables for _ in range(folds)]
        self.checkpoints = checkpoints_of(names[0], setup.config, folder)
        self.rounds, self.saved = setup.rounds[names[0]], 0
        if self.checkpoints is not None:
            self.saved = min(self.rounds, rounds_saved(self.checkpoints))
        self.lost = set[str]()
        self.note = ""

    def run(self, watch: Watch) -> dict[str, Result | str]:
        """Returns the result of each algorithm, or the message of one that has diverged."""
        names, setup, first = self.names, self.setup, self.names[0]
        common: dict[str, Any] = {
            "rounds": self.rounds,
            "on_compiled": self._compiled,
            "on_rounds": self._progress,
            "checkpoints": self.checkpoints,
        }
        experiment = setup.experiment(first)
        with (
            watch(names, self.rounds, self.saved) as self.tell,
            self.forecast.program(names, self.rounds, self.saved) as self.advance,
        ):
            STOPPING.patient = False  # compiling may take minutes, and nothing would be lost
            STOPPING.check(largest_of_all)
            if len(names) == 1:
                on_evaluation = functools.partial(self._record, first)
                stop = ending.rule(
                    setup.config.ending,
                    setup.score,
                    experiment.algorithm,
                    validated=setup.problem.validates_own,
                )
                return {first: experiment.run(on_evaluation=on_evaluation, stop=stop, **common)}
            results = run_candidates(
                setup.methods.candidates(names, setup.algorithms),
                experiment,
                on_evaluation=lambda place, evaluation: self._record(names[place], evaluation),
                **common,
            )
        seeds = [run["seed"] for run in setup.problem.runs]
        outcomes = (divergence(result, seeds) or result for result in results)
        return dict(zip(names, outcomes, strict=True))

    def _compiled(self, held: int) -> None:
        STOPPING.patient = True
        self.advance(self.saved)
        self.tell(self.saved, f"{held / MB:,.0f} MB a device")

    def _progress(self, done: int) -> None:
        self.advance(done)
        others = len(self.names) < len(self.setup.algorithms)
        left = f"{self.forecast} in all" if others and str(self.forecast) else ""
        self.tell(done, ", ".join(filter(None, (self.note, left))))
        if done >= self.saved:  # the records of a checkpoint are written again first
            STOPPING.check(largest_of_all)

    def _record(self, name: str, evaluation: Evaluation) -> None:
        setup, problem = self.setup, self.setup.problem
        if not np.isfinite(evaluation.test_loss).all():
            self.lost.add(name)
        if self.folder is not None and name not in self.lost:
            tables, names = self.tables, problem.names
            self.folder.log(name, evaluation, problem.runs, tables, setup.task, names)
        lacks_leaves = setup.algorithms[name].parts.exchange.own is not None
        scored = evaluation.personal if lacks_leaves else evaluation.test
        if scored is not None and name not in self.lost:
            value = float(mean_known(scored.reported[setup.score]))
            percent = setup.task.metrics[setup.score].percent
            self.note = f"{setup.score} {f'{100 * value:.1f} %' if percent else digits(value)}"


def checkpoints_of(name: str, config: Config, folder: RunFolder | None) -> Checkpoints | None:
    """Returns the checkpoints of an algorithm, if any; all processes read them, one writes them."""
    machine = config.machine
    if not machine.checkpoints:
        return None
    path = machine.resume if folder is None else folder.path
    if path is None:
        return None
    within = checkpoints_in(Path(path), name)
    return Checkpoints(within, machine.checkpoint_every, weights=machine.keep_weights)


def checkpoints_found(config: Config) -> list[str]:
    """Returns the names of the checkpoints from which a run resumes, equal in all processes."""
    if config.machine.resume is None:
        return []
    within = Path(config.machine.resume) / CHECKPOINTS
    return sorted(str(path.relative_to(within)) for path in within.rglob("[0-9]*.npz"))
