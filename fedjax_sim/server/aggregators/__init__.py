"""Aggregators, which reduce a stack of models to one: ``([P, *p], weights f32[P]) -> [*p]``.

All but the mean withstand a minority of arbitrary rows, including NaN and infinity.
"""

from __future__ import annotations

from fedjax_sim.engine.tree import mean
from fedjax_sim.server.aggregators._distances import caf, geometric_median, krum, multi_krum
from fedjax_sim.server.aggregators._order import coordinate_median, trimmed_mean

__all__ = [
    "caf",
    "coordinate_median",
    "geometric_median",
    "krum",
    "mean",
    "multi_krum",
    "trimmed_mean",
]
