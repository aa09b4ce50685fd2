"""``--clock``: the devices, links and deadlines of a run, as one text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from fedjax_sim.base import Clock, calls, shown
from fedjax_sim.base.registry import UnknownNameError
from fedjax_sim.cli.flags import naming, offering
from fedjax_sim.cli.parts import value
from fedjax_sim.cli.settings import Group, setting
from fedjax_sim.plan.clock import simulated, traced
from fedjax_sim.round import Algorithm
from fedjax_sim.run import Result

CLOCKS = (
    "constant(seconds)", "lognormal(median, sigma)", "pareto(least, alpha)", "tiers(seconds, ...)",
    "simulated(...)", "FILE.csv",
)  # fmt: skip
"""The forms of a clock, for messages."""


def _converted(text: str) -> str:
    """Returns the canonical text of a clock."""
    try:
        found = _clock(text)
        return text if text.endswith(".csv") else shown(found)
    except (ValueError, TypeError) as error:
        message = str(error)
        name = text.partition("(")[0]
        if isinstance(error, UnknownNameError) and message.startswith(f"unknown clock {name!r}"):
            message = str(offering(error, CLOCKS))
        named = message if message.startswith(text) else f"{text}: {message}"
        raise ValueError(named) from error


def _clock(text: str) -> Clock:
    """Returns the clock of a text: a clock, the seconds of a local step, or a trace file."""
    if text.endswith(".csv"):
        return traced(text)
    found = value("clock", calls.parse(text), {})
    return found if isinstance(found, Clock) else simulated(found)


@dataclasses.dataclass(frozen=True)
class Timing(Group):
    """The duration of rounds, with the same devices for all algorithms."""

    title: ClassVar[str] = "simulated time, for all algorithms"

    clock: str | None = setting(
        None,
        "seconds of a local step by device: constant(seconds), lognormal(median, sigma), "
        "pareto(least, alpha) or tiers(seconds, ...); or a clock such as 'simulated(tiers(1, "
        "2), bandwidth(1e6, 4e6), bernoulli(0.9), deadline=60)', see fs.clock.simulated; or a "
        "trace (.csv), see fs.clock.traced. A round lasts as long as its slowest client; "
        "fedasync and fedbuff collect the clients that return first",
        shown="no clock",
        metavar="TEXT",
        convert=_converted,
    )


def make_clock(timing: Timing) -> Clock | None:
    """Returns the clock of the settings; None without one.

    >>> make_clock(Timing(clock="tiers(1, 2)"))
    simulated(tiers(1, 2))
    """
    return None if timing.clock is None else _clock(timing.clock)


def timed(algorithm: Algorithm, timing: Timing) -> Algorithm:
    """Returns the algorithm on the clock of the settings."""
    if timing.clock is None:
        return algorithm
    with naming(f"--clock {timing.clock}"):
        return algorithm.replace(clock=make_clock(timing))


def time_entries(result: Result, clock: Clock | None) -> dict[str, Any]:
    """Returns the entries of ``summary.json`` about time, the mean over R runs.

    ``idle_share`` is the fraction of the seconds in which clients could have had a model that they
    waited for the server; energy is in watt-hours.
    """
    time = result.metrics.time
    if time is None:
        return {}
    held = float(np.sum(time.held, dtype=np.float64))
    summary: dict[str, Any] = {
        "seconds": float(result.seconds[-1].mean()),
        "idle_share": float(np.sum(time.waiting, dtype=np.float64)) / held if held else 0.0,
    }
    for name in ("asleep", "lost", "late"):
        summary[name] = float(getattr(time, name).sum(axis=1).mean())
    if clock is not None and clock.watts is not None:
        computing = float(np.sum(time.computing, axis=1, dtype=np.float64).mean())
        summary["watt_hours"] = clock.watts * computing / 3600
    return summary


def describe(summary: Mapping[str, Any]) -> str:
    """Returns the line about the time of a run.

    >>> describe({"idle_share": 0.25, "asleep": 0.0, "lost": 1.5, "late": 3.0, "watt_hours": 2.0})
    'clients waited 25 % of the time for the end of a round; 1.5 lost, 3 late; 2 Wh (a run)'
    """
    counts = [f"{summary[n]:g} {n}" for n in ("asleep", "lost", "late") if summary[n]]
    energy = [f"{summary['watt_hours']:.3g} Wh"] if "watt_hours" in summary else []
    waited = (
        f"clients waited {100 * summary['idle_share']:.0f} % of the time for the end of a round"
    )
    rest = "; ".join([", ".join(counts)] * bool(counts) + energy)
    return f"{waited}; {rest} (a run)" if rest else waited
