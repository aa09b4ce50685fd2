"""Changes to the collected models or their weights before they are aggregated."""

from __future__ import annotations

from fedjax_sim.attacks import alie, gaussian, sign_flip
from fedjax_sim.privacy import gaussian_mechanism
from fedjax_sim.server.preaggregation._clip import clip_norm
from fedjax_sim.server.preaggregation._fair import agnostic, q_fair
from fedjax_sim.server.preaggregation._nova import normalise
from fedjax_sim.server.preaggregation._signs import sign_agreement
from fedjax_sim.server.preaggregation._staleness import staleness
from fedjax_sim.server.preaggregation._trust import trust

__all__ = [
    "agnostic",
    "alie",
    "clip_norm",
    "gaussian",
    "gaussian_mechanism",
    "normalise",
    "q_fair",
    "sign_agreement",
    "sign_flip",
    "staleness",
    "trust",
]
