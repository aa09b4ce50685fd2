"""Changes to the collected updates or their weights before they are aggregated."""

from __future__ import annotations

from fedjax_sim.privacy import (
    adaptive_mechanism,
    banded_mechanism,
    gaussian_mechanism,
    tree_mechanism,
)
from fedjax_sim.server.preaggregation._discrepancy import Discrepancy, discrepancy
from fedjax_sim.server.preaggregation._fair import agnostic, q_fair
from fedjax_sim.server.preaggregation._mixing import bucketing, nearest_neighbour_mixing
from fedjax_sim.server.preaggregation._nova import normalise
from fedjax_sim.server.preaggregation._root import suspicion, trust
from fedjax_sim.server.preaggregation._staleness import discounted, staleness

__all__ = [
    "adaptive_mechanism",
    "agnostic",
    "banded_mechanism",
    "bucketing",
    "discounted",
    "discrepancy",
    "gaussian_mechanism",
    "nearest_neighbour_mixing",
    "normalise",
    "q_fair",
    "staleness",
    "suspicion",
    "tree_mechanism",
    "trust",
]
