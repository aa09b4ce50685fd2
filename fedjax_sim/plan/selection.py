"""Which client each slot visits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import (
    Array,
    ClientData,
    ClientView,
    LocalInfo,
    PyTree,
    Selection,
    SetupTraffic,
    Variables,
    part,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.draws import distinct, draw_free
from fedjax_sim.plan.choice import power_of_choice
from fedjax_sim.plan.guidance import guided
from fedjax_sim.plan.mediators import mediators
from fedjax_sim.plan.reinforcement import deep_q
from fedjax_sim.plan.seconds import awake, within_deadline
from fedjax_sim.plan.tiering import tiers
from fedjax_sim.privacy import cyclic, poisson, shuffled

__all__ = [
    "awake",
    "cyclic",
    "deep_q",
    "everyone",
    "guided",
    "importance",
    "mediators",
    "poisson",
    "power_of_choice",
    "shuffled",
    "tiers",
    "uniform",
    "within_deadline",
]

InitialScores = Literal["gradient", "ones"]


@part
def uniform(*, sticky: bool = False, active: int | None = None) -> Selection:
    """Uniform draws without replacement, so that no two slots visit the same client.

    Args:
        sticky: False draws for every slot in every round (FedAvg, RADFed); True keeps a slot's
          client until the slot is due, and draws from the clients that are free (phase shift: line
          7 of Cornelis's Algorithm 2).
        active: how many slots visit a client in a round, the least visited first, ties broken at
          random; the others are idle. The slots' visits never differ by more than one. None: all.

    Returns:
        A selection without state.

    Raises:
        ValueError: if active is out of range, or given for sticky slots.

    Source: McMahan et al. 2017 <https://arxiv.org/abs/1602.05629>, Algorithm 1; Xue et al. 2021
    <https://arxiv.org/abs/2108.07433>, section III-A (active).

    >>> data = ClientData(None, None, None, jnp.arange(6), 1)  # 5 clients
    >>> free, visits = jnp.array([True, False, True]), jnp.zeros(3, jnp.int32)
    >>> draw = uniform(sticky=True).draw
    >>> clients, _ = draw(jax.random.key(0), (), data, jnp.array([5, 2, 5]), free, visits)
    >>> int(clients[1]), len({*clients.tolist()})
    (2, 3)
    """
    _check_active(active)
    if sticky and active is not None:
        raise ValueError(f"active must be None if slots keep their clients, got {active}")

    def draw(
        key: Array, state: PyTree, data: ClientData, clients: Array, free: Array, visits: Array
    ) -> tuple[Array, PyTree]:
        n, slots = data.clients, len(free)
        if active is not None:
            queue = distinct(key, min(active, slots), n)
            return _served(jax.random.fold_in(key, 1), queue, n, visits, active), state
        # Clients of slots that are not free are taken.
        queue = distinct(key, slots, n, jnp.where(free, n, clients))
        rank = jnp.cumsum(free, dtype=jnp.int32) - 1
        return jnp.where(free, queue[jnp.maximum(rank, 0)], clients), state

    def one(key: Array, state: PyTree, data: ClientData, taken: Array) -> Array:
        return draw_free(key, data.clients, taken)

    return Selection(
        init=lambda variables, data, execution: (),
        draw=draw,
        sticky=sticky,
        active=active,
        another=one if active is None and not sticky else None,
        participation=None if sticky else "fixed",
    )


@part
def everyone() -> Selection:
    """All clients in every round, each in the slot of its number.

    Returns:
        A selection without state.

    >>> data = ClientData(None, None, None, jnp.arange(4), 1)  # 3 clients
    >>> free, visits = jnp.ones(3, bool), jnp.zeros(3, jnp.int32)
    >>> everyone().draw(jax.random.key(0), (), data, jnp.array([3, 3, 3]), free, visits)[0].tolist()
    [0, 1, 2]
    """

    def draw(
        key: Array, state: PyTree, data: ClientData, clients: Array, free: Array, visits: Array
    ) -> tuple[Array, PyTree]:
        return jnp.arange(len(free), dtype=jnp.int32), state

    return Selection(
        init=lambda variables, data, execution: (),
        draw=draw,
        sticky=False,
        everyone=True,
        participation="cyclic",
    )


@part
def importance(
    score: Callable[[Variables, ClientView], Array],
    gamma: float = 0.9,
    *,
    initial: InitialScores = "gradient",
    active: int | None = None,
) -> Selection:
    r"""Draws without replacement with probability proportional to running scores (RADFedi).

    .. math:: p_k \leftarrow (1-\gamma)\,p_k + \gamma\,q_k \quad \text{for every } k
              \text{ that trained, which reports } q_k

    A cohort is the m clients with the largest :math:`\log p_k + G_k`, with independent standard
    Gumbel :math:`G_k`: in that order they are distributed exactly as m clients drawn one after
    another, each with probability proportional to p among those that are left. A client with p = 0
    is drawn only if no other is left. The clients must report ``importance``
    (:func:`fedjax_sim.reports.with_importance`).

    Args:
        score: ``(variables, client) -> f32[]``, q of a client at a model, at least 0
          (:func:`fedjax_sim.reports.squared_gradient`).
        gamma: γ, the weight of a client's newest score in its running mean.
        initial: p at the start: "gradient" is each client's score at :math:`w_1`, which costs a
          pass over all samples, and a model to every client; "ones" draws uniformly until scores
          are known.
        active: see :func:`uniform`.

    Returns:
        A selection; its state is p, ``f32[N]``.

    Raises:
        ValueError: if gamma, initial or active is out of range.

    Source: Xue et al. 2021 <https://arxiv.org/abs/2108.07433>, Algorithm 2 of either version; Xue
    et al. 2021 <https://github.com/yxsub/RADFed>, the authors' code, for the first pass; Kool et
    al. 2019 <https://arxiv.org/abs/1903.06059>, appendix A, for the draws.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be in [0, 1], got {gamma}")
    if initial not in ("gradient", "ones"):
        raise ValueError(f"initial must be 'gradient' or 'ones', got {initial!r}")
    _check_active(active)

    def init(variables: Variables, data: ClientData, execution: Any) -> Array:
        if initial == "ones":
            return jnp.ones(data.clients, jnp.float32)
        return execution.per_client(score, variables, data)

    def draw(
        key: Array, p: Array, data: ClientData, clients: Array, free: Array, visits: Array
    ) -> tuple[Array, Array]:
        del data, clients, free  # no slot keeps its client: all are free
        # log 0 would rank the clients without a score by their number.
        ticket = jnp.log(jnp.maximum(p, np.finfo(p.dtype).tiny))
        ticket += jax.random.gumbel(key, p.shape, jnp.float32)
        count = len(visits) if active is None else min(active, len(visits))
        queue = jax.lax.top_k(ticket, count)[1].astype(jnp.int32)
        if active is not None:
            return _served(jax.random.fold_in(key, 1), queue, len(p), visits, active), p
        return queue, p

    def update(p: Array, client: Array, info: LocalInfo) -> Array:
        if "importance" not in info.extra:
            raise ValueError(
                "local must report its clients' importance: wrap it by "
                f"reports.with_importance; it reports {list(info.extra) or 'nothing'}"
            )
        new = (1 - gamma) * p[client] + gamma * info.extra["importance"]
        return p.at[client].set(new, mode="drop")  # client N has no row

    def setup_traffic(variables: Variables, data: ClientData) -> SetupTraffic:
        return SetupTraffic(4 * data.clients, data.clients * tree.num_bytes(variables))

    return Selection(
        init=init,
        draw=draw,
        sticky=False,
        update=update,
        active=active,
        reads=("importance",),
        setup_traffic=setup_traffic if initial == "gradient" else None,
    )


def _check_active(active: int | None) -> None:
    if active is not None and active < 1:
        raise ValueError(f"active must be at least 1, got {active}")


def _served(key: Array, queue: Array, idle: int, visits: Array, active: int) -> Array:
    """The first ``active`` clients of the queue to the least visited slots; the others are idle.

    Args:
        key: for ties.
        queue: ``int32[active]``, clients in the order in which they were drawn.
        idle: N, for a slot without a client.
        visits: ``int32[S]``.
        active: at most S.

    Returns:
        ``int32[S]``.
    """
    slots = len(visits)
    if active > slots:
        raise ValueError(f"active must be at most the {slots} slots, got {active}")
    first = jnp.lexsort((jax.random.uniform(key, (slots,), jnp.float32), visits))[:active]
    return jnp.full(slots, idle, jnp.int32).at[first].set(queue)
