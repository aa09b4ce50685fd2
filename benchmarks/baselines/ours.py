"""fedjax_sim as a contestant."""

import time
from dataclasses import dataclass
from functools import lru_cache

import jax
import numpy as np
import optax
from workloads import CLASSES, Timing, Workload

import fedjax_sim as fs
from fedjax_sim.base import Array, ClientData, Model, PyTree, Selection
from fedjax_sim.losses import cross_entropy
from fedjax_sim.simulate import Experiment, Run

ROUNDS = 4096
"""Cohorts that the program holds; a longer run starts over."""


def _model(workload: Workload) -> Model:
    build = {
        "mlp": fs.models.mlp,
        "logreg": fs.models.logistic,
        "cnn": fs.models.two_conv,
        "bn_cnn": fs.models.cifar_cnn,
    }[workload.net]
    half = np.full(workload.shape[-1], 127.5, np.float32)
    return fs.models.with_scaling(build(workload.shape, CLASSES), half, half)


def _given(cohorts: Array) -> Selection:
    """The cohorts that all contestants train, round by round."""

    def draw(
        key: Array, turn: Array, data: ClientData, held: Array, vacant: Array
    ) -> tuple[Array, PyTree]:
        return cohorts[turn % ROUNDS], turn + 1

    return Selection(init=lambda data: jax.numpy.int32(0), draw=draw, held=False)


@dataclass
class _Session:
    experiment: Experiment
    run: Run


@lru_cache(maxsize=1)
def _session(workload: Workload, devices: int) -> _Session:
    jax.config.update("jax_num_cpu_devices", devices)
    on_cpu = jax.default_backend() == "cpu"
    execution = fs.make_execution(devices if on_cpu else None)
    model = _model(workload)
    work = workload.federation()
    data = fs.ClientData(work.x, work.y, work.index, work.start, int(work.sizes.max()))
    local = fs.LocalSGD(
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
    experiment = Experiment(algorithm, model, cross_entropy, execution, data, 1, ROUNDS)
    run = experiment.start(data, (work.x[:1], work.y[:1]), [0])
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
