"""fedjax_sim as a contestant."""

import time
from functools import lru_cache

import jax
import numpy as np
import optax
from workloads import CLASSES, Timing, Workload

import fedjax_sim as fs
from fedjax_sim.base import Array, ClientData, Model, PyTree, Selection
from fedjax_sim.losses import cross_entropy
from fedjax_sim.simulate import Experiment

ROUNDS = 4096
"""Cohorts that a program holds; a longer run starts over."""


def _model(workload: Workload) -> Model:
    build = {
        "mlp": fs.models.mlp,
        "logreg": fs.models.logistic,
        "cnn": fs.models.two_conv,
        "bn_cnn": fs.models.cifar_cnn,
    }[workload.net]
    channels = workload.shape[-1]
    half = np.full(channels, 127.5, np.float32)
    return fs.models.with_scaling(build(workload.shape, CLASSES), half, half)


def _given(cohorts: Array) -> Selection:
    """The cohorts that all contestants train, round by round."""

    def draw(
        key: Array, turn: Array, data: ClientData, held: Array, vacant: Array
    ) -> tuple[Array, PyTree]:
        return cohorts[turn % ROUNDS], turn + 1

    return Selection(init=lambda data: jax.numpy.int32(0), draw=draw, held=False)


@lru_cache(maxsize=1)
def _experiment(workload: Workload, devices: int) -> tuple[Experiment, object, object]:
    if jax.config.jax_num_cpu_devices < devices:
        jax.config.update("jax_num_cpu_devices", devices)
    on_cpu = jax.devices()[0].platform == "cpu"
    execution = fs.make_execution(devices=devices if on_cpu else None)
    model = _model(workload)
    work = workload.federation()
    data = fs.ClientData(
        work.x,
        work.y,
        work.index,
        work.start,
        int(np.diff(work.start).max()),  # type: ignore[arg-type]
    )
    local = fs.LocalSGD(
        fs.empirical_risk(model),
        optax.sgd(workload.lr, momentum=workload.momentum or None),
        batch_size=workload.batch,
    )
    cohorts = jax.numpy.asarray(workload.cohorts(ROUNDS))
    algorithm = fs.compose(
        local,
        selection=_given(cohorts),
        schedule=fs.schedule.every_round(workload.cohort),
        execution=execution,
    )
    test = (work.x[:1], work.y[:1])
    experiment = Experiment(algorithm, model, cross_entropy, execution, data, 1, ROUNDS)
    run = experiment.start(data, test, [0])
    return experiment, run, [run]


def run(workload: Workload, rounds: int, devices: int) -> Timing:
    """Train `rounds` rounds from the initial model; compiling is apart."""
    experiment, _, latest = _experiment(workload, devices)
    before = experiment.compile_seconds
    if before == 0 or len(latest) == 1:
        latest.append(jax.block_until_ready(experiment.advance(latest.pop(), 1))[0])
    began = time.perf_counter()
    state, metrics, _ = jax.block_until_ready(experiment.advance(latest.pop(), rounds))
    seconds = time.perf_counter() - began
    latest.append(state)
    samples = int(np.asarray(metrics.samples)[0, :rounds].sum())
    return Timing(seconds, samples, experiment.compile_seconds - before)
