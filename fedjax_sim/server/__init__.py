"""Server updates, for ``compose(server=...)``; the server's other roles are its modules."""

from __future__ import annotations

from fedjax_sim.compression import compress_server
from fedjax_sim.server.low_rank import exact_lora
from fedjax_sim.server.root import distilled, train_beside, train_on_root
from fedjax_sim.server.steps import dynamic, extrapolated, participation
from fedjax_sim.server.update import (
    chain,
    mix,
    optimizer,
    replace,
    sign_agreement,
)

__all__ = [
    "chain",
    "compress_server",
    "distilled",
    "dynamic",
    "exact_lora",
    "extrapolated",
    "mix",
    "optimizer",
    "participation",
    "replace",
    "sign_agreement",
    "train_beside",
    "train_on_root",
]
