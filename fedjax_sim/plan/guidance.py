"""Oort: clients that teach much and are fast, and some that nobody knows yet."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import (
    Array,
    ClientData,
    LocalInfo,
    Outlook,
    Selection,
    Variables,
    concrete,
    part,
)
from fedjax_sim.base.parts import MOST
from fedjax_sim.plan.seconds import NEEDS_SECONDS, uniformly

CUT = 0.95
"""The share of the last score that is still exploited, and the quantile at which utility ends."""


class Known(NamedTuple):
    """What the selection remembers.

    Attributes:
        utility: ``f32[N]``, of each client's last visit.
        seconds: ``f32[N]``, of the same.
        last: ``int32[N]``, the number of its round, from 1; 0 if there was none.
        round: ``int32[]``, rounds begun.
        share: ``f32[]``, of the clients known, those that T lets pass.
        sums: ``f32[2W]``, the utility of the last 2W rounds, the newest at the end.
    """

    utility: Array
    seconds: Array
    last: Array
    round: Array
    share: Array
    sums: Array


@part
def guided(
    *,
    explore: float = 0.9,
    decay: float = 0.98,
    least: float = 0.2,
    penalty: float = 2.0,
    share: float = 0.3,
    step: float = 0.05,
    window: int = 20,
) -> Selection:
    r"""Clients by the utility of their last visits and their seconds, and new ones (Oort).

    .. math:: v_k = \left(\frac{u_k - \min u}{\max u - \min u} +
              \sqrt{\frac{0.1 \ln R}{R_k}}\right)
              \left(\frac{T}{s_k}\right)^{\alpha [s_k > T]}, \qquad
              u_k = n_k \sqrt{\frac{1}{n_k} \sum_i \ell_i^2}

    for round R, counted from 1, and clients that were last visited in round :math:`R_k` for
    :math:`s_k` seconds; u is cut off at its 95 % quantile. :math:`\lfloor (1-\epsilon_R) m
    \rfloor` clients are drawn with probability proportional to v among those that have at least
    95 % of the v of the last that would fit, the others among clients without a visit, with
    probability proportional to their speed; :math:`\epsilon_R = \max(\epsilon \delta^R,
    \epsilon_{\min})`. T lets a share of the clients known pass. Every W rounds that is raised by Δ
    if the utility of the last W rounds is less than that of the W before. Only clients that are
    awake are drawn. A round looks at all N clients.

    Args:
        explore: ε.
        decay: δ.
        least: ε_min.
        penalty: α.
        share: of the clients known, those that T lets pass at the start.
        step: Δ.
        window: W.

    Returns:
        A selection for a clock, and models that do not outlive a round; clients must report
        ``utility`` (:func:`fedjax_sim.reports.with_utility`).

    Raises:
        ValueError: if a number is out of range.

    Source: Lai et al. 2021 <https://arxiv.org/abs/2010.06081>, Algorithm 1; Lai 2021
    <https://github.com/SymbioticLab/Oort>, the authors' code, for the scale of u and T as a
    quantile. They can also leave out clients that were drawn often.
    """
    shares = {"explore": explore, "decay": decay, "least": least, "share": share, "step": step}
    for name, value in shares.items():
        if concrete(value) and not 0 <= value <= 1:
            raise ValueError(f"{name} must be in [0, 1], got {value}")
    if concrete(penalty) and penalty < 0:
        raise ValueError(f"penalty must be at least 0, got {penalty}")
    if not 1 <= window <= MOST:
        raise ValueError(f"window must be in 1..{MOST}, got {window}")

    def init(variables: Variables, data: ClientData, execution: object) -> Known:
        clients = data.clients
        return Known(
            utility=jnp.zeros(clients, jnp.float32),
            seconds=jnp.zeros(clients, jnp.float32),
            last=jnp.zeros(clients, jnp.int32),
            round=jnp.int32(0),
            share=jnp.float32(share),
            sums=jnp.zeros(2 * window, jnp.float32),
        )

    def timed(
        key: Array,
        state: Known,
        data: ClientData,
        clients: Array,
        free: Array,
        visits: Array,
        outlook: Outlook,
    ) -> tuple[Array, Known]:
        everyone, slots = jnp.arange(data.clients, dtype=jnp.int32), len(free)
        done, turn = state.round, state.round + 1
        older, newer = state.sums[:window], state.sums[window:]
        slows = (done >= 2 * window) & (done % window == 0) & (jnp.sum(older) > jnp.sum(newer))
        state = state._replace(share=jnp.where(slows, state.share + step, state.share))
        there = outlook.awake(everyone)
        known, new = there & (state.last > 0), there & (state.last == 0)
        share_new = jnp.maximum(explore * decay ** turn.astype(jnp.float32), least)
        wanted = jnp.floor((1 - share_new) * slots).astype(jnp.int32)
        olds, news = (jnp.sum(some, dtype=jnp.int32) for some in (known, new))
        of_new = jnp.minimum(slots - jnp.minimum(wanted, olds), news)
        of_known = jnp.minimum(slots - of_new, olds)
        exploit, explored = jax.random.split(key)
        value = jnp.where(known, _values(state, turn, known, penalty), -jnp.inf)
        # Of those that would fit, the last one's; all are taken if it is the last of all.
        ordered = -jnp.sort(-value)
        last = ordered[jnp.clip(of_known, 0, len(value) - 1)]
        among = known & (value >= CUT * jnp.where(jnp.isfinite(last), last, 0))
        picked = _drawn(exploit, value, among, of_known)
        speed = 1 / outlook.seconds(everyone, slots)
        picked |= _drawn(explored, speed, new, of_new)
        chosen = jnp.nonzero(picked, size=slots, fill_value=data.clients)[0].astype(jnp.int32)
        return chosen, state._replace(round=turn)

    def update(state: Known, client: Array, info: LocalInfo) -> Known:
        if "utility" not in info.extra:
            raise ValueError(
                "local must report its clients' utility: wrap it by reports.with_utility; it "
                f"reports {list(info.extra) or 'nothing'}"
            )
        utility = info.extra["utility"]
        total = jnp.sum(jnp.where(client < len(state.last), utility, 0))
        return state._replace(
            utility=state.utility.at[client].set(utility, mode="drop"),
            seconds=state.seconds.at[client].set(info.extra["seconds"], mode="drop"),
            last=state.last.at[client].set(state.round, mode="drop"),
            sums=jnp.concatenate([state.sums[1:], total[None]]),
        )

    return Selection(
        init=init,
        draw=uniformly,
        sticky=False,
        update=update,
        reads=("utility",),
        timed=timed,
        times=True,
        needs=NEEDS_SECONDS,
    )


def _values(state: Known, turn: Array, known: Array, penalty: float) -> Array:
    """The v of the clients that are ``known bool[N]``: ``f32[N]``."""
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
    """What a share of the ``count`` smallest values is below.

    >>> float(_quantile(jnp.array([3.0, 1.0, jnp.inf, 2.0]), jnp.int32(3), 0.5))
    2.0
    """
    place = jnp.floor(share * count.astype(jnp.float32)).astype(jnp.int32)
    return jnp.sort(values)[jnp.clip(place, 0, jnp.maximum(count - 1, 0))]


def _drawn(key: Array, weight: Array, among: Array, count: Array) -> Array:
    """``count`` of those ``among bool[N]``, in proportion to their weights: ``bool[N]``."""
    ticket = jnp.log(jnp.maximum(weight, np.finfo(np.float32).tiny))
    ticket = jnp.where(among, ticket + jax.random.gumbel(key, weight.shape, jnp.float32), -jnp.inf)
    place = jnp.zeros(len(ticket), jnp.int32)
    place = place.at[jnp.argsort(-ticket)].set(jnp.arange(len(ticket), dtype=jnp.int32))
    return among & (place < count)
