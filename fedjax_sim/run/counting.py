"""Counts the programs that XLA is asked for."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from fedjax_sim.engine.targets import xla_option_probe


class _Counter:
    def __init__(self) -> None:
        self.compiled: list[None] = []  # one for each: threads compile at once

    @property
    def programs(self) -> int:
        return len(self.compiled)


_counting: list[_Counter] = []


@functools.cache
def _listen() -> None:
    """Listens for good: not every JAX that we support lets a listener go."""

    def listen(event: str, duration_secs: float, **about: Any) -> None:
        del duration_secs
        counted = xla_option_probe.__name__ not in about.get("fun_name", "")
        if counted and event == "/jax/core/compile/backend_compile_duration":
            for counter in tuple(_counting):
                counter.compiled.append(None)

    jax.monitoring.register_event_duration_secs_listener(listen)


@contextmanager
def count_programs() -> Iterator[_Counter]:
    """Counts the programs that XLA is asked for, those that our own code did not mean included.

    >>> import numpy as np
    >>> with count_programs() as counter:
    ...     doubled = jax.jit(lambda x: x * 2.0)(np.ones(3, np.float32))
    >>> counter.programs
    1
    """
    _listen()
    counter = _Counter()
    _counting.append(counter)
    try:
        yield counter
    finally:
        _counting.remove(counter)
