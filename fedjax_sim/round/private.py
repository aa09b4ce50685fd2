"""The ε of a composition, if all parts are known to keep a mechanism's analysis valid."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from fedjax_sim.base import ClientData, Need, Wrapper, shown
from fedjax_sim.client.sending import clip_norm
from fedjax_sim.engine.needs import (
    APART,
    NO_FLIGHT,
    NO_LOSS_READ,
    NOTHING_AFTER,
    NOTHING_OFFERED,
    NOTHING_SHARED,
    NOTHING_TOLD,
    OWN_SAMPLES,
    PLAIN_MEAN,
    SYNCHRONOUS,
)
from fedjax_sim.engine.reading import reads_clients
from fedjax_sim.privacy import (
    ClientPrivacy,
    SamplePrivacy,
    UnknownEpsilonError,
    UpdatePrivacy,
    noise,
)
from fedjax_sim.privacy._samples import NOTHING_COUNTED
from fedjax_sim.round.parts import Parts
from fedjax_sim.server import weighting
from fedjax_sim.server.broadcast import latest

UNMEASURED = Need(
    "diagnostics",
    "no numbers computed from single clients without noise",
    lambda parts: not parts.diagnostics,
    "diagnostics=None",
)

ANALYSED = (
    Need(
        "preaggregation",
        "a private mechanism and nothing else",
        lambda parts: [part.epsilon is not None for part in parts.preaggregation] == [True],
        "preaggregation=(gaussian_mechanism(...),)",
    ),
    NO_FLIGHT,
    SYNCHRONOUS,
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
    NOTHING_SHARED,
    Need(
        "broadcast",
        "the server model and nothing else",
        lambda parts: parts.broadcast == latest(),
        "broadcast=latest()",
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
    UNMEASURED,
    # The package's mechanisms need these by themselves; a user's may not.
    PLAIN_MEAN,
    NOTHING_TOLD,
    NOTHING_AFTER,
    OWN_SAMPLES,
    APART,
)
"""Needs of the analysis of a mechanism.

Not listed are other parts of ``sending``, which act on one client's message before the clip, and
leaves that stay with the clients (``exchange``, ``personal``): they cannot increase a client's
share of the sum.
"""


def accountant(parts: Parts, data: ClientData) -> Callable[..., float]:
    """Returns the function of ``rounds`` and ``delta`` that computes ε; it holds no samples.

    Raises:
        UnknownEpsilonError: names a part that is not known to keep the mechanism's analysis.
    """
    _check_needs(ANALYSED, parts)
    _check_data(data)
    if data.root is not None:
        raise UnknownEpsilonError(
            "unknown because of the server's own samples, which no noise covers (--server-fraction)"
        )
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


LOCAL = (
    NOTHING_SHARED,
    NOTHING_TOLD,
    NOTHING_OFFERED,
    NOTHING_AFTER,
    NO_LOSS_READ,
    NOTHING_COUNTED,
    OWN_SAMPLES,
    APART,
    Need(
        "sending",
        "clients that always send",
        lambda parts: not any(part.withholds for part in parts.sending),
        "sending=(clip_norm(C), noise(σ))",
    ),
    Need(
        "flight",
        "redistribution that is not learned from reports",
        lambda parts: parts.learned is None,
        "flight=every_round()",
    ),
    Need(
        "local",
        "an empirical_risk of a model without BatchNorm",
        lambda parts: _stateless(parts.local),
        "models with GroupNorm or LayerNorm",
    ),
)
"""Needs of the analysis of updates that get noise at the clients."""


def client_epsilon(
    parts: Parts, data: ClientData, visits: Any, delta: float
) -> NDArray[np.float64]:
    """Computes every client's ε; see :meth:`fedjax_sim.Algorithm.client_epsilon`."""
    privacy = client_privacy(parts, data)
    if privacy is None:
        raise UnknownEpsilonError(
            "unknown because clients add no noise: ε of a client needs local_sgd(private=...), or "
            "sending=(clip_norm(C), noise(σ))"
        )
    sizes = np.diff(np.asarray(data.start))
    counts = np.asarray(visits)
    if counts.shape[-1:] != sizes.shape[-1:] or counts.dtype.kind not in "iu":
        raise ValueError(
            f"visits must be integers [..., {sizes.shape[-1]}], one for each client, got "
            f"{counts.dtype} {list(counts.shape)}"
        )
    sizes, counts = np.broadcast_arrays(sizes, counts)
    pairs = zip(sizes.ravel().tolist(), counts.ravel().tolist(), strict=True)
    return np.reshape([privacy.epsilon(n, v, delta) for n, v in pairs], sizes.shape)


def client_privacy(parts: Parts, data: ClientData) -> ClientPrivacy | None:
    """Returns the privacy of clients that add noise themselves; None if they add none.

    Raises:
        UnknownEpsilonError: names a part that is not known to keep the analysis.
    """
    steps, added = parts.local.private, _noise_of_updates(parts)
    if steps is None and added is None:
        return None
    _check_data(data)
    if data.samples_per_round is not None:
        raise UnknownEpsilonError("unknown because of samples that come in with the rounds")
    _check_needs((UNMEASURED,), parts)
    if added is not None and steps is None:
        _check_needs(LOCAL, parts)
        return UpdatePrivacy(added)
    sizes = np.unique(np.diff(np.asarray(data.start))).tolist()
    per_visit = {n: int(parts.local.steps_for(np.int32(n))) for n in sizes}
    return SamplePrivacy(steps.noise_multiplier, parts.local.batch_size, per_visit)


def _noise_of_updates(parts: Parts) -> float | None:
    """Returns σ/C of the first clip that is followed by noise; None without one."""
    for clip, added in itertools.pairwise(parts.sending):
        if isinstance(clip, clip_norm) and isinstance(added, noise):
            return added.sigma / clip.limit
    return None


def _stateless(local: Any) -> bool:
    """Returns whether the model of a local update is known to have no state."""
    while isinstance(local, Wrapper):
        local = local.local
    try:
        variables = jax.eval_shape(local.objective.model.init, jax.random.key(0))
    except AttributeError:
        return False
    return not jax.tree.leaves(variables.state)


def _check_needs(needs: Sequence[Need], parts: Parts) -> None:
    for need in needs:
        if not need.met(parts):
            raise UnknownEpsilonError(
                f"unknown because of {need.role} {shown(getattr(parts, need.role))}: ε needs "
                f"{need.what}, such as {need.instead}"
            )


def _check_data(data: ClientData) -> None:
    if data.sent is not None:
        raise UnknownEpsilonError(
            "unknown because of samples that all clients are sent (--share-beta)"
        )
    if data.copies:
        raise UnknownEpsilonError(
            "unknown because of copies of samples, whose number may depend on other clients "
            "(--fedaug, --rebalance)"
        )
