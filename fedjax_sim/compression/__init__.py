"""Lossy codes for updates, with error feedback."""

from __future__ import annotations

from fedjax_sim.compression._codes import Compressor, stochastic_quantisation, ternary, top_k
from fedjax_sim.compression._codes import position_bits as position_bits
from fedjax_sim.compression._messages import compress_server as compress_server
from fedjax_sim.compression._messages import compressed as compressed
from fedjax_sim.compression._sketches import low_rank as low_rank
from fedjax_sim.compression._sketches import random_mask, rotated, uniform_quantisation

__all__ = [
    "Compressor",
    "random_mask",
    "rotated",
    "stochastic_quantisation",
    "ternary",
    "top_k",
    "uniform_quantisation",
]
