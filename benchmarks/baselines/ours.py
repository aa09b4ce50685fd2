"""fedjax_sim as a contestant."""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from unittest import mock

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
from fedjax_sim.base import Array, ClientData, Model, PerClient, PyTree, Selection, Variables
from fedjax_sim.cli.training import Precision
from fedjax_sim.data import eval_set
from fedjax_sim.engine.execution import Execution
from fedjax_sim.models import layers
from fedjax_sim.models.convolutions import Lowering, conv
from fedjax_sim.models.winograd import Padding
from fedjax_sim.run.programs import Programs
from fedjax_sim.run.records import Run
from fedjax_sim.run.runner import Runner

ROUNDS = 4096
"""Cohorts that the program holds; a longer run starts over."""

NETS = {
    "mlp": fs.models.mlp,
    "logreg": fs.models.logistic,
    "cnn": fs.models.two_conv,
    "bn_cnn": fs.models.cifar_cnn,
}


def _model(workload: Workload, precision: Precision) -> Model:
    if workload.net == "lstm":
        model = fs.models.lstm(workload.shape, VOCABULARY)
    elif workload.net == "mobilenet":
        model = fs.models.mobilenet_v2(workload.shape, CLASSES, _weights(), SIDE)
    elif workload.net == "mobilenet_tail":
        model = fs.models.mobilenet_v2_tail(workload.shape, CLASSES, _weights())
    else:
        model = NETS[workload.net](workload.shape, CLASSES)
    if precision != "f32":
        model = fs.models.with_compute_dtype(model, jax.numpy.bfloat16)
    if workload.net in ("lstm", "mobilenet"):
        return model
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


class _Given(Selection):
    """The cohorts that all contestants train, round by round."""

    cohorts: Array

    def init(self, variables: Variables, data: ClientData, execution: PerClient) -> Array:
        """Returns the number of the first round."""
        return jax.numpy.int32(0)

    def draw(
        self, key: Array, turn: Array, data: ClientData, clients: Array, free: Array, visits: Array
    ) -> tuple[Array, PyTree]:
        """Returns the cohort of the round."""
        return self.cohorts[turn % ROUNDS], turn + 1


def lowered_by(way: Lowering | None) -> AbstractContextManager[object]:
    """Computes the networks' convolutions in this way within a block, if they can be."""
    if way is None:
        return nullcontext()

    def chosen(x: Array, kernel: Array, padding: Padding) -> Array:
        possible = way != "winograd" or (
            kernel.shape[:2] == (3, 3) and kernel.shape[2] >= 16 and kernel.dtype.itemsize >= 4
        )
        return conv(x, kernel, padding, way if possible else "lax")

    return mock.patch.object(layers, "conv", chosen)


@dataclass
class Session:
    """The programs of a workload and the state of their run."""

    experiment: Runner
    run: Run


def experiment_of(workload: Workload, execution: Execution, precision: Precision = "f32") -> Runner:
    """Its programs; nothing is computed."""
    model = _model(workload, precision)
    work = workload.federation()
    data = fs.client_data(work.x, work.y, fs.partition.Partition(work.index, work.start))
    local = fs.local_sgd(
        fs.empirical_risk(model),
        optax.sgd(workload.lr, momentum=workload.momentum or None),
        batch_size=workload.batch,
        half_weights=precision == "bf16_weights",
    )
    algorithm = fs.compose(
        local,
        workload.cohort,
        selection=_Given(jax.numpy.asarray(workload.cohorts(ROUNDS))),
    ).on(execution)
    sets = (eval_set(work.x[:1], work.y[:1]),)
    task = fs.tasks.classification(VOCABULARY if workload.net == "lstm" else CLASSES)
    programs = Programs(algorithm, model, task, data, sets, 1, ROUNDS)
    return Runner(programs)


@lru_cache(maxsize=1)
def session(
    workload: Workload,
    execution: Execution,
    precision: Precision = "f32",
    way: Lowering | None = None,
) -> Session:
    """Compiles a workload's programs and runs a first round."""
    with lowered_by(way):
        experiment = experiment_of(workload, execution, precision)
        run = experiment.start([0])
        run, _, _ = jax.block_until_ready(experiment.advance(run, 1))
    return Session(experiment, run)


def run(workload: Workload, rounds: int, devices: int) -> Timing:
    """Train `rounds` rounds; compiling and a first round, in the first call, are apart."""
    jax.config.update("jax_num_cpu_devices", devices)
    on_cpu = jax.default_backend() == "cpu"
    return run_on(fs.make_execution(devices if on_cpu else None), workload, rounds)


def run_on(
    execution: Execution,
    workload: Workload,
    rounds: int,
    precision: Precision = "f32",
    way: Lowering | None = None,
) -> Timing:
    """Train `rounds` rounds on the devices of an execution, as :func:`run` does."""
    began = time.perf_counter()
    ours = session(workload, execution, precision, way)
    ready = time.perf_counter()
    state, metrics, _ = jax.block_until_ready(ours.experiment.advance(ours.run, rounds))
    seconds = time.perf_counter() - ready
    ours.run = state
    samples = int(np.asarray(metrics.samples)[0, :rounds].sum())
    return Timing(seconds, samples, ready - began)
