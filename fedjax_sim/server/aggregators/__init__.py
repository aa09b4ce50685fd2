"""Aggregators, which reduce a stack of models to one: ``([P, *p], weights f32[P]) -> [*p]``.

All but the mean withstand a minority of arbitrary rows, including NaN and infinity.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fedjax_sim.base import Aggregator
from fedjax_sim.engine.tree import mean
from fedjax_sim.server.aggregators._distances import caf, geometric_median, krum, multi_krum
from fedjax_sim.server.aggregators._order import coordinate_median, trimmed_mean

AGGREGATORS: Mapping[str, Aggregator] = MappingProxyType(
    {
        "mean": mean,
        "coordinate_median": coordinate_median,
        "trimmed_mean": trimmed_mean(),
        "geometric_median": geometric_median(),
        "krum": krum(),
        "multi_krum": multi_krum(),
        "caf": caf(),
    }
)
"""The aggregators by name, with default settings."""

__all__ = [
    "caf",
    "coordinate_median",
    "geometric_median",
    "krum",
    "mean",
    "multi_krum",
    "trimmed_mean",
]
