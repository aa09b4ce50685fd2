"""``python -m fedjax_sim.bench``: one algorithm beside others, a table and a folder of results."""

from __future__ import annotations

import dataclasses
import importlib
import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from numpy.typing import NDArray

from fedjax_sim import report, tree
from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.augment import thesis
from fedjax_sim.base import Algorithm, MissingRootError, Model, Transform
from fedjax_sim.commands import complain, new_folder
from fedjax_sim.config import Config, parse
from fedjax_sim.data import Dataset, cache_dir, load_dataset
from fedjax_sim.execution import Execution, make_execution
from fedjax_sim.flags import flag, flagged, keywords
from fedjax_sim.local import local_sgd
from fedjax_sim.metrics import mean_known
from fedjax_sim.models import MODELS, SCALES_ITSELF, from_linen, with_scaling
from fedjax_sim.objective import empirical_risk
from fedjax_sim.partition import Partition, draw_partition, emd, label_table, partition_hash
from fedjax_sim.problem import Problem, make_partitions, make_problem, population
from fedjax_sim.simulate import DivergedError, Evaluation, Result, check_model, simulate

PROGRAM = "fedjax_sim.bench"


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything that runs, built and checked.

    Attributes:
        classes: M.
        model: takes the samples as the problem has them.
        partitions: one per seed, or one for all.
        tables: samples per client and class, ``int64[N, M]``, one per seed.
        problem: what trains and what is scored.
        execution: devices and chunks.
        algorithms: by name.
        clients_per_round: of all of them.
        model_bytes: bytes of one model.
    """

    classes: int
    model: Model
    partitions: list[Partition]
    tables: list[NDArray[np.int64]]
    problem: Problem
    execution: Execution
    algorithms: dict[str, Algorithm]
    clients_per_round: int
    model_bytes: int

    @property
    def clients(self) -> int:
        """N."""
        return len(self.tables[0])


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its arguments; None for those of this process.

    Returns:
        The exit status: 0, 1 for a loss that diverged, 2 for bad input, 130 for Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    folder: report.RunFolder | None = None
    try:
        try:
            config = parse(argv)
            start_jax(config)
            setup = build(config)
            folder = open_folder(config, setup)
        except (ValueError, OSError, ImportError) as error:
            return complain(PROGRAM, f"error: {error}", 2)
        run(config, setup, folder, shlex.join(["python", "-m", PROGRAM, *argv]))
    except MissingRootError as error:
        return complain(PROGRAM, f"error: --server-fraction must be given: {error}", 2)
    except DivergedError as error:
        return complain(PROGRAM, f"error: {error}{_kept(folder)}", 1)
    except KeyboardInterrupt:
        return complain(PROGRAM, f"stopped{_kept(folder)}", 130)
    finally:
        if folder is not None:
            folder.close()
    return 0


def _kept(folder: report.RunFolder | None) -> str:
    return "" if folder is None else f"; the records so far are in {folder.path}"


def start_jax(config: Config) -> None:
    """Sets what must be set before JAX starts; where it has, its devices stay as they are."""
    settings: Any = jax.config  # untyped
    with suppress(RuntimeError):
        settings.update("jax_num_cpu_devices", config.devices or available_cores())
    if config.cache and settings.jax_compilation_cache_dir is None:
        settings.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
        settings.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def available_cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def build(config: Config) -> Setup:
    """Everything that the run needs.

    Raises:
        ValueError: if the settings fit neither each other nor the data.
        DataNotFoundError: if the data set is not there.
    """
    try:
        execution = make_execution(config.devices, config.chunk)
    except ValueError as error:
        raise flagged(error, ["devices", "chunk"]) from error
    dataset = population(load_dataset(config.dataset, config.data_dir), config.split)
    partitions = make_partitions(config, dataset)
    try:
        problem = make_problem(config, dataset, partitions)
    except ValueError as error:
        raise flagged(error, ["clients", "folds", "standardise"]) from error
    if problem.scaled:
        dataset = dataset._replace(mean=None, std=None)
    model = load_model(config.model, dataset)
    tables = [label_table(dataset.train_y, p, dataset.classes) for p in partitions]
    trained = problem.data.start.shape[-1] - 1
    per_round = trained if config.clients_per_round is None else config.clients_per_round
    if per_round > trained:
        raise ValueError(f"--clients-per-round must be in 1..{trained}, got {per_round}")
    variables = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    return Setup(
        classes=dataset.classes,
        model=model,
        partitions=partitions,
        tables=tables if len(tables) > 1 else tables * len(config.seeds),
        problem=problem,
        execution=execution,
        algorithms=make_algorithms(config, model, dataset, per_round, execution),
        clients_per_round=per_round,
        model_bytes=tree.num_bytes(variables),
    )


def make_algorithms(
    config: Config, model: Model, dataset: Dataset, per_round: int, execution: Execution
) -> dict[str, Algorithm]:
    """The algorithms by name, all with one local update."""
    objective = empirical_risk(model, l2=config.l2)
    local = local_sgd(
        objective,
        optax.sgd(config.lr, momentum=config.momentum or None),
        config.batch_size,
        config.epochs,
        config.last_batch,
        transforms=augmentations(config, dataset),
    )
    made = {}
    for name in config.algorithms:
        function, options = ALGORITHMS[name], dict(config.options[name])
        common = {
            "objective": objective,
            "classes": dataset.classes,
            "lr": config.lr,
            "momentum": config.momentum,
        }
        options |= {key: common[key] for key in common if key in keywords(function)}
        options |= {"clients_per_round": per_round, "execution": execution}
        try:
            made[name] = function(local, **options)
        except ValueError as error:
            message = str(flagged(error, options))
            given = [f"{flag(key)} {value}" for key, value in config.options[name].items()]
            where = [name] if message.startswith("--") else [name, *given]
            raise ValueError(f"{' '.join(where)}: {message}") from error
    return made


def augmentations(config: Config, dataset: Dataset) -> tuple[Transform, ...]:
    """What alters the copies of FedAug and rebalancing.

    Raises:
        ValueError: if the data are no images; names the flag.
    """
    asked = [name for name in ("fedaug", "rebalance") if getattr(config, name) is not None]
    if not asked:
        return ()
    x = dataset.train_x
    if x.dtype != np.uint8 or x.ndim != 4 or x.shape[-1] not in (1, 3):
        raise ValueError(
            f"{flag(asked[0])} is for images, uint8 [n, H, W, 1 or 3]; {dataset.name} has "
            f"{x.dtype} {list(x.shape)}"
        )
    return (thesis(x.shape[1:], white=float(x.max())),)


def load_model(name: str, dataset: Dataset) -> Model:
    """A model by its name or place, checked against the data, that scales its inputs.

    Args:
        name: a key of ``MODELS``, or ``package.module:factory``: ``factory(shape, classes)`` gives
          a Model or a flax.linen module; it may also be such a module itself.
        dataset: gives shape, classes and scale.

    Raises:
        ValueError: if there is no such model, or it does not fit the data.
    """
    shape, classes = dataset.train_x.shape[1:], dataset.classes
    made = MODELS[name] if name in MODELS else _imported(name)
    if not isinstance(made, Model | nn.Module):
        try:
            made = made(shape, classes)
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ValueError(f"--model {name}: factory(shape, classes) raised: {error}") from error
    if isinstance(made, nn.Module):
        made = from_linen(made, shape)
    if not isinstance(made, Model):
        raise ValueError(
            f"--model {name} must give a Model or a flax.linen module, got {type(made).__name__}"
        )
    scaled = name in SCALES_ITSELF
    if not scaled and dataset.mean is not None and dataset.std is not None:
        made = with_scaling(made, dataset.mean, dataset.std)
    try:
        check_model(made, dataset.train_x, classes)
    except ValueError as error:
        raise ValueError(f"--model {name}: {error}") from error
    return made


def _imported(name: str) -> Any:
    place, _, attribute = name.partition(":")
    if not place or not attribute:
        raise ValueError(
            f"--model {name!r} is not known: use one of {', '.join(MODELS)}, "
            "or package.module:factory"
        )
    try:
        return getattr(importlib.import_module(place), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--model {name}: {error}") from error


def open_folder(config: Config, setup: Setup) -> report.RunFolder:
    """Makes the run folder, with the settings and the picture of the clients."""
    path = new_folder(config.dataset, config.algo) if config.out is None else Path(config.out)
    settings = dataclasses.asdict(config) | {
        "clients": setup.clients,
        "clients_per_round": setup.clients_per_round,
        "partitions": [p.name for p in setup.partitions],
        "partition_hashes": [partition_hash(p) for p in setup.partitions],
    }
    folder = report.RunFolder(path, settings)
    shown = setup.tables[: min(4, len(setup.partitions))]
    one_for_all = len(setup.partitions) < len(config.seeds)
    titles = ["all seeds"] if one_for_all else [f"seed {s}" for s in config.seeds[: len(shown)]]
    draw_partition(shown, path / "clients.png", titles)
    return folder


def run(config: Config, setup: Setup, folder: report.RunFolder, command: str) -> None:
    """Runs every algorithm, records it and prints the table."""
    distance = float(np.mean([emd(t) for t in setup.tables]))
    devices = [str(d) for d in setup.execution.devices]
    kind = setup.execution.devices[0].device_kind
    # FedAvg's cohort travels down and up once in each of its rounds.
    fedavg_bytes = 2.0 * setup.clients_per_round * config.rounds * setup.model_bytes
    results: dict[str, Result] = {}
    summaries: dict[str, dict[str, Any]] = {}
    for name in config.algorithms:
        result = run_one(name, config, setup, folder)
        results[name] = result
        summaries[name] = report.summarise(
            result,
            score=config.score,
            seeds=len(config.seeds),
            fedavg_bytes=fedavg_bytes,
            clients=setup.clients,
            emd=distance,
        )
        common = {"versions": report.versions(), "devices": devices, "command": command}
        folder.summarise({**summaries, **common}, results, config.score)
    print(
        f"{config.dataset}, {config.model}: {setup.clients} clients, {setup.clients_per_round} a "
        f"round, EMD {distance:.2f}; {config.rounds} rounds, {config.epochs:g} epochs, "
        f"{len(config.seeds)} seeds; {len(devices)} x {kind}"
        f"\nscore: {config.score}, {setup.problem.scored}{_prepared(setup)}\n"
    )
    print(report.table(summaries))
    personal = [n for n in config.algorithms if setup.algorithms[n].personal is not None]
    if personal and config.split != "holdout":
        print(f"\n--split holdout also scores the clients' own models of {', '.join(personal)}")
    print(f"\nrecords and pictures: {folder.path}")


def _prepared(setup: Setup) -> str:
    """A line on the clients' training samples where they are shared or copied."""
    data, trained = setup.problem.data, setup.problem.trained
    if not any(p.repeats for p in trained):
        return ""
    tables = [label_table(data.y, p, setup.classes) for p in trained]
    copied = np.mean([np.mean(p.index >= len(data.y)) for p in trained])
    lacking = np.mean([np.sum(t == 0) for t in tables])
    return (
        f"\nclients train at EMD {np.mean([emd(t) for t in tables]):.2f}: "
        f"{100 * copied:.0f} % of their samples are copies; classes that clients lack: {lacking:g}"
    )


def run_one(name: str, config: Config, setup: Setup, folder: report.RunFolder) -> Result:
    """Runs one algorithm behind a progress bar."""
    from tqdm import tqdm

    algorithm, problem = setup.algorithms[name], setup.problem
    rounds = max(1, round(config.rounds * algorithm.tempo))
    # disable=None: no bar where stderr is a file.
    bar = tqdm(total=rounds, desc=name, unit="round", disable=None, postfix="compiling")

    def record(evaluation: Evaluation) -> None:
        folder.log(name, evaluation, problem.runs, setup.tables)
        score = float(mean_known(getattr(evaluation.test.reported, config.score)))
        bar.set_postfix_str(f"{config.score} {100 * score:.1f} %", refresh=False)
        bar.update(evaluation.round - bar.n)

    with bar:
        return simulate(
            algorithm,
            setup.model,
            problem.data,
            problem.test,
            rounds=rounds,
            classes=setup.classes,
            seeds=[run["seed"] for run in problem.runs],
            eval_every=min(config.eval_every, rounds),
            validation=problem.validation,
            auc=True if config.score == "auc" else None,
            personal=config.split == "holdout",
            execution=setup.execution,
            on_evaluation=record,
        )


if __name__ == "__main__":
    sys.exit(main())
