"""``python -m fedjax_sim.bench``: one algorithm beside others, a table and a folder of results."""

from __future__ import annotations

import dataclasses
import importlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from numpy.typing import NDArray

from fedjax_sim import privacy, report, tree
from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.augment import thesis
from fedjax_sim.base import Algorithm, ClientData, MissingRootError, Model, Transform
from fedjax_sim.commands import complain, enter, new_folder
from fedjax_sim.config import Config, parameters, parse
from fedjax_sim.data import Dataset, cache_dir, load_dataset
from fedjax_sim.execution import Execution, make_execution
from fedjax_sim.experiment import trace_round
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

    @property
    def emd(self) -> float:
        """Measured, mean over seeds."""
        return float(np.mean([emd(table) for table in self.tables]))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        argv: its arguments; None for those of this process.

    Returns:
        The exit status: 0, 1 if a loss diverged, 2 for bad input, 130 for Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    folder: report.RunFolder | None = None
    try:
        try:
            config = parse(argv)
            start_jax(config)
            setup = build(config)
            folder = open_folder(config, setup)
        except BrokenPipeError:
            raise
        except (ValueError, OSError, ImportError) as error:
            return complain(PROGRAM, f"error: {error}", 2)
        diverged = run(config, setup, folder, shlex.join(["python", "-m", PROGRAM, *argv]))
        for name, message in diverged.items():
            complain(PROGRAM, f"error: {name}: {message}{_kept(folder)}", 1)
    except KeyboardInterrupt:
        return complain(PROGRAM, f"stopped{_kept(folder)}", 130)
    finally:
        if folder is not None:
            folder.close()
    return 1 if diverged else 0


def _kept(folder: report.RunFolder | None) -> str:
    if folder is None or not folder.recorded:
        return "; nothing was recorded"
    return f"; the records so far are in {folder.path}"


def start_jax(config: Config) -> None:
    """Sets what must be set before JAX starts; where it has, its devices stay as they are.

    No more devices than cores: they would wait for each other.
    """
    settings: Any = jax.config  # untyped
    cores = available_cores()
    with suppress(RuntimeError):
        settings.update("jax_num_cpu_devices", min(config.devices or cores, cores))
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
    check_steps(config, problem.data)
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
        algorithms=make_algorithms(config, model, dataset, problem.data, per_round, execution),
        clients_per_round=per_round,
        model_bytes=tree.num_bytes(variables),
    )


def check_steps(config: Config, data: ClientData) -> None:
    """Raises ValueError if no client would take a step."""
    largest = int(np.max(np.diff(data.start) if data.budget is None else data.budget))
    spare = 0 if config.last_batch == "drop" else config.batch_size - 1
    batches = (largest + spare) // config.batch_size
    if not batches:
        raise ValueError(
            f"--batch-size {config.batch_size} leaves --last-batch drop no minibatch: the largest "
            f"client has {largest} samples"
        )
    if round(config.epochs * batches) < 1:
        raise ValueError(
            f"--epochs {config.epochs:g} is no step for any client: one of the largest client is "
            f"{1 / batches:.2g} epochs"
        )


def make_algorithms(
    config: Config,
    model: Model,
    dataset: Dataset,
    data: ClientData,
    per_round: int,
    execution: Execution,
) -> dict[str, Algorithm]:
    """The algorithms by name, all with one local update, each checked against the clients' data.

    Raises:
        ValueError: if a setting is out of range, or the data lack what an algorithm needs; names
          the flag.
    """
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
            trace_round(made[name], model, data)
        except MissingRootError as error:
            raise ValueError(
                f"{name}: --server-fraction must be given: it needs samples of the server's own"
            ) from error
        except ValueError as error:
            message = str(flagged(error, keywords(function)))
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
    return (thesis(x.shape[1:], white=float(x.max()), mirror=config.mirror),)


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
    """Makes the run folder, with the settings."""
    path = new_folder(config.dataset, config.algo) if config.out is None else Path(config.out)
    settings = dataclasses.asdict(config)
    del settings["data_dir"], settings["out"]  # places on this machine say nothing of the run
    settings |= {
        "clients": setup.clients,
        "clients_per_round": setup.clients_per_round,
        "partitions": [p.name for p in setup.partitions],
        "partition_hashes": [partition_hash(p) for p in setup.partitions],
    }
    return report.RunFolder(path, settings)


def draw_clients(config: Config, setup: Setup, path: Path) -> None:
    """Draws who has how many samples of each class, for up to four seeds."""
    shown = setup.tables[: min(4, len(setup.partitions))]
    one_for_all = len(setup.partitions) < len(config.seeds)
    titles = ["all seeds"] if one_for_all else [f"seed {s}" for s in config.seeds[: len(shown)]]
    draw_partition(shown, path, titles)


