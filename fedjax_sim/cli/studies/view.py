"""A live view of a study: a few lines at the bottom of a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from fedjax_sim.base.words import counted
from fedjax_sim.cli.studies.plan import Cell, Study
from fedjax_sim.cli.studies.results import Row, best_of, shown_score
from fedjax_sim.cli.watching import Tell, bar, called

BESTS = 3
"""Finished cells whose best method is shown, the newest."""


class View:
    """How far a study is: cells, rounds, the best so far, the time left.

    What else is printed scrolls above it. It is drawn anew when something is known, by no thread.

    Args:
        study: what runs.
        terminal: where.
        now: seconds, for the time left.
    """

    def __init__(
        self, study: Study, terminal: TextIO, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._terminal, self._now = terminal, now
        self._work = {cell.name: _work(cell) for cell in study.cells}
        self._left = dict(self._work)
        self._began, self._ran, self._drawn = now(), 0.0, 0
        self._running = dict[str, str]()  # cells, and what is said of each
        self._bests: list[str] = []

    def begins(self, cell: Cell) -> None:
        """Marks a cell as the next one."""
        self._running[cell.name] = "begins"
        self.draw()

    def saw(self, cell: Cell, rounds: int) -> None:
        """Takes the rounds that a cell has recorded elsewhere, of all its methods together."""
        done = min(rounds, self._work[cell.name])
        new = self._left[cell.name] - (self._work[cell.name] - done)
        if new or cell.name not in self._running:
            self._ran, self._left[cell.name] = self._ran + new, self._left[cell.name] - new
            self._running[cell.name] = f"{done:,.0f} of {self._work[cell.name]:,.0f} rounds"
            self.draw()

    def ended(self, cell: Cell, rows: Sequence[Row]) -> None:
        """Takes the results of a cell; none if it failed."""
        del self._left[cell.name]
        self._running.pop(cell.name, None)
        best = best_of(rows) if rows else None
        if best is not None:
            said = f"{best.method} {shown_score(best)} by {best.setting}"
            self._bests = [*self._bests, f"best at {cell.name}: {said}"][-BESTS:]
        self.draw()

    @contextmanager
    def program(self, names: Sequence[str], rounds: int) -> Iterator[Tell]:
        """Looks on while the algorithms of one program run."""
        before, what = 0, called(names)
        (cell,) = self._running

        def tell(done: int, note: str) -> None:
            nonlocal before
            new = (done - before) * len(names)
            self._ran, before = self._ran + new, done
            self._left[cell] -= new
            self._running[cell] = f"{what}, round {done} of {rounds}, {note}"
            self.draw()

        self._running[cell] = f"{what}, compiling"
        self.draw()
        yield tell

    def lines(self) -> list[str]:
        """Returns the displayed text."""
        done = len(self._work) - len(self._left)
        spent, left = self._now() - self._began, sum(self._left.values())
        first = f"{done} of {counted(len(self._work), 'cell')} done, {_time(spent)}"
        if self._ran:
            first += f", about {_time(spent / self._ran * left)} left"
        running = [f"{cell}: {note}" for cell, note in self._running.items()]
        return [first, *running, *self._bests]

    def draw(self) -> None:
        """Replaces the displayed text."""
        width = os.get_terminal_size(self._terminal.fileno()).columns or 80
        lines = [line[: width - 1] for line in self.lines()]
        self._terminal.write(self._erasing() + "".join(f"{line}\n" for line in lines))
        self._terminal.flush()
        self._drawn = len(lines)

    def erase(self) -> None:
        """Leaves the terminal as if it had not been."""
        self._terminal.write(self._erasing())
        self._terminal.flush()
        self._drawn = 0

    def _erasing(self) -> str:
        return f"\x1b[{self._drawn}F\x1b[J" if self._drawn else ""


class _Above:
    """A stream to the terminal of a view: whole lines are written above it."""

    def __init__(self, view: View, stream: TextIO) -> None:
        self._view, self._stream, self._begun = view, stream, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        lines, end, begun = (self._begun + text).rpartition("\n")
        self._begun = begun
        if end:
            self._put(f"{lines}\n")
            self._view.draw()
        return len(text)

    def close_line(self) -> None:
        """Writes an unfinished last line."""
        if self._begun:
            self._put(self._begun)
            self._begun = ""

    def _put(self, text: str) -> None:
        self._view.erase()
        self._stream.write(text)
        self._stream.flush()


class Plain:
    """The view without a terminal: it shows only progress bars, if they are allowed."""

    program = staticmethod(bar)

    def begins(self, cell: Cell) -> None:
        """Does nothing."""

    def saw(self, cell: Cell, rounds: int) -> None:
        """Does nothing."""

    def ended(self, cell: Cell, rows: Sequence[Row]) -> None:
        """Does nothing."""


@contextmanager
def viewed(study: Study) -> Iterator[View | Plain]:
    """Opens a view at the bottom of the terminal; a plain one if stderr is not a terminal."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield Plain()
        return
    view, before = View(study, sys.stderr), (sys.stdout, sys.stderr)
    above: list[Any] = [_Above(view, s) if s.isatty() else s for s in before]
    sys.stdout, sys.stderr = above
    try:
        yield view
    finally:
        sys.stdout, sys.stderr = before
        view.erase()
        for stream in above:
            if isinstance(stream, _Above):
                stream.close_line()
        view.erase()


def _work(cell: Cell) -> float:
    return cell.config.experiment.rounds * len(cell.config.algorithms)


def _time(seconds: float) -> str:
    """Writes a time in words.

    >>> _time(42.4), _time(200), _time(7300), _time(200_000)
    ('42 s', '3 min', '2 h 2 min', '2 d 7 h')
    """
    minutes = round(seconds / 60)
    if minutes < 2:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    if hours < 24:
        return f"{hours} h {minutes % 60} min"
    return f"{hours // 24} d {hours % 24} h"
