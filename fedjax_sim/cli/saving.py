"""Saves results of Python as run folders."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedjax_sim.cli.folder import FORMAT, RunFolder, checkpoints_in
from fedjax_sim.cli.summary import entry_of
from fedjax_sim.partition import partition_hash
from fedjax_sim.partition.measures import labelled_emd
from fedjax_sim.run import Result
from fedjax_sim.run.checkpoint_files import write_server_model
from fedjax_sim.run.environment import environment
from fedjax_sim.run.identity import random_settings
from fedjax_sim.run.provenance import Provenance

COMPOSED = "composed in Python"
"""Stands in the place of the command that made a folder."""


def save_run(
    folder: str | Path,
    results: Mapping[str, Result],
    *,
    dataset: str | None = None,
    partition: str | None = None,
    score: str | None = None,
) -> None:
    """Saves results as a run folder, as the command writes it.

    ``python -m fedjax_sim.report`` reads the folder, and compares it with folders of the command if
    the data set and the partition have the same names. The folder has the numbers and the server's
    weights. It cannot be resumed, because it has no command.

    Args:
        folder: a new or empty folder.
        results: results by the names of their methods, all of the same seeds, clients and task.
        dataset: name of the data set; None: a fingerprint of its targets.
        partition: name of the partition; None: "own partition".
        score: the score of tables and of the selection of settings; None: the task's.

    Raises:
        ValueError: if the folder is not empty, the results cannot share a folder, or the score is
          unknown.
        OSError: if a file cannot be written.

    Example:
        >>> import tempfile, optax, fedjax_sim as fs
        >>> problem = fs.toy()
        >>> local = fs.local_sgd(problem.objective, optax.sgd(0.1))
        >>> result = fs.simulate(fs.fedavg(local, clients_per_round=5), problem.model, problem.data,
        ...                      problem.test, rounds=2, classes=10, seeds=(0, 1))
        >>> out = tempfile.mkdtemp()
        >>> fs.save_run(out, {"FedAvg": result}, dataset="digits")
        >>> run = fs.load_run(out, model=problem.model)
        >>> run.algorithms, len(run.to_pandas()), run.variables("FedAvg")
        (('FedAvg',), 4, Variables(params=<2 arrays, 1,300 numbers>))
    """
    target, summary = write_records(
        Path(folder), results, dataset=dataset, partition=partition, score=score
    )
    try:
        for name, result in results.items():
            if result.variables is not None:
                ends = [evaluation.round for evaluation in result.evaluations]
                write_server_model(checkpoints_in(target.path, name), ends, result.variables)
        target.write_summary(summary, results)
        first = next(iter(results.values()))
        target.draw_results(summary, results, score or first.task.score, dataset or "")
    finally:
        target.close()


def write_records(
    path: Path,
    results: Mapping[str, Result],
    *,
    dataset: str | None,
    partition: str | None,
    score: str | None,
) -> tuple[RunFolder, dict[str, Any]]:
    """Writes the settings and the records of results.

    Returns:
        The folder, which the caller closes, and its summary, which is not written yet.
    """
    check_named(results)
    check_alike(results)
    first = next(iter(results.values()))
    task, about = first.task, {**environment(COMPOSED), "devices": first.provenance.devices}
    if taken := [name for name in results if name in about]:
        raise ValueError(f"{taken[0]!r} cannot name a result, as summary.json has it: rename it")
    score = task.score if score is None else score
    if score not in task.metrics:
        raise ValueError(f"score must be one of {', '.join(task.metrics)}, got {score!r}")
    settings = settings_of(results, dataset, partition, score)
    try:
        target = RunFolder(path, settings)
    except ValueError as error:
        raise ValueError(str(error).replace("--out", "folder", 1)) from error
    try:
        for name, result in results.items():
            tables, origin = result.provenance.tables(result.task), result.provenance
            names: list[tuple[str, ...]] = [()] * len(origin.seeds)
            for evaluation in result.evaluations:
                target.log(name, evaluation, origin.runs, tables, result.task, names)
        summary = {name: summary_of(result, score) for name, result in results.items()}
    except BaseException:
        target.close()
        raise
    return target, {**summary, **about}


def check_named(results: Mapping[str, Result]) -> None:
    """Raises ValueError unless there are results by name, each with an evaluation."""
    if not isinstance(results, Mapping) or not results:
        raise ValueError(
            f"results must be results by name, as {{'FedAvg': result}}, got {results!r}"
        )
    for name, result in results.items():
        check_text(name)
        if not isinstance(result, Result) or not result.evaluations:
            raise ValueError(f"{name} must be a Result with an evaluation, got {result!r}")


def check_text(name: Any) -> None:
    """Raises ValueError unless a result or a column is named by a text."""
    if not isinstance(name, str):
        raise ValueError(f"names must be texts, got {name!r}: use '{name}'")


def check_alike(results: Mapping[str, Result]) -> None:
    """Raises ValueError unless the results are of the same runs and task; names what differs."""
    (first, one), *others = results.items()
    for name, other in others:
        ours, theirs = one.provenance, other.provenance
        same = {
            "task": repr(one.task) == repr(other.task),
            "seeds": ours.seeds == theirs.seeds,
            "data": ours.samples == theirs.samples,
            "partition": _hashes(ours) == _hashes(theirs),
        }
        if not all(same.values()):
            what = next(key for key, equal in same.items() if not equal)
            raise ValueError(
                f"results must be of one task, data set, partition and list of seeds, and {name} "
                f"has another {what} than {first}: save it in a folder of its own"
            )


def settings_of(
    results: Mapping[str, Result], dataset: str | None, partition: str | None, score: str
) -> dict[str, Any]:
    """Returns the settings of results, for ``config.json``."""
    first, *others = results
    result, origins = results[first], [result.provenance for result in results.values()]
    task, origin, hashes = result.task, origins[0], _hashes(origins[0])
    by_client = result.evaluations[-1].test.by_client is not None
    folds, sampler = _folds(origin), "own partition" if partition is None else partition
    return {
        "format": FORMAT,
        "composed": True,
        "algo": first,
        "compare": others,
        "options": {name: {"composition": r.provenance.algorithm} for name, r in results.items()},
        "dataset": f"data {origin.samples[:8]}" if dataset is None else dataset,
        "partition": sampler,
        "clients": origin.start.shape[-1] - 1,
        "clients_per_round": origin.clients_per_round,
        "rounds": max(map(_fedavg_rounds, origins)),
        "seeds": [*dict.fromkeys(origin.seeds)],
        "split": "clients" if folds else "holdout" if by_client else "official",
        "folds": folds,
        "test_clients": None,
        "adapt": None,
        "test_fraction": None,
        "validation": None,
        "standardise": None,
        "task": repr(task),
        "score": score,
        "metric": task.metrics[score]._asdict(),
        "programs": [[name] for name in results],
        "partitions": [sampler] * len(hashes),
        "partition_hashes": hashes,
        "jax": random_settings(),
        "arguments": [f"# {COMPOSED}"],
    }


def summary_of(result: Result, score: str) -> dict[str, Any]:
    """Returns the entry of a result in ``summary.json``, without fields that need a command."""
    origin, task = result.provenance, result.task
    models = 2.0 * origin.clients_per_round * _fedavg_rounds(origin)  # down and up
    return entry_of(
        result,
        score=score,
        seeds=len({*origin.seeds}),
        fedavg_bytes=models * result.model_bytes,
        clients=origin.start.shape[-1] - 1,
        emd=None if task.classes is None else labelled_emd(origin.tables(task)),
    )


def _fedavg_rounds(origin: Provenance) -> int:
    """Returns the rounds of FedAvg with which a result is compared."""
    return max(1, round(origin.rounds / origin.round_factor))


def _folds(origin: Provenance) -> int | None:
    """Returns the number of runs of each seed; None for one."""
    seeds = [*dict.fromkeys(origin.seeds)]
    folds = len(origin.seeds) // len(seeds)
    if origin.seeds != tuple(seed for seed in seeds for _ in range(folds)):
        raise ValueError(
            "seeds must have equally many runs each, one after another, as in (0, 0, 1, 1), got "
            f"{origin.seeds}"
        )
    return folds if folds > 1 else None


def _hashes(origin: Provenance) -> list[str]:
    """Returns the hash of the partition of each seed, or one hash if all runs share it."""
    found = [partition_hash(partition) for partition in origin.partitions]
    if origin.start.ndim == 1:
        return found[:1]
    folds = _folds(origin)
    if folds is None:
        return found
    parts = ("".join(found[i : i + folds]) for i in range(0, len(found), folds))
    return [hashlib.sha256(part.encode()).hexdigest() for part in parts]
