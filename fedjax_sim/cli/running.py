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
from fedjax_sim.cli.methods import name_of
from fedjax_sim.cli.processes import largest_of_all
from fedjax_sim.cli.report import digits
from fedjax_sim.cli.resuming import read_settings
from fedjax_sim.cli.stopping import STOPPING
from fedjax_sim.cli.summary import show, summarise
from fedjax_sim.cli.watching import Forecast, Watch
from fedjax_sim.engine.memory import MB, TooLargeError, trim
from fedjax_sim.partition import draw_partition, partition_hash
from fedjax_sim.run import Checkpoints, DivergedError, Evaluation, Result
from fedjax_sim.run.cache import forget_programs
from fedjax_sim.run.candidates import Candidates, divergence, group_candidates, run_candidates
from fedjax_sim.run.checkpoints import rounds_saved
from fedjax_sim.run.environment import environment
from fedjax_sim.run.identity import random_settings
from fedjax_sim.tasks.sums import mean_known


class Outcome(NamedTuple):
    """The outcome of a run: results and the entries of ``summary.json``, by algorithm."""

    results: dict[str, Result]  # in the order in which they ended
    summaries: dict[str, dict[str, Any]]  # in the order of the command
    common: dict[str, Any]  # the other entries of the summary
    diverged: dict[str, str]  # why each algorithm has no result


def programs(config: Config, setup: Setup) -> list[list[str]]:
    """Returns the algorithms grouped by program, in the order of their first members.

    With a stopping rule, which would end all runs of a program, each has its own program.
    """
    alike: dict[Any, list[str]] = {}
    for label in config.algorithms:
        what = config.own(label)
        own = label if ending.ends_early(config.ending) else ""
        alike.setdefault((name_of(label), tuple(what), own), []).append(label)
    found = []
    for labels in alike.values():
        if len(labels) == 1:
            found.append(labels)
            continue
        grouped = group_candidates(
            candidates(labels, config, setup), setup.model, setup.problem.data
        )
        found += [[labels[i] for i in group] for group in grouped]
    return sorted(found, key=lambda group: config.algorithms.index(group[0]))


def candidates(labels: Sequence[str], config: Config, setup: Setup) -> Candidates:
    """Returns the algorithms of one method with their settings."""
    return Candidates(
        functools.partial(setup.methods.varied, labels[0]),
        [config.own(label) for label in labels],
        [setup.algorithms[label] for label in labels],
    )


def work_of(label: str, config: Config, setup: Setup) -> float:
    """Returns the relative work of an algorithm: rounds times models times epochs."""
    return setup.rounds[label] * setup.algorithms[label].slots * config.training_of(label).epochs


def open_folder(
    config: Config, setup: Setup, groups: Sequence[Sequence[str]], argv: Sequence[str]
) -> RunFolder:
    """Makes the run folder, with the settings."""
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
        "programs": groups,
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


def title(config: Config, setup: Setup) -> str:
    """Returns the title of pictures: the data set and the partition."""
    asked = setup.sampler
    sampler = setup.partitions[0].name if asked.endswith(".npz") else asked
    return f"{config.experiment.dataset}, {sampler or asked}, {setup.clients:,} clients"


def draw_clients(config: Config, setup: Setup, path: Path) -> None:
    """Draws the clients' samples of each class, for up to four seeds."""
    seeds, most = config.experiment.seeds, min(4, len(setup.partitions))
    one_for_all = len(setup.partitions) < len(seeds)
    titles = ["all seeds"] if one_for_all else [f"seed {s}" for s in seeds[:most]]
    head, classes = title(config, setup), setup.class_names
    draw_partition(setup.tables[:most], path, titles, title=head, classes=classes)


