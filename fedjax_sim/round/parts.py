"""The parts of an algorithm, by role."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedjax_sim.base import (
    Aggregator,
    Broadcast,
    Diagnostic,
    LocalUpdate,
    Personal,
    PreAggregation,
    Redistribution,
    Refresh,
    Schedule,
    Selection,
    Server,
    Weighting,
)
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan.redistribution import keep


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
        weighting: how much each model counts.
        preaggregation: change models and weights before they are aggregated, in order.
        aggregator: reduces the models to one.
        server: how the server model moves.
        diagnostics: measure rounds, by name.
        personal: the model that a client itself uses; None: the one evaluated for all.
        execution: devices and chunks.
    """

    local: LocalUpdate
    selection: Selection
    schedule: Schedule
    broadcast: Broadcast
    redistribution: Redistribution
    refresh: Refresh
    weighting: Weighting
    preaggregation: tuple[PreAggregation, ...]
    aggregator: Aggregator
    server: Server
    diagnostics: Mapping[str, Diagnostic]
    personal: Personal | None
    execution: Execution

    def __post_init__(self) -> None:
        kinds: dict[str, Any] = {
            "local": LocalUpdate,
            "selection": Selection,
            "schedule": Schedule,
            "broadcast": Broadcast,
            "refresh": Refresh,
            "server": Server,
        }
        for name, kind in kinds.items():
            _check(f"{name} must be a", kind, getattr(self, name))
        for part in self.preaggregation:
            _check("preaggregation must be a sequence of", PreAggregation, part)
        for name, diagnostic in self.diagnostics.items():
            _check(f"diagnostics[{name!r}] must be a", Diagnostic, diagnostic)

    def by_role(self) -> dict[str, Any]:
        """The parts as the keyword arguments of ``compose``."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def slots(self) -> int:
        """S."""
        return len(self.schedule.group)

    @property
    def in_flight(self) -> bool:
        """Whether models outlive a round."""
        return self.schedule.period > 1

    @property
    def remembers(self) -> bool:
        """Whether the slots remember what they left the server with."""
        return self.broadcast.several and bool(self.preaggregation)

    @property
    def models_travel(self) -> bool:
        """Whether models go from client to client."""
        stays = self.selection.sticky and self.redistribution is keep
        return self.in_flight and not stays


def _check(wanted: str, kind: type, part: Any) -> None:
    """Refuses what is not of its kind: the function that makes a part, say."""
    if not isinstance(part, kind):
        raise ValueError(f"{wanted} {kind.__name__}, got {part!r}")
