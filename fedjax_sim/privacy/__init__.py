"""Client-level differential privacy: clipped updates, noise as noise, cohorts, ε.

Neighbouring data sets differ in all samples of one client.
"""

from __future__ import annotations

from fedjax_sim.privacy._accounting import (
    Sampling,
    UnknownEpsilonError,
    banded_epsilon,
    epsilon,
    tree_epsilon,
)
from fedjax_sim.privacy._cohorts import OVERFLOW, cyclic, epoch_rounds, poisson, shuffled, slots_for
from fedjax_sim.privacy._correlated import banded_mechanism, tree_mechanism
from fedjax_sim.privacy._gaussian import adaptive_mechanism, gaussian_mechanism
from fedjax_sim.privacy._noise import noise

__all__ = ["UnknownEpsilonError", "epsilon"]
