"""Changes to the collected models or their weights before they are aggregated."""

from __future__ import annotations

from fedjax_sim.screens.clip import clip_norm
from fedjax_sim.screens.fair import agnostic, q_fair
from fedjax_sim.screens.nova import normalise
from fedjax_sim.screens.signs import sign_agreement
from fedjax_sim.screens.staleness import staleness
from fedjax_sim.screens.trust import trust

__all__ = [
    "agnostic",
    "clip_norm",
    "normalise",
    "q_fair",
    "sign_agreement",
    "staleness",
    "trust",
]
