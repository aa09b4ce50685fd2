"""Lossy codes for updates, with error feedback."""

from __future__ import annotations

from fedjax_sim.compression._codes import (
    Compressor,
    clustered,
    entropy_coded,
    hard_threshold,
    position_bits,
    stochastic_quantisation,
    ternary,
    top_k,
)
from fedjax_sim.compression._messages import compress_server, compressed
from fedjax_sim.compression._sketches import low_rank, random_mask, rotated, uniform_quantisation

__all__ = [
    "Compressor",
    "clustered",
    "entropy_coded",
    "hard_threshold",
    "random_mask",
    "rotated",
    "stochastic_quantisation",
    "ternary",
    "top_k",
    "uniform_quantisation",
]
