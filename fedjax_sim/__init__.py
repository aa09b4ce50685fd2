"""Federated learning in pure JAX: all models in flight on one axis, a run in a few XLA programs."""

from __future__ import annotations

import sys
from typing import Any

if sys.argv[:1] == ["-m"]:  # a command: it hears signals while the imports below take seconds
    from fedjax_sim.cli.stopping import listen

    listen()

import jax

if jax.__version_info__ < (0, 7, 2):  # before the imports that fail with an older one
    raise ImportError(f"fedjax_sim needs JAX 0.7.2, got {jax.__version__}: pip install -U jax flax")

from fedjax_sim import (
    algorithms,
    attacks,
    base,
    compression,
    data,
    models,
    partition,
    personal,
    privacy,
    server,
    tasks,
)
from fedjax_sim.algorithms import ALGORITHMS, fedavg, phase_shift, radfed
from fedjax_sim.base import ClientData, LocalUpdate, Model, Variables, part
from fedjax_sim.cli.calling import run_experiment
from fedjax_sim.cli.comparing import Comparison, compare
from fedjax_sim.cli.loading import load_run
from fedjax_sim.cli.saving import save_run
from fedjax_sim.client import (
    adaptation,
    augment,
    corrections,
    local,
    mixup,
    reports,
    sending,
    terms,
)
from fedjax_sim.client.local import local_sgd
from fedjax_sim.client.objective import empirical_risk
from fedjax_sim.data import client_data, load_dataset
from fedjax_sim.engine import optimizers, tree
from fedjax_sim.engine.cores import OneDeviceWarning, use_cores
from fedjax_sim.engine.execution import Execution, make_execution
from fedjax_sim.engine.memory import TooLargeError
from fedjax_sim.models import leaves, load_weights, save_weights
from fedjax_sim.plan import clock, exchange, flight, redistribution, selection
from fedjax_sim.round import Algorithm, cite, compose
from fedjax_sim.run import (
    CheckpointError,
    Checkpoints,
    CheckpointWarning,
    DivergedError,
    Evaluation,
    Result,
    Sweep,
    simulate,
    stop,
    sweep,
)
from fedjax_sim.run.simulation import Toy, toy
from fedjax_sim.server import (
    aggregators,
    broadcast,
    diagnostics,
    finish,
    preaggregation,
    weighting,
)
from fedjax_sim.tasks import losses

__version__ = "0.2.0"

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "CheckpointError",
    "CheckpointWarning",
    "Checkpoints",
    "ClientData",
    "Comparison",
    "DivergedError",
    "Evaluation",
    "Execution",
    "LocalUpdate",
    "Model",
    "OneDeviceWarning",
    "Result",
    "Sweep",
    "TooLargeError",
    "Toy",
    "Variables",
    "adaptation",
    "aggregators",
    "algorithms",
    "attacks",
    "augment",
    "base",
    "broadcast",
    "cite",
    "client_data",
    "clock",
    "compare",
    "compose",
    "compression",
    "corrections",
    "data",
    "diagnostics",
    "empirical_risk",
    "exchange",
    "fedavg",
    "finish",
    "flight",
    "leaves",
    "load_dataset",
    "load_run",
    "load_weights",
    "local",
    "local_sgd",
    "losses",
    "make_execution",
    "mixup",
    "models",
    "optimizers",
    "part",
    "partition",
    "personal",
    "phase_shift",
    "preaggregation",
    "privacy",
    "radfed",
    "redistribution",
    "reports",
    "run_experiment",
    "save_run",
    "save_weights",
    "selection",
    "sending",
    "server",
    "simulate",
    "stop",
    "sweep",
    "tasks",
    "terms",
    "toy",
    "tree",
    "use_cores",
    "weighting",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    where = f", use fs.algorithms.{name}" if name in ALGORITHMS.own else ""
    raise AttributeError(f"module 'fedjax_sim' has no attribute {name!r}{where}")
