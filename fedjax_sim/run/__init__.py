"""A run of rounds: its XLA programs, its scores, its result."""

from fedjax_sim.run.checks import check_model
from fedjax_sim.run.result import DivergedError, Evaluation, Result
from fedjax_sim.run.simulation import simulate

__all__ = ["DivergedError", "Evaluation", "Result", "check_model", "simulate"]
