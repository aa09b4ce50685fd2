"""``--clock``: the devices, links and deadlines of a run, as texts."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fedjax_sim.base import Clock
from fedjax_sim.base.clock import Late
from fedjax_sim.cli.flags import flag, number
from fedjax_sim.cli.settings import Group, setting
from fedjax_sim.engine.memory import MB
from fedjax_sim.plan import clock
from fedjax_sim.plan.traces import ENDINGS
from fedjax_sim.round import Algorithm
from fedjax_sim.run import Result


class Form(NamedTuple):
    """A call as it is written.

    Attributes:
        text: with the names of its numbers.
        numbers: how many at least and at most.
        make: what it makes of them; raises ValueError if one is out of range.
    """

    text: str
    numbers: tuple[int, float]
    make: Callable[..., Any]


LAWS: Mapping[str, Form] = {
    "constant": Form("constant(seconds)", (1, 1), clock.constant),
    "lognormal": Form("lognormal(median, sigma)", (2, 2), clock.lognormal),
    "pareto": Form("pareto(least, alpha)", (2, 2), clock.pareto),
    "tiers": Form("tiers(seconds, ...)", (1, math.inf), clock.tiers),
}
LINKS: Mapping[str, Form] = {
    "own": Form("own(up, down)", (2, 2), lambda up, down: clock.bandwidth(up * MB, down * MB)),
    "shared": Form(
        "shared(up, down)",
        (2, 2),
        lambda up, down: clock.bandwidth(up * MB, down * MB, shared=True),
    ),
}
PRESENCE: Mapping[str, Form] = {
    "bernoulli": Form("bernoulli(p)", (1, 1), clock.bernoulli),
    "diurnal": Form("diurnal(share, seconds of a day)", (1, 2), clock.diurnal),
}


def _written(forms: Mapping[str, Form]) -> Callable[[str], str]:
    """An argparse type: a text of one of the forms, in the same words for the same one."""

    def convert(text: str) -> str:
        try:
            name, numbers, _ = _read(forms, text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return f"{name}({', '.join(f'{x:g}' for x in numbers)})"

    return convert


def _devices(text: str) -> str:
    """An argparse type: a law, or the file of a trace."""
    if not text.endswith(ENDINGS):
        return _written(LAWS)(text)
    try:
        clock.traced(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


@dataclasses.dataclass(frozen=True)
class Timing(Group):
    """How long a round takes; the same devices for all algorithms.

    Attributes:
        clock: the seconds of a local step, by device; None: rounds take no time.
        bandwidth: of the links; None: bytes travel in no time.
        availability: who is awake; None: everyone.
        failures: the probability that a client is lost in the middle of a visit; None for 0.
        deadline: the seconds of a round at most; None for any number.
        late: what becomes of clients that come later; None for "drop".
        first: the uploads that a round waits for; None for all.
        watts: of a device that computes; None: energy is not told.
    """

    title: ClassVar[str] = "simulated time, for all algorithms alike"

    clock: str | None = setting(
        None,
        f"seconds of a local step by device, {', '.join(form.text for form in LAWS.values())}, or "
        "a trace, see fs.clock.traced (.csv, .npz): rounds last as long as their slowest client; "
        "fedasync and fedbuff take those that come back first",
        shown="no clock",
        metavar="TEXT",
        convert=_devices,
    )
    bandwidth: str | None = setting(
        None,
        "MB per second, own(up, down) of each client, or shared(up, down): one uplink for all who "
        "upload in a round",
        shown="bytes travel in no time",
        metavar="TEXT",
        convert=_written(LINKS),
    )
    availability: str | None = setting(
        None,
        f"who is awake, {', '.join(form.text for form in PRESENCE.values())}",
        shown="everyone",
        metavar="TEXT",
        convert=_written(PRESENCE),
    )
    failures: float | None = setting(
        None,
        "probability that a client is lost in the middle of a visit",
        shown="0",
        at_least=0,
        below=1,
    )
    deadline: float | None = setting(
        None, "seconds after which the server closes a round", shown="none", above=0
    )
    late: Late | None = setting(
        None,
        "of a --deadline: drop what comes later, or let clients take the steps that leave time to "
        "send (partial)",
        shown="drop",
    )
    first: int | None = setting(
        None,
        "uploads after which the server closes a round: it drops the others (over-selection)",
        shown="all",
        at_least=1,
    )
    watts: float | None = setting(
        None, "of a device that computes: the summary tells the energy", shown="not told", above=0
    )

    def __post_init__(self) -> None:
        """Refuses settings of something that is not asked for."""
        for field in dataclasses.fields(self):
            if self.clock is None and getattr(self, field.name) is not None:
                raise ValueError(f"{flag(field.name)} is for --clock")
        for name in ("bandwidth", "availability"):
            if (self.clock or "").endswith(ENDINGS) and getattr(self, name) is not None:
                raise ValueError(
                    f"{flag(name)} is for a --clock that is no trace, which has its own"
                )
        if self.late is not None and self.deadline is None:
            raise ValueError("--late is for --deadline")


def made(timing: Timing) -> Clock | None:
    """The clock of the settings; None without one.

    >>> made(Timing(clock="tiers(1, 2)", bandwidth="own(0.5, 2)", deadline=30.0))
    simulated(tiers(1.0, 2.0), link=bandwidth(500000.0, 2000000.0), deadline=30.0)
    """
    if timing.clock is None:
        return None

    def part(forms: Mapping[str, Form], text: str | None) -> Any:
        return None if text is None else _read(forms, text)[2]

    names = ("failures", "deadline", "late", "first", "watts")
    rules = {name: getattr(timing, name) for name in names}
    rules = {name: value for name, value in rules.items() if value is not None}
    if timing.clock.endswith(ENDINGS):
        return clock.traced(timing.clock, **rules)
    parts = (LAWS, timing.clock), (LINKS, timing.bandwidth), (PRESENCE, timing.availability)
    return clock.simulated(*(part(*each) for each in parts), **rules)


def timed(algorithm: Algorithm, timing: Timing) -> Algorithm:
    """The algorithm on the clock of the settings.

    Raises:
        ValueError: if it has no rounds of a clock; names the flag.
    """
    if timing.clock is None:
        return algorithm
    try:
        return algorithm.replace(clock=made(timing))
    except ValueError as error:
        raise ValueError(f"--clock {timing.clock}: {error}") from error


def measured(result: Result, timing: Timing) -> dict[str, Any]:
    """What ``summary.json`` says of the time of a run, the mean over its R runs.

    ``idle_share`` is the part of the seconds in which clients waited for the server, of those in
    which they could have had a model; energy is in watt-hours.
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
    if timing.watts is not None:
        computing = float(np.sum(time.computing, axis=1, dtype=np.float64).mean())
        summary["watt_hours"] = timing.watts * computing / 3600
    return summary


