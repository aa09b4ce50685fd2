"""Needs that parts may have of other parts, checked by the properties of those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import Need, Variables
from fedjax_sim.engine import tree
from fedjax_sim.engine.reading import two_weights

PLAIN_MEAN = Need(
    "aggregator", "the plain mean", lambda parts: parts.aggregator is tree.mean, "aggregator=mean"
)
ONE_MODEL = Need(
    "broadcast",
    "the server's latest model for all",
    lambda parts: not parts.broadcast.several,
    "broadcast=latest()",
)
NO_FLIGHT = Need(
    "flight",
    "models that return in the round in which they left",
    lambda parts: parts.flight.period == 1,
    "flight=every_round()",
)
SERVERLESS = Need(
    "flight",
    "a flight without a server",
    lambda parts: parts.flight.serverless,
    "flight=serverless(...)",
)
ALL_DUE = Need(
    "flight",
    "all slots due together",
    lambda parts: len(parts.group_sizes) == 1,
    "flight=every_round() or delayed(rounds)",
)
STICKY = Need(
    "selection",
    "slots that keep their clients",
    lambda parts: parts.selection.sticky,
    "selection=uniform(sticky=True)",
)
PLAIN_SERVER = Need(
    "server",
    "a server model that is replaced by the aggregate",
    lambda parts: parts.server.replaces,
    "server=replace()",
)
NOTHING_SHARED = Need(
    "local",
    "no state shared through the server besides the model",
    lambda parts: not shares(parts.local),
    "local_sgd without scaffold, adaptive_proximal, server momentum, shared=... and "
    "optimizer_state='average'",
)
NOTHING_KEPT = Need(
    "local",
    "clients that keep nothing between their visits",
    lambda parts: not _keeps(parts.local),
    "local_sgd without scaffold, dynamic and companions, and optimizer_state='reset'",
)
NOTHING_AFTER = Need(
    "finish",
    "clients that send nothing after the last round",
    lambda parts: parts.finish is None,
    "finish=None",
)
NOTHING_TOLD = Need(
    "selection",
    "clients that report no numbers",
    lambda parts: (
        not parts.selection.reads
        and parts.selection.setup_traffic is None
        and parts.selection.poll is None
    ),
    "selection=uniform()",
)
NOTHING_OFFERED = Need(
    "broadcast",
    "clients that choose no model by their samples",
    lambda parts: parts.broadcast.offered is None,
    "broadcast=latest()",
)
NO_WEIGHTS_SHARED = Need(
    "local",
    "no state as large as the model shared through the server",
    lambda parts: not shares(parts.local, weights=True),
    "local_sgd without scaffold, server momentum and optimizer_state='average'",
)
OWN_ROWS = Need(
    "preaggregation",
    "one client's update in each row",
    lambda parts: all(part.mixes is None for part in parts.preaggregation),
    "preaggregation without nearest_neighbour_mixing and bucketing",
)
APART = Need(
    "sending",
    "messages that do not depend on other clients' messages",
    lambda parts: all(part.together is None for part in parts.sending),
    "sending without alie, fang_krum, fang_trim, ipm, mimic and optimised",
)
OWN_SAMPLES = Need(
    "local",
    "clients that see no samples of others",
    lambda parts: not parts.local.peers and parts.local.setup_traffic is None,
    "local_sgd without peers",
)
WHOLE_MODEL = Need(
    "exchange",
    "an exchange of the whole model",
    lambda parts: (
        parts.exchange.own is None
        and parts.exchange.frozen is None
        and parts.exchange.coverage is None
        and not parts.exchange.fragments
    ),
    "exchange=everything()",
)
ALL_TRAVELS = Need(
    "exchange",
    "an exchange of all trained leaves in every round",
    lambda parts: (
        parts.exchange.own is None
        and parts.exchange.coverage is None
        and not parts.exchange.fragments
        and (parts.exchange.frozen is None or parts.local.trained is not None)
    ),
    "exchange=everything(), or local.change(trained=...) without what is frozen",
)
A_MODEL_SENT = Need(
    "exchange",
    "a model that is sent",
    lambda parts: not parts.exchange.nothing,
    "exchange=everything()",
)
IN_FRAGMENTS = Need(
    "exchange",
    "models that are exchanged in fragments",
    lambda parts: bool(parts.exchange.fragments),
    "exchange=fragments(...)",
)
CLOCK = Need(
    "clock",
    "a clock",
    lambda parts: parts.clock is not None,
    "clock=simulated(...), or --clock",
)
EVERYONE = Need(
    "selection",
    "all clients in every round",
    lambda parts: parts.selection.everyone,
    "selection=everyone()",
)
AS_IT_IS = Need(
    "sending",
    "clients that send their updates unchanged",
    lambda parts: not parts.sending,
    "sending=()",
)
AS_HONEST = Need(
    "sending",
    "honest clients that send their updates unchanged, or fail",
    lambda parts: all(part.forges or part.screens for part in parts.sending),
    "sending=() or attacks",
)
FROM_RECEIVED = Need(
    "local",
    "clients that train from the model that they received",
    lambda parts: not parts.local.moves_start,
    "local_sgd without the wrappers adaptive_start, fedmd and in_turn",
)
UNCHANGED = Need(
    "preaggregation",
    "no pre-aggregation",
    lambda parts: not parts.preaggregation,
    "preaggregation=()",
)
NO_LOSS_READ = Need(
    "preaggregation",
    "pre-aggregations that do not read the clients' losses",
    lambda parts: all({*part.reads} <= {"steps"} for part in parts.preaggregation),
    "preaggregation without q_fair and agnostic",
)
ONE_WITHHOLDS = Need(
    "sending",
    "no other part that withholds updates",
    lambda parts: sum(part.withholds for part in parts.sending) == 1,
    "one of them",
)
EQUAL_WEIGHTS = Need(
    "weighting",
    "clients that count equally",
    lambda parts: not per_visit(parts) and _equal(parts.weighting),
    "weighting=equal",
)
NOT_REFLECTED = Need(
    "local",
    "clients that send the model that they trained",
    lambda parts: not parts.local.reflects,
    "a local update without local.fedadmm",
)
ONLY_WEIGHED = Need(
    "preaggregation",
    "pre-aggregations that change only the weights",
    lambda parts: all(part.weighs for part in parts.preaggregation),
    "preaggregation=(), discrepancy, agnostic or suspicion",
)
NOBODY_LOST = Need(
    "clock",
    "clients that are never lost, asleep or late",
    lambda parts: parts.clock is None or not parts.clock.loses,
    "clock=None, or a clock without available, failures, deadline and first",
)
STALENESS = Need(
    "broadcast",
    "models tagged with their staleness",
    lambda parts: parts.broadcast.tags == "staleness" or parts.flight.asynchronous,
    "broadcast=stale(most), or flight=buffered(size) on a clock",
)
NO_ROUND_TIMED = Need(
    "clock",
    "a clock without a time limit for the round and without a shared uplink",
    lambda parts: (
        parts.clock.deadline is None
        and parts.clock.first is None
        and (parts.clock.link is None or not parts.clock.link.shared)
    ),
    "a clock without deadline, first and a shared uplink",
)
BYTES_KNOWN = Need(
    "clock",
    "a clock without a link if models return one by one, as its messages are known too late",
    lambda parts: not parts.asynchronous or parts.clock.link is None,
    "flight=every_round(), or a clock without a link",
)
ONE_BY_ONE = Need(
    "selection",
    "a selection that can draw clients one by one",
    lambda parts: parts.selection.another is not None,
    "selection=uniform()",
)
KNOWN_STEPS = Need(
    "local",
    "local updates whose number of steps is known in advance",
    lambda parts: parts.local.known,
    "local_sgd without inexactness, until and random steps",
)
CLUSTER = Need(
    "broadcast",
    "models tagged with their cluster",
    lambda parts: parts.broadcast.tags == "cluster",
    "broadcast=ifca(clusters, objective)",
)
SYNCHRONOUS = Need(
    "flight",
    "no server update while clients train",
    lambda parts: not parts.flight.asynchronous,
    "flight=every_round()",
)

MIRROR = (
    NO_FLIGHT,
    SYNCHRONOUS,
    ONE_MODEL,
    ALL_TRAVELS,
    FROM_RECEIVED,
    AS_HONEST,
    EQUAL_WEIGHTS,
    UNCHANGED,
)
"""The needs of a server whose state mirrors what clients keep, reconstructed from their updates
alone: FedDyn's h, the mean of all h_k. An update that is withheld, coded, weighted, stale or
measured from another start would make the two differ in every later round."""

ASKED = (
    NO_FLIGHT,
    ONE_MODEL,
    Need(
        "server",
        "a server model that is sent uncompressed",
        lambda parts: parts.server.download_bytes is None,
        "a server without compress_server",
    ),
)
"""The needs of a selection that sends the model to clients and polls them about it."""

FRESH = Need(
    "local",
    "a local optimiser that is reset at every visit",
    lambda parts: parts.local.fresh,
    "optimizer_state='reset'",
)


def per_visit(parts: Any) -> bool:
    """Returns whether weights are divided by the expected number of visits."""
    return getattr(parts.weighting, "per_visit", False)


def _equal(weighting: Callable[..., Any]) -> bool:
    given = two_weights(weighting, (2, 90))
    return given is None or bool(np.ptp(given) == 0)


def awaited(parts: Any) -> int:
    """Returns the smallest number of models that the server collects together."""
    collected: int = parts.slots if parts.exchange.fragments else min(parts.group_sizes)
    first = None if parts.clock is None else parts.clock.first
    return collected if first is None else min(first, collected)


def meeting(parts: Any) -> int:
    """Returns the number of rows for the aggregator if no client is lost, after mixing."""
    rows = awaited(parts)
    for part in parts.preaggregation:
        rows = rows if part.mixes is None else part.mixes(rows)
    return rows


def _keeps(local: Any) -> bool:
    """Returns whether clients have a state, found on a model of one weight."""
    one = Variables({"w": jax.ShapeDtypeStruct((1,), jnp.float32)}, {})
    try:
        return bool(jax.tree.leaves(jax.eval_shape(local.client_state, one)))
    except Exception:  # it looks for names of leaves, to keep some of them
        return True


def shares(local: Any, *, weights: bool = False) -> bool:
    """Returns whether a local update has shared state, found on a model of one weight.

    With ``weights`` only state as large as the model counts, such as a control variate.
    """
    if local.survey is not None:
        return True
    one, two = (Variables({"w": jax.ShapeDtypeStruct((n,), jnp.float32)}, {}) for n in (1, 2))
    try:
        first, second = (jax.eval_shape(local.shared_state, model) for model in (one, two))
    except Exception:  # it looks for names of leaves: it shares something, of unknown size
        return not weights
    return bool(first != second if weights else jax.tree.leaves(first))
