"""Runs of rounds: XLA programs, scores and results."""

from fedjax_sim.run import stop
from fedjax_sim.run.checkpoint_files import CheckpointError, CheckpointWarning
from fedjax_sim.run.checkpoints import Checkpoints
from fedjax_sim.run.checks import check_model
from fedjax_sim.run.evaluation import Evaluation
from fedjax_sim.run.grids import Plan, Point, Sweep, sweep
from fedjax_sim.run.result import DivergedError, Result
from fedjax_sim.run.simulation import simulate

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
