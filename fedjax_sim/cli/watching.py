"""Observers of running programs; the default one is the progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from fedjax_sim.base.words import counted
from fedjax_sim.cli.methods import name_of
from fedjax_sim.run.progress import is_watched, progress_bar

MINUTE = 60.0
"""Seconds after which a line is printed again."""


class Tell(Protocol):
    """Takes how far some programs are."""

    def __call__(self, done: int, note: str, /) -> None:
        """Takes the number of rounds that are done, and a note."""


class Watch(Protocol):
    """Looks on while the algorithms of one program run."""

    def __call__(self, names: Sequence[str], rounds: int, /) -> AbstractContextManager[Tell]:
        """Opens a context, before they compile, with their names and the rounds of each."""


def called(names: Sequence[str]) -> str:
    """Writes the algorithms of one program.

    >>> called(["fedavg"]), called(["fedprox(mu=0.1)", "fedprox(mu=1)"])
    ('fedavg', 'fedprox, 2 settings')
    """
    return names[0] if len(names) == 1 else f"{name_of(names[0])}, {len(names)} settings"


@contextmanager
def bar(names: Sequence[str], rounds: int) -> Iterator[Tell]:
    """Shows a progress bar on stderr or in a notebook; prints lines where it has no place."""
    what = called(names)
    if not is_watched():
        yield _lines(what, rounds)
        return
    with progress_bar(what, rounds) as tell:
        yield tell


def _lines(what: str, rounds: int) -> Tell:
    """Prints a line at the start, after each tenth of the rounds, and at least once a minute."""
    began = last = time.monotonic()
    tenth = 0
    print(f"{what}: compiling, then {counted(rounds, 'round')}", file=sys.stderr, flush=True)

    def tell(done: int, note: str) -> None:
        nonlocal last, tenth
        now = time.monotonic()
        if 10 * done // rounds > tenth or now - last >= MINUTE:
            last, tenth = now, 10 * done // rounds
            told = f"round {done:,} of {rounds:,}", note, f"{now - began:,.0f} s"
            print(f"{what}: {', '.join(filter(None, told))}", file=sys.stderr, flush=True)

    return tell


@contextmanager
def nobody(names: Sequence[str], rounds: int) -> Iterator[Tell]:
    """Ignores all events."""
    del names, rounds
    yield lambda done, note: None
