"""fedjax_sim as a contestant."""

import time
from dataclasses import dataclass
from functools import lru_cache

import jax
import numpy as np
import optax
from numpy.typing import NDArray

import fedjax_sim as fs
from benchmarks.workloads import (
    BOTTLENECKS,
    CLASSES,
    SEED,
    SIDE,
    STEM,
    TOP,
    VOCABULARY,
    Timing,
    Workload,
)
from fedjax_sim.base import Array, ClientData, Model, PyTree, Selection
from fedjax_sim.data import eval_set
from fedjax_sim.engine.execution import Execution
from fedjax_sim.run.experiment import Experiment
from fedjax_sim.run.programs import Programs
from fedjax_sim.run.stages import Run

ROUNDS = 4096
"""Cohorts that the program holds; a longer run starts over."""

NETS = {
    "mlp": fs.models.mlp,
    "logreg": fs.models.logistic,
    "cnn": fs.models.two_conv,
    "bn_cnn": fs.models.cifar_cnn,
}


def _model(workload: Workload) -> Model:
    if workload.net == "lstm":
        return fs.models.lstm(workload.shape, VOCABULARY)
    if workload.net == "mobilenet":
        return fs.models.mobilenet_v2(workload.shape, CLASSES, _weights(), SIDE)
    if workload.net == "mobilenet_tail":
        model = fs.models.mobilenet_v2_tail(workload.shape, CLASSES, _weights())
    else:
        model = NETS[workload.net](workload.shape, CLASSES)
    half = np.full(workload.shape[-1], 127.5, np.float32)
    return fs.models.with_scaling(model, half, half)


def _weights() -> dict[str, NDArray[np.float32]]:
    """Random weights of MobileNetV2, by the names of Keras."""
    rng = np.random.default_rng(SEED)
    arrays = {}

    def add(name: str, norm: str, shape: tuple[int, ...], leaf: str = "kernel") -> None:
        fan_in = np.prod(shape[:2]) * (shape[2] if leaf == "kernel" else 1)
        arrays[f"{name}/{leaf}"] = rng.normal(0, np.sqrt(2 / fan_in), shape).astype(np.float32)
        channels = shape[2] * shape[3] if leaf != "kernel" else shape[3]
        for part, value in (("gamma", 1), ("beta", 0), ("moving_mean", 0), ("moving_variance", 1)):
            arrays[f"{norm}/{part}"] = np.full(channels, value, np.float32)

    add("Conv1", "bn_Conv1", (3, 3, 3, STEM))
    given = STEM
    for number, (expansion, channels, _) in enumerate(BOTTLENECKS):
        block, inner = f"block_{number}" if number else "expanded_conv", expansion * given
        if number:
            add(f"{block}_expand", f"{block}_expand_BN", (1, 1, given, inner))
        shape = (3, 3, inner, 1)
        add(f"{block}_depthwise", f"{block}_depthwise_BN", shape, "depthwise_kernel")
        add(f"{block}_project", f"{block}_project_BN", (1, 1, inner, channels))
        given = channels
    add("Conv_1", "Conv_1_bn", (1, 1, given, TOP))
    return arrays


def _given(cohorts: Array) -> Selection:
    """The cohorts that all contestants train, round by round."""

    def draw(
        key: Array, turn: Array, data: ClientData, clients: Array, free: Array, visits: Array
    ) -> tuple[Array, PyTree]:
        return cohorts[turn % ROUNDS], turn + 1

    return Selection(
        init=lambda variables, data, execution: jax.numpy.int32(0), draw=draw, sticky=False
    )


@dataclass
class _Session:
    experiment: Experiment
    run: Run


def experiment_of(workload: Workload, execution: Execution) -> Experiment:
    """Its programs; nothing is computed."""
    model = _model(workload)
    work = workload.federation()
    data = fs.client_data(work.x, work.y, fs.partition.Partition(work.index, work.start))
    local = fs.local_sgd(
        fs.empirical_risk(model),
        optax.sgd(workload.lr, momentum=workload.momentum or None),
        batch_size=workload.batch,
    )
    algorithm = fs.compose(
        local,
        selection=_given(jax.numpy.asarray(workload.cohorts(ROUNDS))),
        schedule=fs.schedule.every_round(workload.cohort),
        execution=execution,
    )
    sets = (eval_set(work.x[:1], work.y[:1]),)
    task = fs.tasks.classification(VOCABULARY if workload.net == "lstm" else CLASSES)
    programs = Programs(algorithm, model, task, data, sets, 1, ROUNDS)
    return Experiment(programs)


@lru_cache(maxsize=1)
def _session(workload: Workload, devices: int) -> _Session:
    jax.config.update("jax_num_cpu_devices", devices)
    on_cpu = jax.default_backend() == "cpu"
    experiment = experiment_of(workload, fs.make_execution(devices if on_cpu else None))
    run = experiment.start([0])
    run, _, _ = jax.block_until_ready(experiment.advance(run, 1))
    return _Session(experiment, run)


def run(workload: Workload, rounds: int, devices: int) -> Timing:
    """Train `rounds` rounds; compiling and a first round, in the first call, are apart."""
    began = time.perf_counter()
    session = _session(workload, devices)
    ready = time.perf_counter()
    state, metrics, _ = jax.block_until_ready(session.experiment.advance(session.run, rounds))
    seconds = time.perf_counter() - ready
    session.run = state
    samples = int(np.asarray(metrics.samples)[0, :rounds].sum())
    return Timing(seconds, samples, ready - began)
