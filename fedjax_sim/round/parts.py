"""The parts of an algorithm, by role."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fedjax_sim.base import (
    Aggregator,
    AnyRedistribution,
    Broadcast,
    Clock,
    Diagnostic,
    Exchange,
    Finish,
    LearnedRedistribution,
    LocalUpdate,
    Personal,
    PreAggregation,
    Refresh,
    Schedule,
    Selection,
    Sending,
    Server,
    Weighting,
    shown,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan.redistribution import keep
from fedjax_sim.round.fit import check_parts

Evaluated = Literal["server", "in_flight"]

_PLAIN = {
    "broadcast": "latest()",
    "redistribution": "keep",
    "refresh": "nothing()",
    "exchange": "everything()",
    "weighting": "by_samples",
    "sending": "()",
    "preaggregation": "()",
    "aggregator": "mean",
    "server": "replace()",
    "diagnostics": "{}",
    "finish": "None",
    "personal": "None",
    "clock": "None",
    "evaluated": "'server'",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """What ``compose`` was given, with its defaults filled in; see there.

    Attributes:
        local: trains one model on one client.
        selection: which client each slot visits.
        schedule: which slots are due when.
        broadcast: which model a slot starts from.
        redistribution: where models go between rounds.
        refresh: what a slot that was not due takes from the server.
        exchange: what of a model travels.
        sending: what clients send in place of their updates, in order.
        weighting: how much each model counts.
        preaggregation: change updates and weights before they are aggregated, in order.
        aggregator: reduces the updates to one.
        server: how the server model moves.
        diagnostics: measure rounds, by name.
        finish: what is done after the last round; None: nothing.
        personal: the model that a client itself uses; None: the one evaluated for all.
        evaluated: the model that is evaluated for all.
        clock: how long a round takes, and who is there; None: it takes no time.
        execution: devices and chunks.
    """

    local: LocalUpdate
    selection: Selection
    schedule: Schedule
    broadcast: Broadcast
    redistribution: AnyRedistribution
    refresh: Refresh
    exchange: Exchange
    sending: tuple[Sending, ...]
    weighting: Weighting
    preaggregation: tuple[PreAggregation, ...]
    aggregator: Aggregator
    server: Server
    diagnostics: Mapping[str, Diagnostic]
    finish: Finish | None
    personal: Personal | None
    evaluated: Evaluated
    clock: Clock | None
    execution: Execution

    def __post_init__(self) -> None:
        check_parts(self)

    def by_role(self) -> dict[str, Any]:
        """The parts as the keyword arguments of ``compose``."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def written(self) -> list[str]:
        """A line for each part, as it would be written; those that do nothing are left out."""
        return [
            f"  {role}={text},"
            for role, value in self.by_role().items()
            if role != "execution" and (text := shown(value)) != _PLAIN.get(role)
        ]

    @property
    def slots(self) -> int:
        """S."""
        return len(self.schedule.group)

    @property
    def in_flight(self) -> bool:
        """Whether models outlive a round."""
        return self.schedule.period > 1

    @property
    def asynchronous(self) -> bool:
        """Whether a round takes the models that come back first, whenever they were sent."""
        return self.schedule.at_work is not None

    @property
    def remembers(self) -> bool:
        """Whether the slots remember what they left the server with."""
        # A client that does not follow the server model sends its change from what it received.
        unknown = len(self.schedule.group_sizes) > 1 and not self.refresh.downloads
        several = self.broadcast.several or self.asynchronous
        return several or (unknown and bool(self.sending))

    @property
    def weighted(self) -> bool:
        """Whether a weight travels beside each model (push-sum)."""
        return getattr(self.redistribution, "weighted", False)

    @property
    def learned(self) -> LearnedRedistribution | None:
        """The redistribution, if it looks at the models."""
        found = self.redistribution
        return found if isinstance(found, LearnedRedistribution) else None

    @property
    def beside(self) -> int:
        """The numbers that travel with each model between clients."""
        return int(self.weighted) if self.learned is None else self.learned.beside

    @property
    def holds_updates(self) -> bool:
        """Whether the updates of a cohort are held together; else they are summed one by one."""
        several = (self.sending, self.preaggregation, self.diagnostics, self.exchange.fragments)
        reads = self.server.reads_updates or self.broadcast.reads_updates or self.local.follow
        held = any(several) or bool(reads) or self.in_flight or self.aggregator is not tree.mean
        return held or self.loses or self.asynchronous or self.selection.see is not None

    @property
    def loses(self) -> bool:
        """Whether a visit of a round may come to nothing, which is known after it."""
        return self.clock is not None and self.clock.loses and not self.asynchronous

    @property
    def models_travel(self) -> bool:
        """Whether models go from client to client."""
        stays = self.selection.sticky and self.redistribution is keep
        return self.in_flight and not stays


def tupled(role: str, parts: Any) -> tuple[Any, ...]:
    """A sequence of parts as a tuple; refuses a part alone."""
    # A part alone is a sequence too, of its functions.
    if not isinstance(parts, Sequence) or hasattr(parts, "_fields"):
        raise ValueError(f"{role} must be a sequence of parts, such as (part,), got {parts!r}")
    return tuple(parts)


def named(diagnostics: Any) -> dict[str, Diagnostic]:
    """Diagnostics as a dict; refuses what is none."""
    if not isinstance(diagnostics, Mapping | None):
        raise ValueError(f"diagnostics must be a dict of parts by name, got {diagnostics!r}")
    return dict(diagnostics or {})
