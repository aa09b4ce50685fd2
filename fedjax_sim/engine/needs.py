"""What parts may need of one another, and the line that refuses what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import Need, Variables, concrete
from fedjax_sim.engine import tree

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
    "schedule",
    "models that return in the round in which they left",
    lambda parts: parts.schedule.period == 1,
    "schedule=every_round(m)",
)
FLIGHT = Need(
    "schedule",
    "models that outlive a round",
    lambda parts: parts.schedule.period > 1,
    "schedule=delayed(m, rounds) or staggered(m, phases)",
)
SERVERLESS = Need(
    "schedule",
    "models that meet no server's",
    lambda parts: parts.schedule.serverless,
    "schedule=serverless(m)",
)
ALL_DUE = Need(
    "schedule",
    "all slots due together",
    lambda parts: len(parts.schedule.group_sizes) == 1,
    "schedule=every_round(m) or delayed(m, rounds)",
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
    "nothing shared through the server beside the model",
    lambda parts: not shares(parts.local),
    "local_sgd without scaffold, adaptive_proximal, a momentum of the server's, shared=... and "
    "optimizer_state='average'",
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
NO_WEIGHTS_SHARED = Need(
    "local",
    "nothing as large as the model shared through the server beside it",
    lambda parts: not shares(parts.local, weights=True),
    "local_sgd without scaffold, a momentum of the server's and optimizer_state='average'",
)
OWN_ROWS = Need(
    "preaggregation",
    "rows of single clients' updates",
    lambda parts: all(part.mixes is None for part in parts.preaggregation),
    "preaggregation without nearest_neighbour_mixing and bucketing",
)
APART = Need(
    "sending",
    "clients that send without looking at what others send",
    lambda parts: all(part.together is None for part in parts.sending),
    "sending without alie, ipm, mimic and optimised",
)
OWN_SAMPLES = Need(
    "local",
    "clients that see no samples of others",
    lambda parts: not parts.local.peers and parts.local.setup_traffic is None,
    "local_sgd without peers",
)
WHOLE_MODEL = Need(
    "exchange",
    "models of which nothing stays with the clients or is frozen",
    lambda parts: (
        parts.exchange.own is None
        and parts.exchange.frozen is None
        and not parts.exchange.fragments
    ),
    "exchange=everything()",
)
ALL_TRAVELS = Need(
    "exchange",
    "models of which all that clients train travels in every round",
    lambda parts: (
        parts.exchange.own is None
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
    "models of which the server collects a fragment in every round",
    lambda parts: bool(parts.exchange.fragments),
    "exchange=fragments(...)",
)
CLOCK = Need(
    "clock",
    "devices whose seconds are known",
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
    "clients that send what they made",
    lambda parts: not parts.sending,
    "sending=()",
)
AS_HONEST = Need(
    "sending",
    "honest clients that send what they made, or fail",
    lambda parts: all(part.forges or part.screens for part in parts.sending),
    "sending=() or attacks",
)
FROM_RECEIVED = Need(
    "local",
    "clients that train from the model that they received",
    lambda parts: not parts.local.moves_start,
    "local_sgd without adaptive_start, agreed and in_turn around it",
)
UNCHANGED = Need(
    "preaggregation",
    "updates and weights that nothing changes",
    lambda parts: not parts.preaggregation,
    "preaggregation=()",
)
NO_LOSS_READ = Need(
    "preaggregation",
    "updates and weights that nothing changes by the clients' losses",
    lambda parts: all({*part.reads} <= {"steps"} for part in parts.preaggregation),
    "preaggregation without q_fair and agnostic",
)
ONE_WITHHOLDS = Need(
    "sending",
    "no other part by which clients send nothing",
    lambda parts: sum(part.withholds for part in parts.sending) == 1,
    "one of them",
)
EQUAL_WEIGHTS = Need(
    "weighting",
    "clients that count equally",
    lambda parts: _equal(parts.weighting),
    "weighting=equal",
)
NOT_REFLECTED = Need(
    "local",
    "clients that send the model that they trained",
    lambda parts: not parts.local.reflects,
    "a local update without local.reflected",
)
ONLY_WEIGHED = Need(
    "preaggregation",
    "updates that are what clients sent, however they are weighed",
    lambda parts: all(part.weighs for part in parts.preaggregation),
    "preaggregation=(), discrepancy, agnostic or suspicion",
)
NOBODY_LOST = Need(
    "clock",
    "clients of which none is lost, asleep or late",
    lambda parts: parts.clock is None or not parts.clock.loses,
    "clock=None, or one without available, failures, deadline and first",
)
STALENESS = Need(
    "broadcast",
    "models that come with their staleness",
    lambda parts: parts.broadcast.tags == "staleness" or parts.schedule.at_work is not None,
    "broadcast=stale(most), or schedule=buffered(...) on a clock",
)
NO_ROUND_TIMED = Need(
    "clock",
    "one whose server waits for each client by itself, on a link of its own",
    lambda parts: (
        parts.clock.deadline is None
        and parts.clock.first is None
        and (parts.clock.link is None or not parts.clock.link.shared)
    ),
    "one without deadline, first and a shared uplink",
)
ONE_BY_ONE = Need(
    "selection",
    "clients that can be drawn one by one",
    lambda parts: parts.selection.another is not None,
    "selection=uniform()",
)
KNOWN_STEPS = Need(
    "local",
    "visits whose length is known when they begin",
    lambda parts: parts.local.known,
    "local_sgd without inexactness, until and drawn steps",
)
CLUSTER = Need(
    "broadcast",
    "models that come with their cluster",
    lambda parts: parts.broadcast.tags == "cluster",
    "broadcast=ifca(clusters, objective)",
)

MIRROR = (
    NO_FLIGHT,
    Need(
        "schedule",
        "models that are the server's latest when they are sent back",
        lambda parts: parts.schedule.at_work is None,
        "schedule=every_round(m)",
    ),
    ONE_MODEL,
    ALL_TRAVELS,
    FROM_RECEIVED,
    AS_HONEST,
    EQUAL_WEIGHTS,
    UNCHANGED,
)
"""Of a part by which the server follows what clients keep, and knows of it by their updates alone:
FedDyn's h, which is the mean of all h_k. What is withheld, coded, weighed, stale or measured from
another start at one end would be missing at the other, in every round that follows."""

ASKED = (
    NO_FLIGHT,
    ONE_MODEL,
    Need(
        "server",
        "models that are sent as they are, whenever a client had its last",
        lambda parts: parts.server.download_bytes is None,
        "a server without compress_server",
    ),
)
"""Of a selection that sends the model to clients and asks them about it."""

FRESH = Need(
    "local",
    "an optimiser that starts afresh at every visit, of whose steps it knows the length",
    lambda parts: parts.local.fresh,
    "optimizer_state='reset'",
)


def _equal(weighting: Callable[..., Any]) -> bool:
    """Whether two models count alike of which the numbers of samples differ."""
    with jax.ensure_compile_time_eval():
        given = weighting(jnp.array([1, 40]), jnp.array([2, 90]))
    return not concrete(given) or bool(np.ptp(np.asarray(given)) == 0)


def collected(parts: Any) -> int:
    """The fewest slots that the server collects together."""
    if parts.exchange.fragments:
        return len(parts.schedule.group)
    return min(parts.schedule.group_sizes)


def awaited(parts: Any) -> int:
    """The most models of those :func:`collected` that the server waits for."""
    first = None if parts.clock is None else parts.clock.first
    return collected(parts) if first is None else min(first, collected(parts))


def meeting(parts: Any) -> int:
    """The rows that the aggregator meets if no client is lost: models awaited, or mixtures."""
    rows = awaited(parts)
    for part in parts.preaggregation:
        rows = rows if part.mixes is None else part.mixes(rows)
    return rows


def shares(local: Any, *, weights: bool = False) -> bool:
    """Whether a local update shares anything through the server, seen on a model of one weight.

    Args:
        local: the local update.
        weights: whether it must be as large as the model, as a control variate is: larger on a
            model of two weights.
    """
    if local.survey is not None:
        return True
    one, two = (Variables({"w": jax.ShapeDtypeStruct((n,), jnp.float32)}, {}) for n in (1, 2))
    try:
        first, second = (jax.eval_shape(local.shared_state, model) for model in (one, two))
    except Exception:  # a user's own, which looks for names: the state is checked when it starts
        return False
    return bool(first != second if weights else jax.tree.leaves(first))
