"""Client-level differential privacy: clipped updates, noise as noise, cohorts, ε.

Neighbouring data sets differ in all samples of one client.
"""

from __future__ import annotations

from fedjax_sim.privacy._accounting import Sampling as Sampling
from fedjax_sim.privacy._accounting import UnknownEpsilonError, epsilon
from fedjax_sim.privacy._accounting import banded_epsilon as banded_epsilon
from fedjax_sim.privacy._accounting import tree_epsilon as tree_epsilon
from fedjax_sim.privacy._cohorts import OVERFLOW as OVERFLOW
from fedjax_sim.privacy._cohorts import cyclic as cyclic
from fedjax_sim.privacy._cohorts import epoch_rounds as epoch_rounds
from fedjax_sim.privacy._cohorts import poisson as poisson
from fedjax_sim.privacy._cohorts import shuffled as shuffled
from fedjax_sim.privacy._cohorts import slots_for as slots_for
from fedjax_sim.privacy._correlated import banded_mechanism as banded_mechanism
from fedjax_sim.privacy._correlated import tree_mechanism as tree_mechanism
from fedjax_sim.privacy._gaussian import adaptive_mechanism as adaptive_mechanism
from fedjax_sim.privacy._gaussian import gaussian_mechanism as gaussian_mechanism
from fedjax_sim.privacy._noise import noise as noise

__all__ = ["UnknownEpsilonError", "epsilon"]
