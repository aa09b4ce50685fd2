"""Needs of what another part is set to: an optimiser's rate, the other half of a method."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedjax_sim.base import Array, Need, concrete

TOLD = "the optimiser that it is told of"


def sgd_of(name: str, lr: float, momentum: float) -> Need:
    """An optimiser that does as SGD of this rate and heavy-ball momentum does."""

    def met(parts: Any) -> bool:
        if parts.local.response is None:  # not known, which the part's docstring must say
            return True
        velocity, place, wanted = 0.0, 0.0, []
        for _ in range(3):
            velocity = momentum * velocity + 1
            place += lr * velocity
            wanted.append(place)
        found = parts.local.response(len(wanted))
        if not concrete(*wanted, *found):
            return True  # as little is known of a rate that is traced
        return bool(np.allclose(found, wanted, rtol=1e-3, atol=0))

    with_momentum = f", momentum={momentum}" if momentum else ""
    return Need(
        "local",
        f"{TOLD}, optax.sgd({lr}{with_momentum})",
        met,
        f"local_sgd(objective, optax.sgd({lr}{with_momentum})), or tell it another {name}",
    )


def dual_server(alpha: float | Array) -> Need:
    """The other half of clients that keep h_k: a server that keeps their mean, or FedADMM's."""
    return Need(
        "server",
        "the same alpha",
        lambda parts: parts.local.reflects or _same(parts.server.dual, alpha),
        f"server=dynamic({alpha}), or local.reflected around the local update",
    )


def dual_clients(alpha: float | Array) -> Need:
    """The other half of a server that keeps the mean of h_k: clients that keep them."""

    def met(parts: Any) -> bool:
        duals = [term.dual for term in parts.local.corrections if term.dual is not None]
        return not parts.local.reflects and len(duals) == 1 and _same(duals[0], alpha)

    instead = f"local.change(corrections=(corrections.dynamic({alpha}),))"
    return Need("local", "clients with the same alpha", met, instead)


def slots_told(slots: int, *, most: bool = False) -> Need:
    """A schedule of as many slots as a part is told of, or of no more."""
    return Need(
        "schedule",
        f"{'at most ' if most else ''}the {slots} slots that it is told of",
        lambda parts: parts.slots == slots or (most and parts.slots < slots),
        f"schedule=every_round({slots})",
    )


def _same(a: float | Array | None, b: float | Array) -> bool:
    """Whether two settings are equal; of traced ones only that both are given is known."""
    return a is not None and (a is b or not concrete(a, b) or bool(a == b))
