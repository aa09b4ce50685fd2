"""SIGINT (Ctrl-C) and SIGTERM, which a separate thread of a command receives at any time.

Python only calls signal handlers between two steps of its main thread, so not while XLA compiles or
runs; and exceptions of a handler within the callback of a weak reference are lost.
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
    """The reaction of a command to signals; nothing happens before :func:`listen` is called.

    The first signal ends the process at once, unless the command is patient; the second one does so
    in any case.

    Attributes:
        leave: ends the process with a status.
        last_words: functions of the status that are called before, the last one first.
    """

    def __init__(self) -> None:
        self.leave: Callable[[int], Any] = os._exit
        self._asked: int | None = None
        self._patient = False
        self.last_words: list[Callable[[int], Any]] = []
        self._lock = threading.Lock()

    @property
    def patient(self) -> bool:
        """Whether a first signal waits for :meth:`check`, while a run trains, saves or draws."""
        return self._patient

    @patient.setter
    def patient(self, now: bool) -> None:
        with self._lock:  # not while the thread decides
            self._patient = now

    def check(self, agree: Callable[[int], int] = int) -> None:
        """Raises Stopped if this process, or one of the processes that ``agree``, got a signal."""
        asked = agree(self._asked or 0)
        if asked:
            raise Stopped(asked)

    def hear(self, number: int) -> None:
        """Handles a signal; called in the thread that listens."""
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
    """Starts the thread that receives signals; only for processes that run a command.

    SIGINT stays ignored if it was, as in the background processes of a shell script.
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
