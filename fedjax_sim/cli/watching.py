"""Observers of running programs; the default one is the progress bar."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from fedjax_sim.base.words import counted, duration
from fedjax_sim.cli.methods import name_of
from fedjax_sim.run.progress import is_watched, progress_bar

MINUTE = 60.0
"""Seconds after which a line is printed again."""


Tell = Callable[[int, str], None]
"""``(done, note)``: takes the number of rounds that are done, and a note."""

Watch = Callable[[Sequence[str], int, int], AbstractContextManager[Tell]]
"""``(names, rounds, done)``: opens a context for the algorithms of one program."""


def called(names: Sequence[str]) -> str:
    """Writes the algorithms of one program.

    >>> called(["fedavg"]), called(["fedprox(mu=0.1)", "fedprox(mu=1)"])
    ('fedavg', 'fedprox, 2 settings')
    """
    return names[0] if len(names) == 1 else f"{name_of(names[0])}, {len(names)} settings"


@contextmanager
def bar(names: Sequence[str], rounds: int, done: int = 0) -> Iterator[Tell]:
    """Shows a progress bar on stderr or in a notebook; prints lines where it has no place."""
    what = called(names)
    if not is_watched():
        yield _lines(what, rounds, done)
        return
    with progress_bar(what, rounds, done) as tell:
        yield tell


def _lines(what: str, rounds: int, before: int) -> Tell:
    """Prints a line at the start, after each tenth of the rounds, and at least once a minute.

    The time left is that of the rounds after the ``before`` that a checkpoint has.
    """
    began = last = compiled = time.monotonic()
    tenth = 10 * before // rounds
    resumed = f"round {before:,} of {rounds:,} is done, " if before else ""
    then = counted(rounds - before, "round")
    print(f"{what}: {resumed}compiling, then {then}", file=sys.stderr, flush=True)

    def tell(done: int, note: str) -> None:
        nonlocal last, tenth, compiled
        now = time.monotonic()
        if done <= before:
            compiled = now
        if 10 * done // rounds > tenth or now - last >= MINUTE:
            last, tenth = now, 10 * done // rounds
            told = [f"round {done:,} of {rounds:,}", note, f"{now - began:,.0f} s"]
            if before < done < rounds:
                left = (now - compiled) / (done - before) * (rounds - done)
                told.append(f"about {duration(left)} left")
            print(f"{what}: {', '.join(filter(None, told))}", file=sys.stderr, flush=True)

    return tell


@contextmanager
def nobody(names: Sequence[str], rounds: int, done: int = 0) -> Iterator[Tell]:
    """Ignores all events."""
    del names, rounds, done
    yield lambda done, note: None
