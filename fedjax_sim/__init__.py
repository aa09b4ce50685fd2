"""Federated learning in pure JAX: all models in flight on one axis, a run in a few XLA programs."""

from __future__ import annotations

from fedjax_sim import (
    aggregators,
    algorithms,
    attacks,
    augment,
    base,
    clustering,
    compression,
    data,
    dispatch,
    drift,
    importance,
    losses,
    measured,
    mediators,
    models,
    optimizers,
    partition,
    personal,
    privacy,
    probes,
    receive,
    redistribution,
    schedule,
    screens,
    selection,
    server,
    tree,
    weighting,
)
from fedjax_sim.algorithms import ALGORITHMS, fedavg, phase_shift, radfed
from fedjax_sim.base import Algorithm, ClientData, Model, Variables
from fedjax_sim.compose import compose
from fedjax_sim.data import client_data, load_dataset
from fedjax_sim.execution import Execution, make_execution
from fedjax_sim.local import local_sgd
from fedjax_sim.objective import empirical_risk
from fedjax_sim.simulate import DivergedError, Evaluation, Result, simulate

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "ClientData",
    "DivergedError",
    "Evaluation",
    "Execution",
    "Model",
    "Result",
    "Variables",
    "aggregators",
    "algorithms",
    "attacks",
    "augment",
    "base",
    "client_data",
    "clustering",
    "compose",
    "compression",
    "data",
    "dispatch",
    "drift",
    "empirical_risk",
    "fedavg",
    "importance",
    "load_dataset",
    "local_sgd",
    "losses",
    "make_execution",
    "measured",
    "mediators",
    "models",
    "optimizers",
    "partition",
    "personal",
    "phase_shift",
    "privacy",
    "probes",
    "radfed",
    "receive",
    "redistribution",
    "schedule",
    "screens",
    "selection",
    "server",
    "simulate",
    "tree",
    "weighting",
]
