"""Ctrl-C and SIGTERM: the rounds up to the next evaluation are finished, and saved."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stopped(KeyboardInterrupt):
    """A signal ended the run.

    Attributes:
        status: the exit status that says so.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


class Stopping:
    """Whether the run is to stop.

    Attributes:
        patient: whether a first signal waits for the next evaluation: not while nothing has run.
    """

    def __init__(self) -> None:
        self.patient = False
        self._asked: int | None = None

    def check(self) -> None:
        """Raises Stopped if a signal came."""
        if self._asked is not None:
            raise Stopped(self._asked)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Takes a signal: the first one patiently, a second one at once."""
        del frame
        if not self.patient or self._asked is not None:
            raise Stopped(number)
        self._asked = number
        print(
            "\nfedjax_sim.bench: stops at the next evaluation; the same signal again: at once",
            file=sys.stderr,
        )


@contextmanager
def patiently() -> Iterator[Stopping]:
    """Takes the signals as long as the run goes on."""
    stopping = Stopping()
    with _taken_by(stopping):
        yield stopping


@contextmanager
def held() -> Iterator[None]:
    """Lets a signal that comes meanwhile come at the end.

    Python raises in the middle of what it runs, and what the callback of a weak reference raises is
    lost: within ``jax.clear_caches()``, which lets go of thousands, that was one Ctrl-C of twelve.
    """
    came: list[int] = []
    with _taken_by(lambda number, frame: came.append(number)):
        yield
    if came:
        signal.raise_signal(came[0])


@contextmanager
def _taken_by(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python takes signals in its main thread alone
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handler) for number in numbers]
    try:
        yield
    finally:
        for number, earlier in zip(numbers, before, strict=True):
            signal.signal(number, earlier)
