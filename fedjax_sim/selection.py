"""Which client each slot visits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim import tree
from fedjax_sim.base import (
    Array,
    ClientData,
    ClientView,
    LocalInfo,
    Opening,
    PyTree,
    Selection,
    Variables,
)

InitialScores = Literal["gradient", "ones"]


def uniform(*, held: bool = False, active: int | None = None) -> Selection:
    """Uniform draws without replacement, so that no two slots visit the same client.

    Args:
        held: False draws for every slot in every round (FedAvg, RADFed); True keeps a slot's client
          until the slot is due (phase shift), and draws from the clients that are free.
        active: how many slots visit a client in a round, the least visited first, ties broken by
          chance; the others rest. After any number of rounds their visits differ by at most one.
          None: all.

    Returns:
        A selection without state.

    Raises:
        ValueError: if active is out of range, or given where slots keep their clients.

    Source: McMahan et al. 2017, Algorithm 1; Cornelis, listing 2 line 7 (held); RADFed, section
    III-A (active).
    """
    _check_active(active)
    if held and active is not None:
        raise ValueError(f"active must be None where slots keep their clients, got {active}")

    def draw(
        key: Array, state: PyTree, data: ClientData, clients: Array, vacant: Array, visits: Array
    ) -> tuple[Array, PyTree]:
        n = data.start.shape[0] - 1
        ticket = jax.random.uniform(key, (n,))
        # Clients of slots that are not vacant are taken; row n swallows the vacant ones' marks.
        taken = jnp.zeros(n + 1, bool).at[jnp.where(vacant, n, clients)].set(True)[:n]
        queue = jnp.argsort(jnp.where(taken, 2.0, ticket)).astype(jnp.int32)
        if active is not None:
            return _served(jax.random.fold_in(key, 1), queue, visits, active), state
        rank = jnp.cumsum(vacant, dtype=jnp.int32) - 1
        return jnp.where(vacant, queue[jnp.maximum(rank, 0)], clients), state

    return Selection(
        init=lambda variables, data, execution: (), draw=draw, held=held, active=active
    )


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

    A cohort is the m largest of :math:`\log p_k + G_k` with independent standard Gumbel
    :math:`G_k`: in order, they are distributed exactly as m clients drawn one after another, each
    with probability proportional to p among those that are left. A client with p = 0 is drawn when
    no other is left. The clients must report ``importance``
    (:func:`fedjax_sim.importance.with_importance`).

    Args:
        score: ``(variables, client) -> f32[]``, q of a client at a model, at least 0
          (:func:`fedjax_sim.importance.squared_gradient`).
        gamma: γ, the weight of the newest score.
        initial: p at the start: "gradient" is each client's score at :math:`w_1`, which costs a
          pass over all samples, and a model to every client; "ones" draws uniformly until scores
          are known.
        active: see :func:`uniform`.

    Returns:
        A selection; its state is p, ``f32[N]``.

    Raises:
        ValueError: if gamma, initial or active is out of range.

    Source: Xue, Klabjan, Luo, Algorithm 2 of either version of "Aggregation delayed federated
    learning"; the first pass is in the authors' code alone. Draws: Kool, van Hoof, Welling,
    "Stochastic beams and where to find them", 2019, appendix A.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be in [0, 1], got {gamma}")
    if initial not in ("gradient", "ones"):
        raise ValueError(f"initial must be 'gradient' or 'ones', got {initial!r}")
    _check_active(active)

    def init(variables: Variables, data: ClientData, execution: Any) -> Array:
        if initial == "ones":
            return jnp.ones(data.start.shape[0] - 1, jnp.float32)
        return execution.per_client(score, variables, data)

    def draw(
        key: Array, p: Array, data: ClientData, clients: Array, vacant: Array, visits: Array
    ) -> tuple[Array, Array]:
        del data, clients, vacant  # no slot keeps its client: all are vacant
        # log 0 would rank clients by number.
        ticket = jnp.log(jnp.maximum(p, np.finfo(p.dtype).tiny)) + jax.random.gumbel(key, p.shape)
        queue = jnp.argsort(-ticket).astype(jnp.int32)
        if active is not None:
            return _served(jax.random.fold_in(key, 1), queue, visits, active), p
        return queue[: len(visits)], p

    def update(p: Array, client: Array, info: LocalInfo) -> Array:
        if "importance" not in info.extra:
            raise ValueError(
                "local must report its clients' importance: wrap it by "
                f"importance.with_importance; it reports {list(info.extra) or 'nothing'}"
            )
        new = (1 - gamma) * p[client] + gamma * info.extra["importance"]
        return p.at[client].set(new, mode="drop")  # nobody has no row

    def opening(variables: Variables, data: ClientData) -> Opening:
        clients = data.start.shape[0] - 1
        return Opening(4 * clients, clients * tree.num_bytes(variables))

    return Selection(
        init=init,
        draw=draw,
        held=False,
        update=update,
        active=active,
        reads=("importance",),
        opening=opening if initial == "gradient" else None,
    )


def _check_active(active: int | None) -> None:
    if active is not None and active < 1:
        raise ValueError(f"active must be at least 1, got {active}")


def _served(key: Array, queue: Array, visits: Array, active: int) -> Array:
    """The first ``active`` clients of the queue to the least visited slots, nobody to the others.

    Args:
        key: for ties.
        queue: ``int32[N]``, clients in the order in which they were drawn.
        visits: ``int32[S]``.
        active: at most S.

    Returns:
        ``int32[S]``.
    """
    slots = len(visits)
    if active > slots:
        raise ValueError(f"active must be at most the {slots} slots, got {active}")
    first = jnp.lexsort((jax.random.uniform(key, (slots,)), visits))[:active]
    return jnp.full(slots, len(queue), jnp.int32).at[first].set(queue[:active])
