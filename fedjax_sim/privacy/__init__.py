"""Differential privacy of clients and of their samples: clips, noise, cohorts, ε.

Neighbouring data sets differ in all samples of one client; for DP-SGD in one of them.
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
from fedjax_sim.privacy._per_client import (
    ClientPrivacy,
    SamplePrivacy,
    UpdatePrivacy,
    sample_epsilon,
)
from fedjax_sim.privacy._samples import dp_sgd

__all__ = ["UnknownEpsilonError", "epsilon", "sample_epsilon"]
