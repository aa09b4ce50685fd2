"""The parts of an algorithm, by role."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import (
    Aggregator,
    Broadcast,
    Clock,
    Diagnostic,
    Exchange,
    Finish,
    Flight,
    LearnedRedistribution,
    LocalUpdate,
    Personal,
    PreAggregation,
    Selection,
    Sending,
    Server,
    Weighting,
    shown,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.execution import Execution
from fedjax_sim.plan.exchange import everything
from fedjax_sim.plan.flight import every_round
from fedjax_sim.round.fit import check_parts
from fedjax_sim.server.broadcast import latest
from fedjax_sim.server.update import replace
from fedjax_sim.server.weighting import by_samples

_PLAIN: Mapping[str, Any] = {
    "broadcast": latest(),
    "flight": every_round(),
    "exchange": everything(),
    "weighting": by_samples,
    "sending": (),
    "preaggregation": (),
    "aggregator": tree.mean,
    "server": replace(),
    "diagnostics": {},
    "finish": None,
    "personal": None,
    "clock": None,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """The arguments of :func:`compose <fedjax_sim.compose>`, with defaults filled in."""

    local: LocalUpdate
    clients_per_round: int
    selection: Selection
    flight: Flight
    broadcast: Broadcast
    exchange: Exchange
    sending: tuple[Sending, ...]
    weighting: Weighting
    preaggregation: tuple[PreAggregation, ...]
    aggregator: Aggregator
    server: Server
    diagnostics: Mapping[str, Diagnostic]
    finish: Finish | None
    personal: Personal | None
    clock: Clock | None
    execution: Execution

    def __post_init__(self) -> None:
        check_parts(self)

    def by_role(self) -> dict[str, Any]:
        """Returns the parts as keyword arguments of ``compose``."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def written(self) -> list[str]:
        """Returns a line of code for each part that differs from the default."""
        return [
            f"  {role}={shown(value)},"
            for role, value in self.by_role().items()
            if role != "execution" and (role not in _PLAIN or value != _PLAIN[role])
        ]

    @property
    def slots(self) -> int:
        """S, the number of models that train in a round."""
        return self.flight.collected(self.clients_per_round)

    @property
    def group(self) -> NDArray[np.int32]:
        """``int32[S]``: slots of one group are due together."""
        return self.flight.group(self.slots)

    @property
    def group_sizes(self) -> list[int]:
        """The number of slots in each group."""
        return np.unique(self.group, return_counts=True)[1].tolist()

    @property
    def in_flight(self) -> bool:
        """Whether models stay in flight after a round."""
        return self.flight.period > 1

    @property
    def asynchronous(self) -> bool:
        """Whether a round collects the models that return first, whenever they were sent."""
        return self.flight.asynchronous

    @property
    def remembers(self) -> bool:
        """Whether the slots store the models that they left the server with."""
        # A client without the newest server model sends its change from the model it received.
        unknown = len(self.group_sizes) > 1 and self.flight.refresh is None
        several = self.broadcast.several or self.asynchronous
        return several or (unknown and bool(self.sending))

    @property
    def weighted(self) -> bool:
        """Whether each model travels with a weight (push-sum)."""
        return getattr(self.flight.redistribution, "weighted", False)

    @property
    def learned(self) -> LearnedRedistribution | None:
        """The redistribution, if it depends on the models."""
        found = self.flight.redistribution
        return found if isinstance(found, LearnedRedistribution) else None

    @property
    def beside(self) -> int:
        """Numbers that travel with each model between clients."""
        return int(self.weighted) if self.learned is None else self.learned.beside

    @property
    def relays(self) -> int:
        """The servers between the clients and the server."""
        return 0 if self.learned is None else self.learned.relays

    @property
    def holds_updates(self) -> bool:
        """Whether the updates of a cohort are stored together; else they are summed one by one."""
        several = (self.sending, self.preaggregation, self.diagnostics, self.exchange.fragments)
        reads = self.server.reads_updates or self.broadcast.reads_updates or self.local.follow
        held = any(several) or bool(reads) or self.in_flight or self.aggregator is not tree.mean
        held = held or self.exchange.coverage is not None
        return held or self.loses or self.asynchronous or self.selection.see is not None

    @property
    def loses(self) -> bool:
        """Whether visits of a round may be lost, which is only known after the visit."""
        return self.clock is not None and self.clock.loses and not self.asynchronous

    @property
    def whole_uploads(self) -> bool:
        """Whether uploads are whole: the receiver does not know the model that the sender had."""
        return self.flight.serverless or (self.selection.sticky and self.models_travel)

    @property
    def measured(self) -> bool:
        """Whether the bytes of uploads depend on the updates."""
        whole = self.whole_uploads or bool(self.exchange.fragments)
        return not whole and any(part.measured for part in self.sending)

    @property
    def timed_later(self) -> bool:
        """Whether uploads have a known duration only after they are sent."""
        varies = self.measured or any(part.withholds for part in self.sending)
        return varies and self.clock is not None and not self.asynchronous

    @property
    def models_travel(self) -> bool:
        """Whether models move from client to client."""
        stays = self.selection.sticky and self.flight.redistribution is None
        return self.in_flight and not stays


def as_tuple(role: str, parts: Any) -> tuple[Any, ...]:
    """Converts a sequence of parts to a tuple; rejects a single part."""
    # A NamedTuple is a sequence too.
    if not isinstance(parts, Sequence) or hasattr(parts, "_fields"):
        raise ValueError(f"{role} must be a sequence of parts, such as (part,), got {parts!r}")
    return tuple(parts)


def as_dict(diagnostics: Any) -> dict[str, Diagnostic]:
    """Converts diagnostics to a dict; rejects other types."""
    if not isinstance(diagnostics, Mapping | None):
        raise ValueError(f"diagnostics must be a dict of parts by name, got {diagnostics!r}")
    return dict(diagnostics or {})