def run(
    config: Config,
    setup: Setup,
    groups: Sequence[Sequence[str]],
    folder: RunFolder | None,
    command: str,
    watch: Watch,
) -> Outcome:
    """Runs every algorithm, and records it if there is a folder, which only one process has."""
    STOPPING.patient = True
    if folder is not None:
        folder.draw("clients", lambda path: draw_clients(config, setup, path))
    common = environment(command)
    common["devices"] = [str(d) for d in setup.execution.devices]
    results: dict[str, Result] = {}
    summaries: dict[str, dict[str, Any]] = {}
    lost: dict[str, str] = {}
    forecast = Forecast({name: work_of(name, config, setup) for name in config.algorithms})
    waiting = [*groups]
    while waiting:
        group = waiting.pop(0)
        try:
            found = run_group(group, config, setup, folder, watch, forecast)
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
                lost[name] = result
                summaries[name] = {"diverged": result}
            else:
                results[name] = result
                summaries[name] = summarise(name, result, config, setup, beside=len(group) - 1)
        forecast.ended(group)
        in_order = {name: summaries[name] for name in config.algorithms if name in summaries}
        if folder is not None:
            head = f"{title(config, setup)}, {setup.model_name}"
            folder.write_summary({**in_order, **common}, results)
            folder.draw_results(in_order, results, setup.score, head)
        for name in group:
            forget_programs(setup.algorithms[name])
        trim()
        STOPPING.check(largest_of_all)
    return Outcome(results, in_order, common, lost)


def show_outcome(outcome: Outcome, config: Config, setup: Setup, folder: Path) -> None:
    """Prints the tables of a run, and the folder."""
    if outcome.results:
        show(config, setup, outcome.summaries)
        print(f"\nrecords and pictures: {folder}")


def run_group(
    names: Sequence[str],
    config: Config,
    setup: Setup,
    folder: RunFolder | None,
    watch: Watch,
    forecast: Forecast,
) -> dict[str, Result | str]:
    """Runs algorithms that share a program, and records them if there is a folder.

    If there are other algorithms too, the ``forecast`` of all is shown.

    Returns:
        The result of each, or the message of one that has diverged.
    """
    first, problem, score = names[0], setup.problem, setup.score
    rounds, lost, note = setup.rounds[first], set[str](), ""
    seeds = [run["seed"] for run in problem.runs]
    folds = len(seeds) // len(setup.tables)
    tables = [table for table in setup.tables for _ in range(folds)]

    def record(name: str, evaluation: Evaluation) -> None:
        nonlocal note
        if not np.isfinite(evaluation.test_loss).all():
            lost.add(name)
        if folder is not None and name not in lost:
            folder.log(name, evaluation, problem.runs, tables, setup.task, problem.names)
        lacks_leaves = setup.algorithms[name].parts.exchange.own is not None
        scored = evaluation.personal if lacks_leaves else evaluation.test
        if scored is not None and name not in lost:
            value = float(mean_known(scored.reported[score]))
            shown = f"{100 * value:.1f} %" if setup.task.metrics[score].percent else digits(value)
            note = f"{score} {shown}"

    def progress(done: int) -> None:
        advance(done)
        whole = (
            f"{forecast} in all" if len(names) < len(config.algorithms) and str(forecast) else ""
        )
        tell(done, ", ".join(filter(None, (note, whole))))
        if done >= saved:  # the records of a checkpoint are written again first
            STOPPING.check(largest_of_all)

    def ready(held: int) -> None:
        STOPPING.patient = True
        tell(saved, f"{held / MB:,.0f} MB a device")

    checkpoints = checkpoints_of(first, config, folder)
    saved = 0 if checkpoints is None else min(rounds, rounds_saved(checkpoints))
    common: dict[str, Any] = {
        "rounds": rounds,
        "on_compiled": ready,
        "on_rounds": progress,
        "checkpoints": checkpoints,
    }
    experiment = setup.experiment(first)
    with (
        watch(names, rounds, saved) as tell,
        forecast.program(names, rounds, saved) as advance,
    ):
        STOPPING.patient = False  # compiling may take minutes, and nothing would be lost
        STOPPING.check(largest_of_all)
        if len(names) == 1:
            validated = problem.validates_own
            stop = ending.rule(config.ending, score, experiment.algorithm, validated=validated)
            on_evaluation = functools.partial(record, first)
            return {first: experiment.run(on_evaluation=on_evaluation, stop=stop, **common)}
        results = run_candidates(
            candidates(names, config, setup),
            experiment,
            on_evaluation=lambda place, evaluation: record(names[place], evaluation),
            **common,
        )
    outcomes = (divergence(result, seeds) or result for result in results)
    return dict(zip(names, outcomes, strict=True))


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
