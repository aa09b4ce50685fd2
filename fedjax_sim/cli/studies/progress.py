"""How far a study is, and the time left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from fedjax_sim.cli.studies.plan import Cell
from fedjax_sim.cli.watching import Forecast, Job, bar
from fedjax_sim.run.progress import Report

Shares = Mapping[str, tuple[float, float]]
"""How far a cell's methods are: the share of the rounds of each, and its seconds so far."""


class Progress:
    """How far the cells are: the time left, and a progress bar for the program that runs.

    Args:
        cells: what runs.
        done: how far an earlier run has come, by cell.
        now: clock in seconds, for the time left.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        done: Mapping[str, Shares],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._jobs = {c.name: [Job(c.name, label) for label in c.config.algorithms] for c in cells}
        work = {job: _work(c, job.label) for c in cells for job in self._jobs[c.name]}
        self.forecast = Forecast(work, now)
        self._seen = {cell: dict(shares) for cell, shares in done.items()}
        for cell, shares in done.items():
            for label, (share, seconds) in shares.items():
                self.forecast.found(Job(cell, label), share, seconds)

    def begins(self, cell: Cell) -> None:
        """Marks a cell as the next one."""
        self._cell = cell.name

    def saw(self, cell: Cell, shares: Shares) -> None:
        """Takes how far a cell is elsewhere."""
        seen = self._seen.setdefault(cell.name, {})
        for label, (share, seconds) in shares.items():
            before, spent = seen.get(label, (0.0, 0.0))
            if share > before:  # a cell that goes on records its first rounds again
                self.forecast.ran([Job(cell.name, label)], share, max(0.0, seconds - spent))
                seen[label] = share, seconds

    def ended(self, cell: Cell) -> None:
        """Marks a cell as done, or failed."""
        self.forecast.ended(self._jobs[cell.name])

    @contextmanager
    def program(self, names: Sequence[str], rounds: int, done: int = 0) -> Iterator[Report]:
        """Looks on while the algorithms of one program run."""
        with (
            bar(names, rounds, done) as shown,
            self.forecast.program(self._cell, names, rounds, done) as advance,
        ):

            def tell(done: int, note: str) -> None:
                advance(done)
                shown(done, note)

            yield tell

    @property
    def left(self) -> str:
        """The time left after a comma; nothing while it is unknown."""
        return f", {left}" if (left := str(self.forecast)) else ""


def _work(cell: Cell, label: str) -> float:
    """Returns how much a method has to do in a cell beside others, as far as settings tell."""
    config, at = cell.config, cell.config.experiment
    runs = len(at.seeds) * (config.scores.folds or 1)
    clients = 1.0 if at.clients_per_round is None else at.clients_per_round / (at.clients or 1)
    return at.rounds * runs * clients * config.training_of(label).epochs
