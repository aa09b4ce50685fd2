"""Reductions of a stack of models to one: ``([S, *p], weights f32[S]) -> [*p]``."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fedjax_sim.base import Aggregator
from fedjax_sim.tree import mean

AGGREGATORS: Mapping[str, Aggregator] = MappingProxyType({"mean": mean})

__all__ = ["AGGREGATORS", "mean"]
