"""A live view of a study: a few lines at the bottom of a terminal."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TextIO

from fedjax_sim.base.words import counted, duration
from fedjax_sim.cli.studies.plan import Cell
from fedjax_sim.cli.studies.results import Row, best_of
from fedjax_sim.cli.watching import Forecast, Job, bar, called
from fedjax_sim.run.progress import Report

BESTS = 3
"""Finished cells whose best method is shown, the newest."""


Shares = Mapping[str, tuple[float, float]]
"""How far a cell's methods are: the share of the rounds of each, and its seconds so far."""


class Plain:
    """The view without a terminal: progress bars if they are allowed, and the time left.

    Args:
        cells: what runs.
        done: how far an earlier run has come, by cell.
        now: clock in seconds, for the time left.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        done: Mapping[str, Shares],
        now: Callable[[], float],
    ) -> None:
        self._jobs = {c.name: [Job(c.name, label) for label in c.config.algorithms] for c in cells}
        work = {job: _work(c, job.label) for c in cells for job in self._jobs[c.name]}
        self.forecast, self._now = Forecast(work, now), now
        self._seen = {cell: dict(shares) for cell, shares in done.items()}
        for cell, shares in done.items():
            for label, (share, seconds) in shares.items():
                self.forecast.found(Job(cell, label), share, seconds)

    def begins(self, cell: Cell) -> None:
        """Marks a cell as the next one."""
        self._cell = cell.name

    def saw(self, cell: Cell, shares: Shares) -> bool:
        """Takes how far a cell is elsewhere; returns whether it has come further."""
        seen, further = self._seen.setdefault(cell.name, {}), False
        for label, (share, seconds) in shares.items():
            before, spent = seen.get(label, (0.0, 0.0))
            if share > before:  # a cell that goes on records its first rounds again
                self.forecast.ran([Job(cell.name, label)], share, max(0.0, seconds - spent))
                seen[label], further = (share, seconds), True
        return further

    def ended(self, cell: Cell, rows: Sequence[Row]) -> None:
        """Takes the results of a cell; none if it failed."""
        self.forecast.ended(self._jobs[cell.name])

    @contextmanager
    def program(self, names: Sequence[str], rounds: int, done: int = 0) -> Iterator[Report]:
        """Looks on while the algorithms of one program run."""
        with (
            self.shows(names, rounds, done) as shown,
            self.forecast.program(self._cell, names, rounds, done) as advance,
        ):

            def tell(done: int, note: str) -> None:
                advance(done)
                shown(done, note)

            yield tell

    def shows(self, names: Sequence[str], rounds: int, done: int) -> AbstractContextManager[Report]:
        """Shows how far one program is."""
        return bar(names, rounds, done)

    @property
    def left(self) -> str:
        """The time left after a comma; nothing while it is unknown."""
        return f", {left}" if (left := str(self.forecast)) else ""


class View(Plain):
    """How far a study is: cells, rounds, the best so far, the time left.

    What else is printed scrolls above it. It is drawn anew when something is known, by no thread.
    """

    def __init__(
        self,
        terminal: TextIO,
        cells: Sequence[Cell],
        done: Mapping[str, Shares],
        now: Callable[[], float],
    ) -> None:
        super().__init__(cells, done, now)
        self._terminal, self._began, self._drawn = terminal, now(), 0
        self._ended = set[str]()
        self._running = dict[str, str]()  # cells, and what is said of each
        self._bests: list[str] = []

    def begins(self, cell: Cell) -> None:
        """Marks a cell as the next one."""
        super().begins(cell)
        self._running[cell.name] = "begins"
        self.draw()

    def saw(self, cell: Cell, shares: Shares) -> bool:
        """Takes how far a cell is elsewhere; returns whether it has come further."""
        further = super().saw(cell, shares)
        if further or cell.name not in self._running:
            rounds, seen = cell.config.experiment.rounds, self._seen[cell.name]
            done = rounds * sum(share for share, _ in seen.values())
            total = rounds * len(self._jobs[cell.name])
            self._running[cell.name] = f"{done:,.0f} of {total:,} rounds"
            self.draw()
        return further

    def ended(self, cell: Cell, rows: Sequence[Row]) -> None:
        """Takes the results of a cell; none if it failed."""
        super().ended(cell, rows)
        self._ended.add(cell.name)
        self._running.pop(cell.name, None)
        best = best_of(rows) if rows else None
        if best is not None:
            said = f"{best.method} {best.text} by {best.setting}"
            self._bests = [*self._bests, f"best at {cell.name}: {said}"][-BESTS:]
        self.draw()

    @contextmanager
    def shows(self, names: Sequence[str], rounds: int, done: int) -> Iterator[Report]:
        """Shows how far one program is."""
        what, cell = called(names), self._cell

        def tell(done: int, note: str) -> None:
            self._running[cell] = f"{what}, round {done} of {rounds}, {note}"
            self.draw()

        self._running[cell] = f"{what}, compiling"
        self.draw()
        yield tell

    def lines(self) -> list[str]:
        """Returns the displayed text."""
        done, spent = len(self._ended), self._now() - self._began
        cells = counted(len(self._jobs), "cell")
        first = f"{done} of {cells} done, {duration(spent)}{self.left}"
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


@contextmanager
def viewed(
    cells: Sequence[Cell],
    done: Mapping[str, Shares],
    now: Callable[[], float] = time.monotonic,
) -> Iterator[Plain]:
    """Opens a view at the bottom of the terminal; a plain one if stderr is not a terminal."""
    if not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield Plain(cells, done, now)
        return
    view, before = View(sys.stderr, cells, done, now), (sys.stdout, sys.stderr)
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


def _work(cell: Cell, label: str) -> float:
    """Returns how much a method has to do in a cell beside others, as far as settings tell."""
    config, at = cell.config, cell.config.experiment
    runs = len(at.seeds) * (config.scores.folds or 1)
    clients = 1.0 if at.clients_per_round is None else at.clients_per_round / (at.clients or 1)
    return at.rounds * runs * clients * config.training_of(label).epochs
