"""How many rounds one call of a program runs, so that none takes long."""

from __future__ import annotations

import time

import jax
import numpy as np
from jax.experimental import multihost_utils

STRETCH = 10.0
"""Seconds after which a program returns: progress, checkpoints and signals wait no longer."""


class Pace:
    """Cuts rounds into stretches of about ten seconds, by how long the last stretch took.

    The first stretch is one round. All processes of a run follow process 0.
    """

    def __init__(self) -> None:
        self._each: float | None = None
        self._rounds = 0
        self._began = 0.0

    def begin(self, left: int) -> int:
        """Returns how many of the rounds that are left the next stretch has."""
        if left > 1:
            fits = 1 if self._each is None else int(min(STRETCH / self._each, left))
            left = max(1, fits)
            if jax.process_count() > 1:
                left = int(multihost_utils.broadcast_one_to_all(np.int32(left)))
        self._rounds, self._began = left, time.perf_counter()
        return left

    def end(self) -> None:
        """Notes that the stretch is over."""
        self._each = max(time.perf_counter() - self._began, 1e-9) / self._rounds
