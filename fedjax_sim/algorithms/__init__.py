"""Named methods; each is one composition. Their keyword parameters are the command's flags."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from fedjax_sim.algorithms.fedavg import fedavg
from fedjax_sim.algorithms.phase_shift import phase_shift
from fedjax_sim.algorithms.radfed import radfed
from fedjax_sim.base import Algorithm

ALGORITHMS: Mapping[str, Callable[..., Algorithm]] = MappingProxyType(
    {"fedavg": fedavg, "radfed": radfed, "phase_shift": phase_shift}
)

__all__ = ["ALGORITHMS", "fedavg", "phase_shift", "radfed"]
