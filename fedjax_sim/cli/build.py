"""From settings to all that runs: data, model and algorithms, built and checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.algorithms import ALGORITHMS
from fedjax_sim.base import LocalUpdate, MissingRootError, Model, Task, calls
from fedjax_sim.base.registry import error_text
from fedjax_sim.base.signatures import keywords
from fedjax_sim.cli import adapting, attacking, dealing, parts, timing
from fedjax_sim.cli.config import Config
from fedjax_sim.cli.defaults import model_for
from fedjax_sim.cli.ending import check_target, screened
from fedjax_sim.cli.flags import flagged, flagging, naming
from fedjax_sim.cli.machine import ON_HOST
from fedjax_sim.cli.making import Common, make
from fedjax_sim.cli.methods import name_of
from fedjax_sim.cli.preparing import augmentations, without_labels
from fedjax_sim.cli.problem import Problem, make_problem, population
from fedjax_sim.cli.training import (
    Precision,
    Training,
    check_steps,
    make_local,
    rounds_of,
    scheduled,
)
from fedjax_sim.cli.written import parse_label
from fedjax_sim.client.objective import empirical_risk
from fedjax_sim.data import Dataset, DataSummary, streamed, summary
from fedjax_sim.data.folder import downloading
from fedjax_sim.engine.execution import Execution, make_execution
from fedjax_sim.engine.matching import ASSUMED
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
    """Everything that runs, built and checked.

    Attributes:
        task: the learning task.
        score: the one that tables show.
        class_names: of them, empty if the data have none.
        about: description of the data set, the training clients and the scored samples.
        model: takes the samples as the problem has them.
        model_name: the requested model, or one that fits the samples.
        sampler: the text of the partition.
        partitions: one per seed, or one for all.
        tables: samples per client and class, ``int64[N, M]``, one per seed; without classes M is 1.
        problem: training and test samples.
        execution: devices and chunks.
        algorithms: by name.
        rounds: by algorithm: some have fewer or more for the same budget.
        varied: an algorithm by its name, with other values of what it has been given.
        clients_per_round: of all of them.
        model_bytes: bytes of one model, without adapters.
    """

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
    rounds: dict[str, int]
    varied: Callable[..., Algorithm]
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

    def experiment(self, name: str, config: Config) -> Experiment:
        """Returns the experiment of an algorithm."""
        made = self.algorithms[name]
        return experiment_of(made, config, self.model, self.task, self.problem, self.execution)


def build(config: Config) -> Setup:
    """Builds and checks everything that the run needs."""
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
    objective = empirical_risk(model, task.loss, training.l2)
    transforms = augmentations(config.preparation, dataset)

    def local_of(training: Training, *, check: bool = True) -> LocalUpdate:
        local = adapting.local_of(make_local(training, objective, transforms), config.weights)
        if check:
            check_steps(training, local, problem.data)
        return local

    common_local = local_of(training)
    tables = [label_table(dataset.strata, p, task.classes or 1) for p in partitions]
    trained = problem.data.clients
    per_round = experiment.clients_per_round or _active(config, trained)
    if per_round > trained:
        raise ValueError(f"--clients-per-round must be in 1..{trained}, got {per_round}")
    delta = config.scores.delta
    if delta is not None and not delta < 1 / trained:
        raise ValueError(
            f"--delta must be below 1/N = {1 / trained:.3g}, or it promises nothing, got {delta:g}"
        )
    clock = timing.make_clock(config.timing)

    def algorithm_of(name: str, config: Config = config, *, check: bool = True) -> Algorithm:
        mine, local = training, common_local
        if config.trained[name]:
            mine = config.training_of(name)
            with naming(name):
                local = local_of(mine, check=check)

        def fits(made: Algorithm) -> None:
            if check:
                runs = experiment_of(made, config, model, task, problem, execution)
                runs.runner().programs.check()

        def made_of(local: LocalUpdate) -> Algorithm:
            rates = mine.lr, mine.momentum or 0.0
            common = Common(
                local, model, objective, task.classes, per_round, *rates, clock, execution
            )
            return make_algorithm(name, config, common, trained, fits)

        try:
            return scheduled(mine, local, experiment.rounds, made_of)
        except ValueError as error:
            if ASSUMED in str(error) and mine.optimizer != "sgd":
                raise ValueError(f"--optimizer {mine.optimizer}: {error}") from error
            if "rate_by_round needs" in str(error):
                raise ValueError(f"--lr-schedule {mine.lr_schedule}: {error}") from error
            raise

    def varied(name: str, **own: Any) -> Algorithm:
        return algorithm_of(name, config.with_own(name, own), check=False)

    algorithms = {name: algorithm_of(name) for name in config.algorithms}
    largest = problem.data.capacity
    for method, made in algorithms.items():
        if delta is not None and made.parts.local.private and not delta < 1 / largest:
            raise ValueError(
                f"--delta must be below 1/n_k = {1 / largest:.3g} of the largest client for "
                f"{method}, got {delta:g}"
            )
        if config.machine.keep_weights and made.parts.flight.evaluated == "in_flight":
            raise ValueError(
                f"--keep-weights keeps the server's model, and {method} is scored by the mean of "
                "its models in flight: add --evaluated server"
            )
    if delta is not None and all(
        privacy_of(made, data) is client_privacy_of(made, data) is None
        for made in algorithms.values()
    ):
        raise ValueError(
            f"--delta is for private methods, such as dp_fedavg, not {' and '.join(algorithms)}"
        )
    check_target(config.ending, task, score, algorithms, own=problem.scores_own)
    return Setup(
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
        rounds={name: rounds_of(made, experiment.rounds) for name, made in algorithms.items()},
        varied=varied,
        clients_per_round=per_round,
        model_bytes=adapting.trunk_bytes(model, config.weights),
    )


def _active(config: Config, clients: int) -> int:
    """Returns all clients; one less of an odd number if phase shift deals them to two groups."""
    halved = any(
        name_of(name) == "phase_shift" and "phases" not in config.options[name]
        for name in config.algorithms
    )
    return max(clients - clients % 2, 1) if halved else clients


def make_algorithm(
    name: str,
    config: Config,
    common: Common,
    clients: int,
    fits: Callable[[Algorithm], None],
) -> Algorithm:
    """Makes an algorithm and checks that it fits."""
    plain = name_of(name)
    method, foreign = ALGORITHMS.resolve(plain)[1], ALGORITHMS.is_foreign(plain)
    own, given = keywords(method), config.options[name]
    try:
        clock = {"clock": common.clock} if "clock" in own else {}
        made = make(method, common, **given, **clock)
        made = parts.replaced(made, config.parts.texts | parse_label(name).parts, common)
        made = adapting.exchanged(made, config.weights)
        made = attacking.attacked(made, config.attack, clients)
        made = screened(made, config.ending)
        if "clock" not in own:
            made = timing.timed(made, config.timing)
        fits(made)
    except MissingRootError as error:
        raise ValueError(
            f"{name}: --server-fraction must be given: it needs samples of the server's own"
        ) from error
    except ValueError as error:
        raise ValueError(f"{name}: {flagged(error, [*own, *ON_HOST])}") from error
    except Exception as error:  # a user's function may raise anything
        if not foreign:
            raise
        raise ValueError(f"{name}: {error_text(error)}") from error
    return made


def experiment_of(
    algorithm: Algorithm,
    config: Config,
    model: Model,
    task: Task,
    problem: Problem,
    execution: Execution,
) -> Experiment:
    """Returns the experiment of an algorithm with the command's settings."""
    rounds = rounds_of(algorithm, config.experiment.rounds)
    return Experiment(
        algorithm,
        model,
        problem.data,
        problem.test,
        task=task,
        seeds=[run["seed"] for run in problem.runs],
        eval_every=min(config.experiment.eval_every, rounds),
        validation=problem.validation,
        personal=problem.own,
        execution=execution,
    )


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
