"""A run of rounds: its XLA programs, its scores, its result."""

from fedjax_sim.run import stop
from fedjax_sim.run.archive import CheckpointError
from fedjax_sim.run.checkpoints import Checkpoints
from fedjax_sim.run.checks import check_model
from fedjax_sim.run.grids import sweep
from fedjax_sim.run.result import DivergedError, Evaluation, Result
from fedjax_sim.run.saved import CheckpointWarning
from fedjax_sim.run.simulation import simulate
from fedjax_sim.run.swept import Plan, Point, Sweep

__all__ = [
    "CheckpointError",
    "CheckpointWarning",
    "Checkpoints",
    "DivergedError",
    "Evaluation",
    "Plan",
    "Point",
    "Result",
    "Sweep",
    "check_model",
    "simulate",
    "stop",
    "sweep",
]
