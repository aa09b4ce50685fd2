"""Observers of running programs, such as the progress bar, and the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from fedjax_sim.base.words import counted, duration
from fedjax_sim.cli.methods import name_of
from fedjax_sim.run.progress import Report, is_watched, progress_bar

MINUTE = 60.0
"""Seconds after which a line is printed again."""


Watch = Callable[[Sequence[str], int, int], AbstractContextManager[Report]]
"""``(names, rounds, done)``: opens a context for the algorithms of one program."""


def called(names: Sequence[str]) -> str:
    """Describes the algorithms of one program.

    >>> called(["fedavg"]), called(["fedprox(mu=0.1)", "fedprox(mu=1)"])
    ('fedavg', 'fedprox, 2 settings')
    """
    return names[0] if len(names) == 1 else f"{name_of(names[0])}, {len(names)} settings"


@contextmanager
def bar(names: Sequence[str], rounds: int, done: int = 0) -> Iterator[Report]:
    """Shows a progress bar on stderr or in a notebook; prints lines if stderr is a file."""
    what = called(names)
    if not is_watched():
        yield _lines(what, rounds, done)
        return
    with progress_bar(what, rounds, done) as tell:
        yield tell


def _lines(what: str, rounds: int, before: int) -> Report:
    """Prints a line at the start, after each tenth of the rounds, and at least once a minute.

    The time left is estimated from the rounds after the ``before`` of a checkpoint.
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
            parts = [f"round {done:,} of {rounds:,}", f"{now - began:,.0f} s"]
            if before < done < rounds:
                left = (now - compiled) / (done - before) * (rounds - done)
                parts.append(f"about {duration(left)} left")
            if note:
                parts.append(note)
            print(f"{what}: {', '.join(parts)}", file=sys.stderr, flush=True)

    return tell


@contextmanager
def nobody(names: Sequence[str], rounds: int, done: int = 0) -> Iterator[Report]:
    """Ignores all events."""
    del names, rounds, done
    yield lambda done, note: None


class Forecast:
    """The time left for several algorithms.

    Rounds of a checkpoint do not count. Rounds are weighted by the seconds that a method has needed
    so far. A method that has not begun is expected to need the mean of the others, and as long for
    everything but rounds, such as compilation.

    Args:
        work: the work of each algorithm in any unit, such as rounds times clients.
        now: clock in seconds.

    >>> clock = [0.0]
    >>> forecast = Forecast({"fedavg": 10, "fedprox": 20}, lambda: clock[0])
    >>> with forecast.program(["fedavg"], rounds=100, done=50) as advance:
    ...     clock[0] = 60.0
    ...     advance(75)  # 2.5 in a minute, and 22.5 are left
    >>> str(forecast)
    'about 9 min left'
    """

    def __init__(
        self, work: Mapping[str, float], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._work, self._now = work, now
        self._share = dict.fromkeys(work, 0.0)  # of each algorithm, what is done
        self._waiting = {*work}  # ... that have not begun
        self._spent = dict[str, tuple[float, float]]()  # by method: seconds, and work in them
        self._began = now()

    def ended(self, names: Sequence[str]) -> None:
        """Marks algorithms as done, possibly before their last round."""
        self._share |= dict.fromkeys(names, 1.0)
        self._waiting -= {*names}

    @contextmanager
    def program(
        self, names: Sequence[str], rounds: int, done: int
    ) -> Iterator[Callable[[int], None]]:
        """Opens a context for the algorithms of one program, which takes the rounds done so far.

        Tell it that none are done when the program has been compiled.
        """
        last = self._now()
        self._share |= dict.fromkeys(names, done / rounds)
        self._waiting -= {*names}

        def advance(done: int) -> None:
            nonlocal last
            now, share = self._now(), done / rounds
            for name in names:
                new = share - self._share[name]
                if new > 0:  # else it is a round of a checkpoint
                    self._share[name] = share
                    self._learn(name, new, (now - last) / len(names))
            last = now

        yield advance

    @property
    def seconds(self) -> float | None:
        """The seconds left, including compilation; None before the first round."""
        if not self._spent:
            return None
        spent, work = map(sum, zip(*self._spent.values(), strict=True))
        costs = {method: s / w for method, (s, w) in self._spent.items()}
        left = sum(
            size * (1 - self._share[name]) * costs.get(name_of(name), spent / work)
            for name, size in self._work.items()
        )
        begun = len(self._work) - len(self._waiting)
        return left + (self._now() - self._began - spent) * len(self._waiting) / begun

    def __str__(self) -> str:
        seconds = self.seconds
        return f"about {duration(seconds)} left" if seconds else ""

    def _learn(self, name: str, share: float, seconds: float) -> None:
        method = name_of(name)
        before, work = self._spent.get(method, (0.0, 0.0))
        self._spent[method] = before + seconds, work + share * self._work[name]
