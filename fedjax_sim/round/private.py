"""The ε of a composition, if all parts are known to keep a mechanism's analysis valid."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_sim.base import ClientData, Need, Variables, shown
from fedjax_sim.engine.reading import reads_clients
from fedjax_sim.privacy import UnknownEpsilonError
from fedjax_sim.round.parts import Parts
from fedjax_sim.server import weighting


def _keeps_nothing(init: Callable[[Variables], Any]) -> bool:
    """Returns whether a state is empty, tested on a model of one weight."""
    one = Variables({"w": jax.ShapeDtypeStruct((1,), jnp.float32)}, {})
    try:
        return not jax.tree.leaves(jax.eval_shape(init, one))
    except Exception:  # a user's part may need names of leaves
        return False


ANALYSED = (
    Need(
        "preaggregation",
        "a private mechanism and nothing else",
        lambda parts: [part.epsilon is not None for part in parts.preaggregation] == [True],
        "preaggregation=(gaussian_mechanism(...),)",
    ),
    Need(
        "flight",
        "models that return in the round in which they left",
        lambda parts: parts.flight.period == 1 and not parts.flight.asynchronous,
        "flight=every_round()",
    ),
    Need(
        "selection",
        "cohorts of a known distribution that does not depend on the clients",
        lambda parts: (
            parts.selection.participation is not None
            and parts.selection.timed is None
            and parts.selection.see is None
        ),
        "selection=poisson(m), uniform(), everyone(), shuffled() or cyclic()",
    ),
    Need(
        "clock",
        "clients that are only left out at random, not by their time",
        lambda parts: (
            parts.clock is None
            or (
                parts.clock.deadline is None
                and parts.clock.first is None
                and parts.clock.available is None
            )
        ),
        "clock=None, or one without deadline, first and available",
    ),
    Need(
        "local",
        "a local update that provably shares nothing through the server",
        lambda parts: parts.local.survey is None and _keeps_nothing(parts.local.shared_state),
        "local_sgd without shared state",
    ),
    Need(
        "broadcast",
        "the server model and nothing else",
        lambda parts: (
            parts.broadcast.offered is None
            and not parts.broadcast.several
            and _keeps_nothing(lambda variables: parts.broadcast.init(variables, None))
        ),
        "broadcast=latest()",
    ),
    Need(
        "exchange",
        "models that do not travel in turn",
        lambda parts: not parts.exchange.fragments,
        "exchange=everything()",
    ),
    Need(
        "weighting",
        "weights that depend only on the client's own number of samples",
        lambda parts: (
            parts.weighting in (weighting.equal, weighting.by_samples, weighting.by_samples_visited)
        ),
        "weighting=equal",
    ),
    Need(
        "server",
        "a server that provably reads only the noisy mean",
        lambda parts: reads_clients(parts.server) is False,
        "server=replace() or optimizer(transform)",
    ),
    Need(
        "diagnostics",
        "no numbers computed from single clients' models without noise",
        lambda parts: not parts.diagnostics,
        "diagnostics=None",
    ),
)
"""Needs of the analysis of a mechanism.

Not listed are ``sending``, which acts on one client's message before the clip, and leaves that stay
with the clients (``exchange``, ``personal``): they cannot increase a client's share of the sum.
"""


def epsilon(parts: Parts, data: ClientData, rounds: int, delta: float) -> float:
    """Computes the ε that a run spends; see :meth:`fedjax_sim.Algorithm.epsilon`."""
    return accountant(parts, data)(rounds=rounds, delta=delta)


def accountant(parts: Parts, data: ClientData) -> Callable[..., float]:
    """Returns the function of ``rounds`` and ``delta`` that computes ε; it holds no samples.

    Raises:
        UnknownEpsilonError: names a part that is not known to keep the mechanism's analysis.
    """
    for need in ANALYSED:
        if not need.met(parts):
            raise UnknownEpsilonError(
                f"unknown because of {need.role} {shown(getattr(parts, need.role))}: ε needs "
                f"{need.what}, such as {need.instead}"
            )
    given = {
        "samples that all clients are sent (--share-beta)": data.sent is not None,
        "the server's own samples, which no noise covers (--server-fraction)": (
            data.root is not None
        ),
        "copies of samples, whose number may depend on other clients (--fedaug, --rebalance)": (
            data.copies
        ),
    }
    for what, present in given.items():
        if present:
            raise UnknownEpsilonError(f"unknown because of {what}")
    mechanism, selection = parts.preaggregation[0].epsilon, parts.selection
    assert mechanism is not None
    assert selection.participation is not None
    return functools.partial(
        mechanism,
        clients=data.clients,
        clients_per_round=parts.slots if selection.active is None else selection.active,
        sampling=selection.participation,
        slots=parts.slots,
    )
