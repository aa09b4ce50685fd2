"""The time to the end of several algorithms."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from fedjax_sim.base.words import duration
from fedjax_sim.cli.methods import name_of


class Job(NamedTuple):
    """An algorithm such as ``fedprox(mu=0.1)``, of a run such as a cell of a study."""

    run: str
    label: str


class Forecast:
    """The time to the end of several jobs.

    Only rounds that run now count, not those of a checkpoint or of a job that was done before. They
    are weighted by the seconds that a method has needed so far, in an earlier run too; a method
    that has not run yet is expected to need the mean of the others.

    Args:
        work: how much each job has to do, in any unit, such as rounds times clients.
        now: clock in seconds.

    >>> clock = [0.0]
    >>> forecast = Forecast({Job("", "fedavg"): 10, Job("", "fedprox"): 20}, lambda: clock[0])
    >>> with forecast.program("", ["fedavg"], rounds=100, done=50) as advance:
    ...     clock[0] = 60.0
    ...     advance(75)  # 2.5 in a minute, and 22.5 are left
    >>> str(forecast)
    'about 9 min left'
    """

    def __init__(
        self, work: Mapping[Job, float], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._work, self._now = work, now
        self._share = dict.fromkeys(work, 0.0)  # of each job, what is done
        self._ran = dict.fromkeys(work, 0.0)  # ... by this process or its workers
        self._spent = dict[str, tuple[float, float]]()  # by method: seconds, and work in them
        self._began = now()

    def found(self, job: Job, share: float, seconds: float = 0.0) -> None:
        """Takes the share of a job that an earlier run has done, and its seconds if known."""
        self._share[job] = share
        if seconds:
            self._learn(job, share, seconds)

    def ran(self, jobs: Sequence[Job], share: float, seconds: float) -> None:
        """Takes the share that jobs of one program have reached in some more seconds."""
        for job in jobs:
            new = share - self._share[job]
            if new > 0:  # else it is a round of a checkpoint
                self._share[job], self._ran[job] = share, self._ran[job] + new
                self._learn(job, new, seconds / len(jobs))

    def ended(self, jobs: Sequence[Job]) -> None:
        """Marks jobs as done, before their last round too."""
        self._share |= dict.fromkeys(jobs, 1.0)

    @contextmanager
    def program(
        self, run: str, names: Sequence[str], rounds: int, done: int
    ) -> Iterator[Callable[[int], None]]:
        """Opens a context for the algorithms of one program, which takes the rounds done so far."""
        jobs, last = [Job(run, name) for name in names], self._now()
        if not any(self._ran.values()):
            self._began = last  # until now it only read what was done before
        for job in jobs:
            self.found(job, done / rounds)

        def advance(done: int) -> None:
            nonlocal last
            now = self._now()
            self.ran(jobs, done / rounds, now - last)
            last = now

        yield advance

    @property
    def seconds(self) -> float | None:
        """The seconds to the end, compiling included; None while no round has run."""
        spent, work = map(sum, zip(*self._spent.values(), strict=True)) if self._spent else (0, 0)
        costs = {method: s / w for method, (s, w) in self._spent.items()}
        by_job = {
            job: size * costs.get(name_of(job.label), spent / work if work else 0.0)
            for job, size in self._work.items()
        }
        ran = sum(cost * self._ran[job] for job, cost in by_job.items())
        if not ran:
            return None
        left = sum(cost * (1 - self._share[job]) for job, cost in by_job.items())
        return (self._now() - self._began) * left / ran

    def __str__(self) -> str:
        seconds = self.seconds
        return f"about {duration(seconds)} left" if seconds else ""

    def _learn(self, job: Job, share: float, seconds: float) -> None:
        method = name_of(job.label)
        before, work = self._spent.get(method, (0.0, 0.0))
        self._spent[method] = before + seconds, work + share * self._work[job]