def run(config: Config, setup: Setup, folder: report.RunFolder, command: str) -> dict[str, str]:
    """Runs every algorithm, records it and prints the table.

    Returns:
        The algorithms whose loss diverged, and what is to be said of each.
    """
    draw_clients(config, setup, folder.path / "clients.png")
    common = {
        "versions": report.versions(),
        "devices": [str(d) for d in setup.execution.devices],
        "command": command,
    }
    results: dict[str, Result] = {}
    summaries: dict[str, dict[str, Any]] = {}
    diverged: dict[str, str] = {}
    for name in config.algorithms:
        try:
            results[name] = run_one(name, config, setup, folder)
        except DivergedError as error:
            diverged[name] = str(error)
            summaries[name] = {"diverged": diverged[name]}
        else:
            summaries[name] = summarise(name, results[name], config, setup)
        folder.summarise({**summaries, **common}, results, config.score)
    if results:
        show(config, setup, summaries)
        print(f"\nrecords and pictures: {folder.path}")
    return diverged


def summarise(name: str, result: Result, config: Config, setup: Setup) -> dict[str, Any]:
    """What ``summary.json`` says of one algorithm; of DP-FedAvg ε and δ too."""
    summary = report.summarise(
        result,
        score=config.score,
        seeds=len(config.seeds),
        # FedAvg's cohort travels down and up once in each of its rounds.
        fedavg_bytes=2.0 * setup.clients_per_round * config.rounds * setup.model_bytes,
        clients=setup.clients,
        emd=setup.emd,
    )
    if name == "dp_fedavg":
        summary |= privacy_spent(config, setup, summary["rounds"])
    return summary


def privacy_spent(config: Config, setup: Setup, rounds: int) -> dict[str, Any]:
    """ε of a client's privacy in one run of DP-FedAvg at δ = 1/N, or why it is not known."""
    settings = {key: p.default for key, p in parameters("dp_fedavg").items()}
    settings |= config.options["dp_fedavg"]
    clients = setup.problem.data.start.shape[-1] - 1
    try:
        spent = privacy.epsilon(
            settings["noise_multiplier"],
            clients=clients,
            clients_per_round=setup.clients_per_round,
            rounds=rounds,
            delta=1 / clients,
            sampling=settings["sampling"],
        )
    except (ImportError, ValueError) as error:  # not installed; a single client has no δ below 1
        return {"epsilon_unknown": str(error)}
    return {"epsilon": spent, "delta": 1 / clients}


def show(config: Config, setup: Setup, summaries: Mapping[str, Mapping[str, Any]]) -> None:
    """Prints what has run and the table."""
    devices = setup.execution.devices
    print(
        f"{config.dataset}, {config.model}: {setup.clients} clients, {setup.clients_per_round} a "
        f"round, EMD {setup.emd:.2f}; {config.rounds} rounds, {config.epochs:g} epochs, "
        f"{len(config.seeds)} seeds; {len(devices)} x {devices[0].device_kind}"
        f"\nscore: {config.score}, {setup.problem.scored}{_prepared(config, setup)}\n"
    )
    print(report.table(summaries))
    for name, s in summaries.items():
        if "epsilon" in s:
            print(
                f"\n{name}: a run is (ε, δ)-private for each client, ε = {s['epsilon']:.3g} at "
                f"δ = 1/N = {s['delta']:.3g}"
            )
        elif "epsilon_unknown" in s:
            print(f"\n{name}: ε is not known: {s['epsilon_unknown']}")
    personal = [n for n in config.algorithms if setup.algorithms[n].personal is not None]
    if personal and config.split != "holdout":
        print(f"\n--split holdout also scores the clients' own models of {', '.join(personal)}")


def _prepared(config: Config, setup: Setup) -> str:
    """What became of the clients' training samples where they are shared or copied."""
    data, trained = setup.problem.data, setup.problem.trained
    if not any(p.repeats for p in trained):
        return ""
    tables = [label_table(data.y, p, setup.classes) for p in trained]
    copied = float(np.mean([np.mean(p.index >= len(data.y)) for p in trained]))
    shared = float(np.mean([_common(p, len(data.y)) for p in trained]))
    lacking = np.mean([np.sum(t == 0) for t in tables])
    reached = np.mean([emd(t) for t in tables])
    lines = [
        f"\nclients train at EMD {reached:.2f}: {_percent(copied)} of their samples are copies, "
        f"{_percent(shared)} are shared",
        f"pairs of client and class without a sample: {lacking:g} of {tables[0].size} (mean over "
        "seeds)",
    ]
    if config.fedaug is not None and not copied:
        lines.append(f"no copies: no client above --fedaug {config.fedaug:g} has samples to copy")
    return "\n".join(lines)


def _common(partition: Partition, samples: int) -> float:
    """The part of the clients' samples that another client has too."""
    own = partition.index[partition.index < samples]
    return float(np.sum(np.bincount(own)[own] > 1) / len(partition.index))


def _percent(part: float) -> str:
    """Two digits at least, unless it is nothing."""
    return f"{100 * part:.0f} %" if part >= 0.1 else f"{100 * part:.2g} %"


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
    enter(main)
