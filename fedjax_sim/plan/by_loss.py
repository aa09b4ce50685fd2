"""Selections by the clients' losses: power of choice and Oort."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import (
    Array,
    ClientData,
    ClientView,
    Count,
    LocalInfo,
    NonNegative,
    Outlook,
    PerClient,
    PyTree,
    Selection,
    Share,
    Variables,
)
from fedjax_sim.base.ranges import MOST
from fedjax_sim.engine.clients import list_ends
from fedjax_sim.engine.draws import by_size
from fedjax_sim.plan.seconds import ByClock


class Answers(NamedTuple):
    """The candidates ``int32[d]``, N without an answer, and their losses ``f32[d]``."""

    client: Array
    score: Array


class power_of_choice(Selection):
    r"""Power of choice: the clients with the largest losses of d candidates.

    .. math:: A \sim n_k / n, \; |A| = d, \qquad U = \text{the } m \text{ of } A
              \text{ with the largest } F_k(w)

    With a ``score`` the candidates are sent the server model and return its loss on their own
    samples, 4 bytes each; clients that train are not sent it again. Without a score, the losses are
    from the reports of the clients' last visits, which are all that it costs; clients without a
    report come first.

    Args:
        candidates: d, the number of clients drawn in proportion to :math:`n_k`, at least the number
            of slots; all clients if there are fewer.
        score: ``(variables, client) -> f32[]`` (:func:`fedjax_sim.reports.mean_loss`); None: the
            reported losses.

    Raises:
        ValueError: in the first round, if there are more slots.

    Source: Cho et al. 2022 <https://arxiv.org/abs/2010.01243>, section 4: π_pow-d, and π_rpow-d
    (without a score).
    """

    candidates: Count
    score: Callable[[Variables, ClientView], Array] | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return ("loss",) if self.score is None else ()

    @property
    def poll(self) -> Callable[[Array, PyTree, ClientData], Array] | None:
        return None if self.score is None else self._candidates

    @property
    def ask(self) -> Callable[[Variables, ClientView], Array] | None:
        return self.score

    def record_answers(self, state: Answers, client: Array, answers: Array) -> Answers:
        return Answers(client, answers)

    def init(self, variables: Variables, data: ClientData, execution: PerClient) -> PyTree:
        if self.score is None:
            return jnp.full(data.clients, jnp.inf, jnp.float32)
        size = min(self.candidates, data.clients)
        return Answers(jnp.full(size, data.clients, jnp.int32), jnp.zeros(size, jnp.float32))

    def draw(
        self, key: Array, state: PyTree, data: ClientData, clients: Array, free: Array,
        visits: Array
    ) -> tuple[Array, PyTree]:  # fmt: skip
        slots = len(free)
        if slots > self.candidates:
            raise ValueError(
                f"candidates must be at least the {slots} slots, got {self.candidates}"
            )
        if self.score is None:
            client = self._candidates(key, state, data)
            loss = state.at[client].get(mode="fill", fill_value=-jnp.inf)
        else:
            client, loss = state
        largest = jax.lax.top_k(jnp.where(client < data.clients, loss, -jnp.inf), slots)[1]
        return client[largest], state

    def update(self, state: PyTree, client: Array, info: LocalInfo) -> PyTree:
        return state.at[client].set(info.loss, mode="drop") if self.score is None else state

    def _candidates(self, key: Array, state: PyTree, data: ClientData) -> Array:
        return by_size(key, min(self.candidates, data.clients), list_ends(data))


CUT = 0.95
"""The share of the last score that is still exploited, and the quantile at which utility ends."""


class Visited(NamedTuple):
    """The state of the selection.

    Attributes:
        utility: ``f32[N]``, the utility of each client's last visit.
        seconds: ``f32[N]``, the duration of each client's last visit.
        last: ``int32[N]``, the number of its round, from 1; 0 for clients without a visit.
        round: ``int32[]``, the number of rounds begun.
        share: ``f32[]``, the share of visited clients with at most T seconds.
        sums: ``f32[2W]``, the utility of the last 2W rounds, the newest at the end.
    """

    utility: Array
    seconds: Array
    last: Array
    round: Array
    share: Array
    sums: Array


class guided(ByClock):
    r"""Oort: draws clients by the utility and duration of their last visits, and new clients.

    .. math:: v_k = \left(\frac{u_k - \min u}{\max u - \min u} +
              \sqrt{\frac{0.1 \ln R}{R_k}}\right)
              \left(\frac{T}{s_k}\right)^{\alpha [s_k > T]}, \qquad
              u_k = n_k \sqrt{\frac{1}{n_k} \sum_i \ell_i^2}

    for round R, counted from 1, and clients that were last visited in round :math:`R_k` for
    :math:`s_k` seconds; u is clipped at its 95 % quantile. :math:`\lfloor (1-\epsilon_R) m
    \rfloor` clients are drawn in proportion to v among those with at least 95 % of the v of the
    first that would not fit, the others in proportion to their speed among clients without a visit;
    :math:`\epsilon_R = \max(\epsilon \delta^R, \epsilon_{\min})`. T is a quantile of the seconds of
    the visited clients. Every W rounds its share is raised by Δ if the utility of the last W rounds
    is less than that of the W rounds before. Only clients that are awake are drawn. A round reads
    all N clients. Clients must report ``utility`` (:func:`fedjax_sim.local.with_utility`).

    Args:
        explore: ε.
        decay: δ.
        least: ε_min.
        penalty: α.
        share: the share of visited clients with at most T seconds, at the start.
        step: Δ.
        window: W.

    Source: Lai et al. 2021 <https://arxiv.org/abs/2010.06081>, Algorithm 1; Lai 2021
    <https://github.com/SymbioticLab/Oort>, the authors' code, for the scale of u and T as a
    quantile. Their code can also exclude clients that were drawn often.
    """

    _: dataclasses.KW_ONLY
    explore: Share = 0.9
    decay: Share = 0.98
    least: Share = 0.2
    penalty: NonNegative = 2.0
    share: Share = 0.3
    step: Share = 0.05
    window: int = 20

    reads = ("utility",)
    times = True

    def __post_init__(self) -> None:
        if not 1 <= self.window <= MOST:
            raise ValueError(f"window must be in 1..{MOST}, got {self.window}")

    def init(self, variables: Variables, data: ClientData, execution: PerClient) -> Visited:
        clients = data.clients
        return Visited(
            utility=jnp.zeros(clients, jnp.float32),
            seconds=jnp.zeros(clients, jnp.float32),
            last=jnp.zeros(clients, jnp.int32),
            round=jnp.int32(0),
            share=jnp.float32(self.share),
            sums=jnp.zeros(2 * self.window, jnp.float32),
        )

    def _timed(
        self, key: Array, state: Visited, data: ClientData, slots: int, outlook: Outlook
    ) -> tuple[Array, Visited]:
        everyone, window = jnp.arange(data.clients, dtype=jnp.int32), self.window
        done, turn = state.round, state.round + 1
        older, newer = state.sums[:window], state.sums[window:]
        slows = (done >= 2 * window) & (done % window == 0) & (jnp.sum(older) > jnp.sum(newer))
        state = state._replace(share=jnp.where(slows, state.share + self.step, state.share))
        awake = outlook.awake(everyone)
        known, new = awake & (state.last > 0), awake & (state.last == 0)
        share_new = jnp.maximum(self.explore * self.decay ** turn.astype(jnp.float32), self.least)
        wanted = jnp.floor((1 - share_new) * slots).astype(jnp.int32)
        olds, news = (jnp.sum(some, dtype=jnp.int32) for some in (known, new))
        of_new = jnp.minimum(slots - jnp.minimum(wanted, olds), news)
        of_known = jnp.minimum(slots - of_new, olds)
        exploit_key, explore_key = jax.random.split(key)
        value = jnp.where(known, _values(state, turn, known, self.penalty), -jnp.inf)
        # The v of the first client that would not fit; all are candidates if all fit.
        ordered = -jnp.sort(-value)
        last = ordered[jnp.clip(of_known, 0, len(value) - 1)]
        among = known & (value >= CUT * jnp.where(jnp.isfinite(last), last, 0))
        picked = _draw_weighted(exploit_key, value, among, of_known)
        speed = 1 / outlook.seconds(everyone, slots)
        picked |= _draw_weighted(explore_key, speed, new, of_new)
        cohort = jnp.nonzero(picked, size=slots, fill_value=data.clients)[0].astype(jnp.int32)
        return cohort, state._replace(round=turn)

    def update(self, state: Visited, client: Array, info: LocalInfo) -> Visited:
        utility = info.extra["utility"]
        total = jnp.sum(jnp.where(client < len(state.last), utility, 0))
        return state._replace(
            utility=state.utility.at[client].set(utility, mode="drop"),
            seconds=state.seconds.at[client].set(info.extra["seconds"], mode="drop"),
            last=state.last.at[client].set(state.round, mode="drop"),
            sums=jnp.concatenate([state.sums[1:], total[None]]),
        )


def _values(state: Visited, turn: Array, known: Array, penalty: float) -> Array:
    """Returns v of the clients that are ``known bool[N]``: ``f32[N]``."""
    u = jnp.where(known, state.utility, jnp.inf)
    u = jnp.minimum(state.utility, _quantile(u, jnp.sum(known, dtype=jnp.int32), CUT))
    low = jnp.min(u, where=known, initial=jnp.inf)
    high = jnp.max(u, where=known, initial=-jnp.inf)
    rate = (u - low) / jnp.maximum(high - low, 1e-4)
    turns, last = turn.astype(jnp.float32), jnp.maximum(state.last, 1).astype(jnp.float32)
    stale = jnp.sqrt(0.1 * jnp.log(turns) / last)
    visited = state.last > 0
    seconds = jnp.where(visited, state.seconds, jnp.inf)
    limit = _quantile(seconds, jnp.sum(visited, dtype=jnp.int32), state.share)
    return (rate + stale) * jnp.minimum(limit / seconds, 1) ** penalty


def _quantile(values: Array, count: Array, share: Array | float) -> Array:
    """Returns the quantile of the ``count`` smallest values at a share.

    >>> float(_quantile(jnp.array([3.0, 1.0, jnp.inf, 2.0]), jnp.int32(3), 0.5))
    2.0
    """
    place = jnp.floor(share * count.astype(jnp.float32)).astype(jnp.int32)
    return jnp.sort(values)[jnp.clip(place, 0, jnp.maximum(count - 1, 0))]


def _draw_weighted(key: Array, weight: Array, among: Array, count: Array) -> Array:
    """Draws ``count`` clients ``among bool[N]`` in proportion to their weights: ``bool[N]``."""
    ticket = jnp.log(jnp.maximum(weight, np.finfo(np.float32).tiny))
    ticket = jnp.where(among, ticket + jax.random.gumbel(key, weight.shape, jnp.float32), -jnp.inf)
    return among & (jnp.argsort(jnp.argsort(-ticket)).astype(jnp.int32) < count)
