"""Client-level differential privacy: clipped updates, noise, cohorts, ε.

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
from fedjax_sim.privacy._cohorts import (
    OVERFLOW,
    cyclic,
    epoch_rounds,
    poisson,
    shuffled,
    slots_for,
)
from fedjax_sim.privacy._correlated import banded_mechanism, tree_mechanism
from fedjax_sim.privacy._gaussian import adaptive_mechanism, gaussian_mechanism
from fedjax_sim.privacy._noise import noise

__all__ = [
    "OVERFLOW",
    "Sampling",
    "UnknownEpsilonError",
    "adaptive_mechanism",
    "banded_epsilon",
    "banded_mechanism",
    "cyclic",
    "epoch_rounds",
    "epsilon",
    "gaussian_mechanism",
    "noise",
    "poisson",
    "shuffled",
    "slots_for",
    "tree_epsilon",
    "tree_mechanism",
]
