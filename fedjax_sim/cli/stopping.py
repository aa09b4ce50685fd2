"""SIGINT (Ctrl-C) and SIGTERM, which a thread of a command receives whatever else runs.

Python calls handlers of signals only between two steps of its main thread, thus not while XLA
compiles or runs; and what a handler raises within the callback of a weak reference is lost.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal ended the run, with an exit status."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.status = 128 + number


class Stopping:
    """What happens when a signal comes to a command: nothing before :func:`listen` is called.

    The first signal ends the process at once, unless the command is patient; the second one does so
    in any case.

    Attributes:
        leave: ends the process with a status.
        last_words: functions of the status that a thread calls before, the last one first.
    """

    def __init__(self) -> None:
        self.leave: Callable[[int], Any] = os._exit
        self._asked: int | None = None
        self._patient = False
        self.last_words: list[Callable[[int], Any]] = []
        self._lock = threading.Lock()

    @property
    def patient(self) -> bool:
        """Whether a first signal is kept for :meth:`check`: while a run trains, saves or draws."""
        return self._patient

    @patient.setter
    def patient(self, now: bool) -> None:
        with self._lock:  # not while the thread decides
            self._patient = now

    def check(self, agree: Callable[[int], int] = int) -> None:
        """Raises Stopped if a signal came to this process, or to one of those that ``agree``."""
        asked = agree(self._asked or 0)
        if asked:
            raise Stopped(asked)

    def hear(self, number: int) -> None:
        """Takes a signal; called in the thread that listens."""
        with self._lock:
            first, self._asked = self._asked is None, number
            if first and self._patient:
                _say("stops and saves in about ten seconds; the same signal again: at once")
                return
            if first:
                for last_words in reversed(self.last_words or [lambda status: _say("stopped")]):
                    last_words(128 + number)
            else:
                _say("stopped at once; what was saved before is kept")
            self.leave(128 + number)


STOPPING = Stopping()
"""The signal handling of this process."""


def listen() -> None:
    """Starts the thread that receives signals; for processes that are a command.

    SIGINT stays ignored where it is: a shell's script lets what it starts in the background do so.
    """
    if threading.current_thread() is not threading.main_thread() or _ears:
        return
    ear, mouth = socket.socketpair()
    mouth.setblocking(False)
    _ears.append(ear)
    # Detached, as it stays open to the end of the process.
    signal.set_wakeup_fd(mouth.detach(), warn_on_full_buffer=False)
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # else no byte is sent
    threading.Thread(target=_listen, args=(ear,), daemon=True).start()


_ears: list[socket.socket] = []


def _listen(ear: socket.socket) -> None:
    while heard := ear.recv(1):
        if heard[0] in SIGNALS:
            STOPPING.hear(heard[0])


def _say(text: str) -> None:
    os.write(2, f"\nfedjax_sim: {text}\n".encode())  # not by sys.stderr, which others may hold
