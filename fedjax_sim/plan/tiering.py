"""TiFL: clients of like speed train together, and tiers that lag behind come more often."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    ClientView,
    Outlook,
    Poll,
    Selection,
    SetupTraffic,
    Variables,
    part,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import client_sizes
from fedjax_sim.engine.draws import distinct
from fedjax_sim.plan.seconds import NEEDS_SECONDS, uniformly


class Tiers(NamedTuple):
    """What the selection remembers.

    Attributes:
        tier: ``int32[N]``, of each client.
        chances: ``f32[T]``, with which a tier is drawn.
        credits: ``int32[T]``, how often it may still be drawn.
        accuracy: ``f32[T]``, of the last evaluation; NaN if none was.
        last: ``int32[]``, the tier of the last round.
        round: ``int32[]``, rounds begun.
        client: ``int32[K]``, those who have answered; N for none.
        answer: ``f32[K]``.
    """

    tier: Array
    chances: Array
    credits: Array
    accuracy: Array
    last: Array
    round: Array
    client: Array
    answer: Array


@part
def tiers(
    count: int,
    score: Callable[[Variables, ClientView], Array],
    *,
    interval: int | None = None,
    credit: int | None = None,
    evaluated: int | None = None,
) -> Selection:
    r"""Every round draws its cohort from one tier of clients that are equally fast (TiFL).

    Before the first round the clients are ordered by the seconds of a visit and cut into T tiers of
    equal size. Every I rounds they answer how well the server model does on their own samples,
    :math:`A_t` is the mean over the samples of tier t. If the last tier's has not grown since,

    .. math:: P_t = \frac{2\,(n - r_t)}{n\,(n + 1)}

    over the n tiers with credits left, of which :math:`r_t` are worse: the worst is the most
    likely. Each draw of a tier takes one
    of its credits; if none has any left, all may be drawn. The cohort is drawn uniformly from those
    of the tier that are awake; slots are idle if there are too few. A round looks at all N clients.

    Args:
        count: T.
        score: ``(variables, client) -> f32[]``, the larger the better
            (:func:`fedjax_sim.reports.accuracy`).
        interval: I; None for T.
        credit: the rounds of each tier at most; None for any number.
        evaluated: the clients that are asked, drawn uniformly; None for all.

    Returns:
        A selection for a clock, and models that do not outlive a round.

    Raises:
        ValueError: if a number is below 1; when it starts, if there are fewer clients than tiers.

    Source: Chai et al. 2020 <https://arxiv.org/abs/2001.09249>, Algorithm 2; the authors measure
    the seconds in rounds of training before the first, which is counted as a model to every client
    and one back. Galjaard et al. 2021 <https://github.com/JMGaljaard/fltk-testbed>,
    a testbed with TiFL, for P.
    """
    every = count if interval is None else interval
    for name, value in (("count", count), ("interval", every), ("credit", credit),
                        ("evaluated", evaluated)):  # fmt: skip
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")

    def init(variables: Variables, data: ClientData, execution: object) -> Tiers:
        clients = data.clients
        if clients < count:
            raise ValueError(f"count must be at most the {clients} clients, got {count}")
        asked = clients if evaluated is None else min(evaluated, clients)
        return Tiers(
            tier=jnp.zeros(clients, jnp.int32),
            chances=jnp.full(count, 1 / count, jnp.float32),
            credits=jnp.full(count, 2**30 if credit is None else credit, jnp.int32),
            accuracy=jnp.full(count, jnp.nan, jnp.float32),
            last=jnp.int32(0),
            round=jnp.int32(0),
            client=jnp.full(asked, clients, jnp.int32),
            answer=jnp.zeros(asked, jnp.float32),
        )

    def whom(key: Array, state: Tiers, data: ClientData) -> Array:
        asked = len(state.client)
        some = jnp.arange(asked, dtype=jnp.int32)
        if asked < data.clients:
            some = distinct(key, asked, data.clients)
        return jnp.where(state.round % every == 0, some, data.clients)

    def tell(state: Tiers, client: Array, answers: Array) -> Tiers:
        return state._replace(client=client, answer=answers)

    def timed(
        key: Array,
        state: Tiers,
        data: ClientData,
        clients: Array,
        free: Array,
        visits: Array,
        outlook: Outlook,
    ) -> tuple[Array, Tiers]:
        everyone = jnp.arange(data.clients, dtype=jnp.int32)
        tier = jax.lax.cond(
            state.round == 0,
            lambda: _cut(outlook.seconds(everyone, len(free)), count),
            lambda: state.tier,
        )
        accuracy = _by_tier(state, tier, data)
        stalled = accuracy[state.last] <= state.accuracy[state.last]  # not if one is unknown
        # Without new answers both are the same.
        changes = (state.round % every == 0) & stalled
        chances = jnp.where(changes, _chances(accuracy, state.credits), state.chances)
        left = jnp.where(state.credits > 0, chances, 0)
        left = jnp.where(jnp.any(left > 0), left, (state.credits > 0).astype(jnp.float32))
        left = jnp.where(jnp.any(left > 0), left, chances)
        of_tier, of_clients = jax.random.split(key)
        ticket = jnp.log(left) + jax.random.gumbel(of_tier, left.shape, jnp.float32)
        drawn = jnp.argmax(ticket).astype(jnp.int32)
        there = (tier == drawn) & outlook.awake(everyone)
        ticket = jnp.where(there, jax.random.uniform(of_clients, tier.shape, jnp.float32), 2.0)
        first = jnp.argsort(ticket)[: len(free)].astype(jnp.int32)
        credits = state.credits.at[drawn].add(-1)
        known = state._replace(
            tier=tier,
            chances=chances,
            credits=jnp.maximum(credits, 0),
            accuracy=accuracy,
            last=drawn,
            round=state.round + 1,
        )
        return jnp.where(ticket[first] < 2, first, data.clients), known

    def setup_traffic(variables: Variables, data: ClientData) -> SetupTraffic:
        once = data.clients * tree.num_bytes(variables)
        return SetupTraffic(once, once)

    return Selection(
        init=init,
        draw=uniformly,
        sticky=False,
        setup_traffic=setup_traffic,
        timed=timed,
        poll=Poll(whom, tell, score),
        needs=NEEDS_SECONDS,
    )


def _cut(seconds: Array, count: int) -> Array:
    """Tiers of equal size, 0 for the fastest: ``int32[N]``.

    >>> _cut(jnp.array([5.0, 1.0, 9.0, 2.0, 7.0]), 2).tolist()
    [0, 0, 1, 0, 1]
    """
    place = jnp.zeros(len(seconds), jnp.int32)
    place = place.at[jnp.argsort(seconds)].set(jnp.arange(len(seconds), dtype=jnp.int32))
    return place * count // len(seconds)


def _by_tier(state: Tiers, tier: Array, data: ClientData) -> Array:
    """The mean answer by sample of each tier, ``f32[T]``; the last if nobody has answered."""
    count = len(state.chances)
    there = state.client < data.clients
    # No answer, no sample: client N has none.
    samples = jnp.where(there, client_sizes(data, state.client), 0).astype(jnp.float32)
    own = jnp.where(there, tier.at[state.client].get(mode="fill", fill_value=0), count)
    total = jnp.zeros(count, jnp.float32).at[own].add(samples, mode="drop")
    summed = jnp.zeros(count, jnp.float32).at[own].add(samples * state.answer, mode="drop")
    return jnp.where(total > 0, summed / jnp.maximum(total, 1), state.accuracy)


def _chances(accuracy: Array, credits: Array) -> Array:
    """P of each tier by the rank of its accuracy: ``f32[T]``; 0 without credits.

    >>> _chances(jnp.array([0.5, 0.9, 0.2, 0.7]), jnp.array([1, 1, 0, 1])).tolist()
    [0.5, 0.1666666716337204, 0.0, 0.3333333432674408]
    """
    rich = credits > 0
    order = jnp.argsort(jnp.where(rich, accuracy, jnp.inf))
    rank = jnp.zeros(len(accuracy), jnp.int32)
    rank = rank.at[order].set(jnp.arange(len(accuracy), dtype=jnp.int32))
    n = jnp.sum(rich, dtype=jnp.int32)
    share = 2 * (n - rank) / jnp.maximum(n * (n + 1), 1)
    return jnp.where(rich, share, 0).astype(jnp.float32)
