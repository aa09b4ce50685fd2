"""Selections by the clock: of clients that are awake, meet a deadline, or are equally fast."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    ClientView,
    Count,
    Need,
    Outlook,
    PerClient,
    PyTree,
    Selection,
    SetupTraffic,
    Variables,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.clients import client_sizes
from fedjax_sim.engine.draws import distinct
from fedjax_sim.engine.needs import CLOCK, NO_FLIGHT

SLEEPERS = Need(
    "clock",
    "clients that sleep at times",
    lambda parts: parts.clock is not None and parts.clock.available is not None,
    "selection=uniform(), or clock=simulated(..., available=bernoulli(p))",
)
DEADLINE = Need(
    "clock",
    "rounds that end by a deadline",
    lambda parts: parts.clock is not None and parts.clock.deadline is not None,
    "clock=simulated(..., deadline=...), or --clock",
)


class ByClock(Selection):
    """A selection that draws all slots by the forecast of a clock; without one, uniformly."""

    @property
    def needs(self) -> tuple[Need, ...]:
        return (CLOCK, NO_FLIGHT)

    def draw(
        self, key: Array, state: PyTree, data: ClientData, clients: Array, free: Array,
        visits: Array
    ) -> tuple[Array, PyTree]:  # fmt: skip
        return distinct(key, len(free), data.clients), state

    def timed(
        self, key: Array, state: PyTree, data: ClientData, clients: Array, free: Array,
        visits: Array, outlook: Outlook
    ) -> tuple[Array, PyTree]:  # fmt: skip
        """Draws as :meth:`draw` does, given the clock's forecast."""
        return self._timed(key, state, data, len(free), outlook)

    def _timed(
        self, key: Array, state: PyTree, data: ClientData, slots: int, outlook: Outlook
    ) -> tuple[Array, PyTree]:
        raise NotImplementedError


class awake(ByClock):
    """Draws clients uniformly without replacement among the clients that are awake.

    The server knows which clients are awake before it draws. Slots are idle only if fewer clients
    are awake. It needs a clock on which clients sleep.

    Source: Bonawitz et al. 2019 <https://arxiv.org/abs/1902.01046>, section 2.2, where devices
    check in and the server chooses among them.
    """

    needs = (SLEEPERS,)

    def _timed(
        self, key: Array, state: PyTree, data: ClientData, slots: int, outlook: Outlook
    ) -> tuple[Array, PyTree]:
        return distinct(key, slots, data.clients, allowed=outlook.awake), state


class within_deadline(ByClock):
    r"""FedCS: draws as many of some random clients as will meet the deadline of the clock.

    .. math:: \max_{U \subseteq A} |U| \quad \text{so that} \quad
              \max_{k \in U} \Bigl(\frac{\text{down}}{d_k} + T_k c_k + \frac{\text{up}}{u_k}
              \Bigr) \le \text{deadline}

    It is solved greedily, the fastest first; on a shared uplink the time of an upload grows with
    the number of clients in U. The candidates that are awake report the seconds of a step and the
    rates of their link, 4 bytes each. The remaining slots are idle. The authors' clients upload one
    after another; here they upload as the clock determines. The state is A.

    Args:
        candidates: the size of A, which is drawn uniformly; at least the number of slots, or all
            clients if there are fewer.

    Raises:
        ValueError: in the first round, if there are more slots.

    Source: Nishio, Yonetani 2019 <https://arxiv.org/abs/1804.08333>, section IV.
    """

    candidates: Count

    device_numbers = 3
    needs = (DEADLINE, NO_FLIGHT)

    def init(self, variables: Variables, data: ClientData, execution: PerClient) -> Array:
        return jnp.full(min(self.candidates, data.clients), data.clients, jnp.int32)

    def poll(self, key: Array, state: Array, data: ClientData) -> Array:
        return distinct(key, len(state), data.clients)

    def record_answers(self, state: Array, client: Array, answers: PyTree) -> Array:
        return client

    def _timed(
        self, key: Array, asked: Array, data: ClientData, slots: int, outlook: Outlook
    ) -> tuple[Array, Array]:
        if slots > self.candidates:
            raise ValueError(
                f"candidates must be at least the {slots} slots, got {self.candidates}"
            )
        alone = jnp.where(asked < data.clients, outlook.seconds(asked, 1), jnp.inf)
        queue = asked[jnp.argsort(alone)][:slots]
        place = jnp.arange(1, slots + 1, dtype=jnp.int32)
        # One more makes all uploads of a shared link longer: those that fit come first.
        fits = (outlook.seconds(queue, place) <= outlook.deadline) & (queue < data.clients)
        return jnp.where(fits, queue, data.clients), asked


