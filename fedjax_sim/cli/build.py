"""Builds data, model and algorithms from settings, and checks them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import ClientData, Model, Task, calls
from fedjax_sim.base.registry import error_text
from fedjax_sim.cli import adapting, attacking, dealing
from fedjax_sim.cli.algorithms import Methods
from fedjax_sim.cli.config import Config
from fedjax_sim.cli.defaults import model_for
from fedjax_sim.cli.ending import check_target
from fedjax_sim.cli.flags import flagging, naming
from fedjax_sim.cli.machine import ON_HOST
from fedjax_sim.cli.methods import name_of
from fedjax_sim.cli.preparing import augmentations, without_labels
from fedjax_sim.cli.problem import Problem, make_problem, population
from fedjax_sim.cli.training import Precision, rounds_of
from fedjax_sim.data import Dataset, DataSummary, streamed, summary
from fedjax_sim.data.folder import downloading
from fedjax_sim.engine.execution import Execution, make_execution
from fedjax_sim.models import MODELS, SCALES_ITSELF, with_compute_dtype, with_scaling
from fedjax_sim.models.factories import model_of, with_settings
from fedjax_sim.partition import Partition, label_table
from fedjax_sim.partition.measures import labelled_emd
from fedjax_sim.round import Algorithm
from fedjax_sim.run import check_model
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.provenance import client_privacy_of, privacy_of
from fedjax_sim.tasks import scoring


@dataclasses.dataclass(frozen=True)
class Setup:
    """Data, model and algorithms of a run, built and checked.

    Attributes:
        config: the settings.
        task: the learning task.
        score: the score that tables show.
        class_names: names of the classes, empty if the data have none.
        about: description of the data set, the training clients and the scored samples.
        model: a model of the problem's samples.
        model_name: the requested model, or one that fits the samples.
        sampler: the text of the partition.
        partitions: one per seed, or one for all.
        tables: samples per client and class, ``int64[N, M]``, one per seed; without classes M is 1.
        problem: training and test samples.
        execution: devices and chunks.
        algorithms: by name.
        programs: their names, grouped by program.
        rounds: by algorithm: some have fewer or more for the same budget.
        methods: makes the algorithms, also with other values of their settings.
        clients_per_round: m, the same for all algorithms.
        model_bytes: bytes of one model, without adapters.
    """

    config: Config
    task: Task
    score: str
    class_names: tuple[str, ...]
    about: DataSummary
    model: Model
    model_name: str
    sampler: str
    partitions: list[Partition]
    tables: list[NDArray[np.int64]]
    problem: Problem
    execution: Execution
    algorithms: dict[str, Algorithm]
    programs: list[list[str]]
    rounds: dict[str, int]
    methods: Methods
    clients_per_round: int
    model_bytes: int

    @property
    def clients(self) -> int:
        """Returns N."""
        return len(self.tables[0])

    @property
    def emd(self) -> float | None:
        """Returns the measured EMD, the mean over seeds; None without classes or labels."""
        return None if self.task.classes is None else labelled_emd(self.tables)

    def experiment(self, name: str) -> Experiment:
        """Returns the experiment of an algorithm."""
        return self.methods.experiment(self.algorithms[name])


def build(config: Config) -> Setup:
    """Builds and checks data, model and algorithms."""
    experiment, training = config.experiment, config.training
    machine, split = config.machine, config.scores.split
    with flagging("devices", "chunk", "lanes", *ON_HOST, "model_devices"):
        execution = make_execution(
            machine.devices,
            machine.chunk,
            lanes=machine.lanes,
            samples_mb=machine.samples_mb,
            client_state_mb=machine.client_state_mb,
            model_devices=machine.model_devices,
        )
    with downloading(not machine.dry_run and machine.resume is None):
        loaded = experiment.load()
    natural = dealing.takes_owners(experiment.partition, loaded)
    fraction = config.scores.test_fraction
    dataset = population(loaded, split, natural=natural, test_fraction=fraction)
    task = attacking.scored(config.attack, dataset.task)
    score = task.score if config.scores.score is None else config.scores.score
    with flagging("score"):
        task = scoring(task, score)
    deal = dealing.choose(
        experiment.partition, experiment.clients, dataset, experiment.seeds, flag="--partition"
    )
    partitions = dealing.make_partitions(experiment, deal, split, dataset)
    with flagging("clients", "folds", "standardise"):
        problem = make_problem(config, dataset, partitions)
    sets = {"test": problem.test, "validation": problem.validation}
    problem = problem._replace(
        **attacking.poisoned(config.attack, problem.data, sets, task.classes)
    )
    task, data, labels = without_labels(config.preparation, task, problem.data)
    problem = problem._replace(data=data)
    if (each := experiment.samples_per_round) is not None:
        with flagging("samples_per_round"):
            problem = problem._replace(data=streamed(problem.data, each))
    if problem.scaled:
        dataset = dataset._replace(mean=None, std=None)
    name = model_for(dataset) if training.model is None else training.model

    def adapt(net: Model) -> Model:
        return adapting.adapted(adapting.started(net, config.weights), config.weights)

    model = load_model(name, dataset, training.precision, adapt)
    trained = problem.data.clients
    per_round = experiment.clients_per_round or _active(config, trained)
    if per_round > trained:
        raise ValueError(f"--clients-per-round must be in 1..{trained}, got {per_round}")
    tables = [label_table(dataset.strata, p, task.classes or 1) for p in partitions]
    transforms = augmentations(config.preparation, dataset)
    methods = Methods(config, model, task, problem, transforms, per_round, execution)
    algorithms = {name: methods.algorithm(name, config) for name in config.algorithms}
    for method, made in algorithms.items():
        if config.machine.keep_weights and made.parts.flight.evaluated == "in_flight":
            raise ValueError(
                f"--keep-weights keeps the server's model, and {method} is scored by the mean of "
                "its models in flight: add --evaluated server"
            )
    if config.scores.delta is not None:
        _check_delta(config.scores.delta, algorithms, problem.data)
    check_target(config.ending, task, score, algorithms, own=problem.scores_own)
    return Setup(
        config=config,
        task=task,
        score=score,
        class_names=dataset.strata_names,
        about=summary(loaded)._replace(
            clients=dealing.describe(deal, loaded, partitions[0]) + labels, scored=problem.scored
        ),
        model=model,
        model_name=name,
        sampler=deal.text,
        partitions=partitions,
        tables=tables if len(tables) > 1 else tables * len(experiment.seeds),
        problem=problem,
        execution=execution,
        algorithms=algorithms,
        programs=methods.programs(algorithms),
        rounds={name: rounds_of(made, experiment.rounds) for name, made in algorithms.items()},
        methods=methods,
        clients_per_round=per_round,
        model_bytes=adapting.trunk_bytes(model, config.weights),
    )


def _check_delta(delta: float, algorithms: Mapping[str, Algorithm], data: ClientData) -> None:
    """Raises ValueError if δ promises nothing, or no algorithm is private."""
    limits = [(data.clients, "1/N", "")]
    for method, made in algorithms.items():
        if made.parts.local.private:
            limits.append((data.capacity, "1/n_k", f" of the largest client for {method}"))
    for count, symbol, whose in limits:
        if not delta < 1 / count:
            raise ValueError(
                f"--delta must be below {symbol} = {1 / count:.3g}{whose}, or it promises nothing, "
                f"got {delta:g}"
            )
    if all(
        privacy_of(made, data) is client_privacy_of(made, data) is None
        for made in algorithms.values()
    ):
        raise ValueError(
            f"--delta is for private methods, such as dp_fedavg, not {' and '.join(algorithms)}"
        )


def _active(config: Config, clients: int) -> int:
    """Returns the number of clients, less one if phase shift has two groups and it is odd."""
    halved = any(
        name_of(name) == "phase_shift" and "phases" not in config.options[name]
        for name in config.algorithms
    )
    return max(clients - clients % 2, 1) if halved else clients


def load_model(
    name: str,
    dataset: Dataset,
    precision: Precision = "f32",
    adapt: Callable[[Model], Model] = lambda net: net,
) -> Model:
    """Returns a model of ``MODELS``, or ``package.module:factory``, that scales its inputs.

    It is checked against the data; ``adapt`` changes it before its weights are cast.
    """
    call = calls.as_call(calls.parse(name), name)
    key, made = MODELS.resolve(call.name)
    try:
        made = with_settings(made, call)
        given = model_of(made, dataset.train_x.shape[1:], dataset.task.outputs)
    except Exception as error:  # a factory may raise anything
        raise ValueError(f"--model {name}: {error_text(error)}") from error
    given = adapt(given)
    if precision != "f32":
        given = with_compute_dtype(given, jnp.bfloat16)
    if key not in SCALES_ITSELF and dataset.mean is not None and dataset.std is not None:
        given = with_scaling(given, dataset.mean, dataset.std)
    with naming(f"--model {name}"):
        check_model(given, dataset.train_x, dataset.train_y, dataset.task)
    return given
