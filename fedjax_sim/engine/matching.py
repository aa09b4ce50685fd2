"""Needs that depend on settings: an optimiser's rate, the other half of a method, a cohort."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedjax_sim.base import Array, Need, concrete

ASSUMED = "the optimiser that its settings assume"
FROM_NEWEST = Need(
    "flight",
    "updates that are sent as changes of the newest server model",
    lambda parts: not parts.remembers,
    "flight=every_round() or delayed(rounds), or refresh=drift_correction()",
)


def sgd_of(name: str, lr: float, momentum: float) -> Need:
    """Returns the need of an optimiser that acts like SGD with this rate and momentum."""

    def met(parts: Any) -> bool:
        if parts.local.response is None:  # unknown, which the part's docstring must say
            return True
        velocity, place, wanted = 0.0, 0.0, []
        for _ in range(3):
            velocity = momentum * velocity + 1
            place += lr * velocity
            wanted.append(place)
        found = parts.local.response(len(wanted))
        if not concrete(*wanted, *found):
            return True  # a traced rate is unknown too
        return bool(np.allclose(found, wanted, rtol=1e-3, atol=0))

    sgd = f"optax.sgd({lr}{f', momentum={momentum}' if momentum else ''})"
    instead = f"local_sgd(objective, {sgd}), or give it another {name}"
    return Need("local", f"{ASSUMED}, {sgd}", met, instead)


def dual_server(alpha: float | Array) -> Need:
    """Returns the need of clients that keep h_k: a server that keeps their mean, or FedADMM's."""
    return Need(
        "server",
        "the same alpha",
        lambda parts: parts.local.reflects or _same(parts.server.dual, alpha),
        f"server=dynamic({alpha}), or local.fedadmm around the local update",
    )


def dual_clients(alpha: float | Array) -> Need:
    """Returns the need of a server that keeps the mean of h_k: clients that keep them."""

    def met(parts: Any) -> bool:
        duals = [term.dual for term in parts.local.corrections if term.dual is not None]
        return not parts.local.reflects and len(duals) == 1 and _same(duals[0], alpha)

    instead = f"local.change(corrections=(corrections.dynamic({alpha}),))"
    return Need("local", "clients with the same alpha", met, instead)


def slots_of(slots: int, *, most: bool = False) -> Need:
    """Returns the need of this number of slots, or of at most this number."""
    return Need(
        "clients_per_round",
        f"{'at most' if most else 'exactly'} {slots} slots",
        lambda parts: parts.slots == slots or (most and parts.slots < slots),
        f"clients_per_round={slots}",
    )


def _same(a: float | Array | None, b: float | Array) -> bool:
    """Returns whether two settings are equal; traced settings count as equal if both are given."""
    return a is not None and (a is b or not concrete(a, b) or bool(a == b))