class Tiers(NamedTuple):
    """The state of the selection.

    Attributes:
        tier: ``int32[N]``, the tier of each client.
        chances: ``f32[T]``, the probability of each tier.
        credits: ``int32[T]``, the number of times each tier may still be drawn.
        accuracy: ``f32[T]``, from the last evaluation; NaN before the first.
        last: ``int32[]``, the tier of the last round.
        round: ``int32[]``, the number of rounds begun.
        client: ``int32[K]``, the clients that have answered; N for none.
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


class tiers(ByClock):
    r"""TiFL: draws each cohort from one tier of similarly fast clients.

    Before the first round the clients are ordered by the seconds of a visit and divided into T
    tiers of equal size. Every I rounds they report the server model's score on their own samples;
    :math:`A_t` is the mean over the samples of tier t. If it has not grown for the last tier,

    .. math:: P_t = \frac{2\,(n - r_t)}{n\,(n + 1)}

    is the new probability of tier t, over the n tiers with credits left; :math:`r_t` of them are
    worse, so the worst is the most likely. Each draw of a tier uses one of its credits; if no tier
    has any left, all may be drawn. The cohort is drawn uniformly from the clients of the tier that
    are awake; slots are idle if there are too few. A round reads all N clients.

    Args:
        count: T.
        score: ``(variables, client) -> f32[]``, where larger is better
            (:func:`fedjax_sim.reports.accuracy`).
        interval: I; None for T.
        credit: the maximum number of rounds of each tier; None for no limit.
        evaluated: the number of clients that are polled, drawn uniformly; None: all.

    Raises:
        ValueError: when the state is initialised, if there are fewer clients than tiers.

    Source: Chai et al. 2020 <https://arxiv.org/abs/2001.09249>, Algorithm 2; the authors measure
    the seconds in rounds of training before the first, which count as a model to every client and
    one back. Galjaard et al. 2021 <https://github.com/JMGaljaard/fltk-testbed>,
    a testbed with TiFL, for P.
    """

    count: Count
    score: Callable[[Variables, ClientView], Array]
    _: dataclasses.KW_ONLY
    interval: Count | None = None
    credit: Count | None = None
    evaluated: Count | None = None

    @property
    def ask(self) -> Callable[[Variables, ClientView], Array]:
        return self.score

    def setup_traffic(self, variables: Variables, data: ClientData) -> SetupTraffic:
        once = data.clients * tree.num_bytes(variables)
        return SetupTraffic(once, once)

    def init(self, variables: Variables, data: ClientData, execution: PerClient) -> Tiers:
        clients, count = data.clients, self.count
        if clients < count:
            raise ValueError(f"count must be at most the {clients} clients, got {count}")
        asked = clients if self.evaluated is None else min(self.evaluated, clients)
        return Tiers(
            tier=jnp.zeros(clients, jnp.int32),
            chances=jnp.full(count, 1 / count, jnp.float32),
            credits=jnp.full(count, 2**30 if self.credit is None else self.credit, jnp.int32),
            accuracy=jnp.full(count, jnp.nan, jnp.float32),
            last=jnp.int32(0),
            round=jnp.int32(0),
            client=jnp.full(asked, clients, jnp.int32),
            answer=jnp.zeros(asked, jnp.float32),
        )

    def poll(self, key: Array, state: Tiers, data: ClientData) -> Array:
        asked = len(state.client)
        some = jnp.arange(asked, dtype=jnp.int32)
        if asked < data.clients:
            some = distinct(key, asked, data.clients)
        return jnp.where(self._evaluates(state), some, data.clients)

    def record_answers(self, state: Tiers, client: Array, answers: Array) -> Tiers:
        return state._replace(client=client, answer=answers)

    def _timed(
        self, key: Array, state: Tiers, data: ClientData, slots: int, outlook: Outlook
    ) -> tuple[Array, Tiers]:
        everyone = jnp.arange(data.clients, dtype=jnp.int32)
        tier = jax.lax.cond(
            state.round == 0,
            lambda: _tiers(outlook.seconds(everyone, slots), self.count),
            lambda: state.tier,
        )
        accuracy = _by_tier(state, tier, data)
        stalled = accuracy[state.last] <= state.accuracy[state.last]  # False if one is unknown
        # Without new answers both are equal.
        changes = self._evaluates(state) & stalled
        chances = jnp.where(changes, _chances(accuracy, state.credits), state.chances)
        left = jnp.where(state.credits > 0, chances, 0)
        left = jnp.where(jnp.any(left > 0), left, (state.credits > 0).astype(jnp.float32))
        left = jnp.where(jnp.any(left > 0), left, chances)
        tier_key, client_key = jax.random.split(key)
        ticket = jnp.log(left) + jax.random.gumbel(tier_key, left.shape, jnp.float32)
        drawn = jnp.argmax(ticket).astype(jnp.int32)
        available = (tier == drawn) & outlook.awake(everyone)
        ticket = jax.random.uniform(client_key, tier.shape, jnp.float32)
        ticket = jnp.where(available, ticket, 2.0)
        first = jnp.argsort(ticket)[:slots].astype(jnp.int32)
        credits = state.credits.at[drawn].add(-1)
        after = state._replace(
            tier=tier,
            chances=chances,
            credits=jnp.maximum(credits, 0),
            accuracy=accuracy,
            last=drawn,
            round=state.round + 1,
        )
        return jnp.where(ticket[first] < 2, first, data.clients), after

    def _evaluates(self, state: Tiers) -> Array:
        """Returns whether clients are polled in this round, ``bool[]``."""
        return state.round % (self.count if self.interval is None else self.interval) == 0


def _tiers(seconds: Array, count: int) -> Array:
    """Returns the tier of each client, 0 for the fastest: ``int32[N]``.

    >>> _tiers(jnp.array([5.0, 1.0, 9.0, 2.0, 7.0]), 2).tolist()
    [0, 0, 1, 0, 1]
    """
    place = jnp.argsort(jnp.argsort(seconds)).astype(jnp.int32)
    return place * count // len(seconds)


def _by_tier(state: Tiers, tier: Array, data: ClientData) -> Array:
    """Returns the mean score of each tier, ``f32[T]``; the previous one without answers."""
    count = len(state.chances)
    answered = state.client < data.clients
    samples = jnp.where(answered, client_sizes(data, state.client), 0).astype(jnp.float32)
    own = jnp.where(answered, tier.at[state.client].get(mode="fill", fill_value=0), count)
    total = jnp.zeros(count, jnp.float32).at[own].add(samples, mode="drop")
    summed = jnp.zeros(count, jnp.float32).at[own].add(samples * state.answer, mode="drop")
    return jnp.where(total > 0, summed / jnp.maximum(total, 1), state.accuracy)


def _chances(accuracy: Array, credits: Array) -> Array:
    """Returns P of each tier by the rank of its accuracy: ``f32[T]``; 0 without credits.

    >>> _chances(jnp.array([0.5, 0.9, 0.2, 0.7]), jnp.array([1, 1, 0, 1])).tolist()
    [0.5, 0.1666666716337204, 0.0, 0.3333333432674408]
    >>> _chances(jnp.array([jnp.nan, 0.9, 0.2]), jnp.array([1, 1, 0])).tolist()
    [0.3333333432674408, 0.6666666865348816, 0.0]
    """
    rich = credits > 0
    # An unknown accuracy, NaN, comes last, but before the tiers without credits.
    rank = jnp.argsort(jnp.lexsort((accuracy, ~rich))).astype(jnp.int32)
    n = jnp.sum(rich, dtype=jnp.int32)
    share = 2 * (n - rank) / jnp.maximum(n * (n + 1), 1)
    return jnp.where(rich, share, 0).astype(jnp.float32)