def told(summary: Mapping[str, Any]) -> str:
    """The line about the time of a run.

    >>> told({"idle_share": 0.25, "asleep": 0.0, "lost": 1.5, "late": 3.0, "watt_hours": 2.0})
    'clients waited 25 % of the time for the end of a round; 1.5 lost, 3 late; 2 Wh (a run)'
    """
    counts = [f"{summary[n]:g} {n}" for n in ("asleep", "lost", "late") if summary[n]]
    energy = [f"{summary['watt_hours']:.3g} Wh"] if "watt_hours" in summary else []
    waited = (
        f"clients waited {100 * summary['idle_share']:.0f} % of the time for the end of a round"
    )
    rest = "; ".join([", ".join(counts)] * bool(counts) + energy)
    return f"{waited}; {rest} (a run)" if rest else waited


def _read(forms: Mapping[str, Form], text: str) -> tuple[str, list[float], Any]:
    """The name, the numbers and what they make.

    >>> _read(PRESENCE, " Bernoulli( 0.5 )")[:2]
    ('bernoulli', [0.5])
    """
    match = re.fullmatch(r"\s*(\w+)\s*\(([^()]*)\)\s*", text)
    form = forms.get(match[1].lower()) if match else None
    if match is None or form is None:
        known = ", ".join(form.text for form in forms.values())
        raise ValueError(f"must be one of {known}, got {text!r}")
    words = [word.strip() for word in match[2].split(",")] if match[2].strip() else []
    least, most = form.numbers
    if not least <= len(words) <= most:
        raise ValueError(f"must be written {form.text}, got {text!r}")
    try:
        numbers = [number(float)(word) for word in words]
        return match[1].lower(), numbers, form.make(*numbers)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"{form.text}: {error}") from error
