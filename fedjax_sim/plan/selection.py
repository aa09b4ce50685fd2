"""Selections: the client that each slot visits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_sim.base import (
    Array,
    ClientData,
    ClientView,
    Count,
    LocalInfo,
    Participation,
    PerClient,
    PyTree,
    Selection,
    SetupTraffic,
    SetupTrafficOf,
    Share,
    Variables,
)
from fedjax_sim.engine import tree
from fedjax_sim.engine.chances import EQUAL_OR_UNBIASED, inclusion, systematic
from fedjax_sim.engine.clients import list_ends
from fedjax_sim.engine.draws import distinct, draw_free
from fedjax_sim.plan.by_loss import guided, power_of_choice
from fedjax_sim.plan.mediators import mediators
from fedjax_sim.plan.reinforcement import deep_q
from fedjax_sim.plan.seconds import awake, tiers, within_deadline
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
    "with_replacement",
    "within_deadline",
]

InitialScores = Literal["gradient", "ones"]


class uniform(Selection):
    """Draws clients uniformly without replacement: no two slots visit the same client.

    Args:
        sticky: False draws for every slot in every round (FedAvg, RADFed); True keeps a slot's
            client until the slot is due, and draws from the free clients (phase shift: line 7 of
            Cornelis's Algorithm 2).
        active: the number of slots that visit a client in a round, the least visited first, ties
            broken at random; the others are idle. The slots' visits never differ by more than one.
            None: all slots.

    Raises:
        ValueError: if active is given for sticky slots, or more than the slots.

    Source: McMahan et al. 2017 <https://arxiv.org/abs/1602.05629>, Algorithm 1; Xue et al. 2021
    <https://arxiv.org/abs/2108.07433>, section III-A (active).

    >>> data = ClientData(None, None, None, jnp.arange(6), 1)  # 5 clients
    >>> free, visits = jnp.array([True, False, True]), jnp.zeros(3, jnp.int32)
    >>> draw = uniform(sticky=True).draw
    >>> clients, _ = draw(jax.random.key(0), (), data, jnp.array([5, 2, 5]), free, visits)
    >>> int(clients[1]), len({*clients.tolist()})
    (2, 3)
    """

    _: dataclasses.KW_ONLY
    sticky: bool = False
    active: Count | None = None

    def __post_init__(self) -> None:
        if self.sticky and self.active is not None:
            raise ValueError(f"active must be None if slots keep their clients, got {self.active}")

    @property
    def another(self) -> Callable[[Array, PyTree, ClientData, Array], Array] | None:
        if self.sticky or self.active is not None:
            return None
        return lambda key, state, data, taken: draw_free(key, data.clients, taken)

    @property
    def participation(self) -> Participation | None:
        return None if self.sticky else "fixed"

    @property
    def expected_visits(self) -> Callable[[PyTree, ClientData, int], Array] | None:
        if self.sticky:
            return None

        def alike(state: PyTree, data: ClientData, slots: int) -> Array:
            count = slots if self.active is None else self.active
            return jnp.full(data.clients, count / data.clients, jnp.float32)

        return alike

    def draw(
        self, key: Array, state: PyTree, data: ClientData, clients: Array, free: Array,
        visits: Array
    ) -> tuple[Array, PyTree]:  # fmt: skip
        n, slots, active = data.clients, len(free), self.active
        if active is not None:
            queue = distinct(key, min(active, slots), n)
            return _assign(jax.random.fold_in(key, 1), queue, n, visits, active), state
        # Clients of slots that are not free are taken.
        queue = distinct(key, slots, n, jnp.where(free, n, clients))
        rank = jnp.cumsum(free, dtype=jnp.int32) - 1
        return jnp.where(free, queue[jnp.maximum(rank, 0)], clients), state


class everyone(Selection):
    """Selects all clients in every round, each in the slot of its number."""

    everyone = True
    participation = "cyclic"

    def expected_visits(self, state: PyTree, data: ClientData, slots: int) -> Array:
        return jnp.ones(data.clients, jnp.float32)

    def draw(
        self, key: Array, state: PyTree, data: ClientData, clients: Array, free: Array,
        visits: Array
    ) -> tuple[Array, PyTree]:  # fmt: skip
        return jnp.arange(len(free), dtype=jnp.int32), state


class with_replacement(Selection):
    r"""Draws every slot's client independently, in proportion to its samples (FedProx).

    .. math:: k_1, \dots, k_m \sim p, \quad p_k = n_k / n, \qquad
              w_{t+1} = \frac1m \sum_i w_{k_i}

    With equal weights the mean over the draw is :math:`\sum_k p_k w_k`, without bias; with
    :class:`fedjax_sim.weighting.unbiased` it is the mean over all clients. A client that is drawn
    twice counts twice in the mean, the traffic and the time.

    Source: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith 2020 <https://arxiv.org/abs/1812.06127>,
    Algorithm 2.

    >>> data = ClientData(None, None, None, jnp.array([0, 1, 1, 9]), 8)  # 1, 0 and 8 samples
    >>> free, visits = jnp.ones(5, bool), jnp.zeros(5, jnp.int32)
    >>> with_replacement().draw(jax.random.key(0), (), data, visits, free, visits)[0].tolist()
    [2, 2, 2, 2, 2]
    """

    repeats = True
    needs = (EQUAL_OR_UNBIASED,)

    def expected_visits(self, state: PyTree, data: ClientData, slots: int) -> Array:
        ends = list_ends(data)
        total = (ends[-1] - ends[0]).astype(jnp.float32)
        return slots / total * jnp.diff(ends).astype(jnp.float32)

    def draw(
        self, key: Array, state: PyTree, data: ClientData, clients: Array, free: Array,
        visits: Array
    ) -> tuple[Array, PyTree]:  # fmt: skip
        start = list_ends(data)
        sample = jax.random.randint(key, (len(free),), start[0], start[-1], jnp.int32)
        return jnp.searchsorted(start, sample, side="right").astype(jnp.int32) - 1, state


class importance(Selection):
    r"""Draws clients without replacement, in proportion to running scores (RADFedi).

    .. math:: p_k \leftarrow (1-\gamma)\,p_k + \gamma\,q_k \quad \text{for every } k
              \text{ that trained, which reports } q_k

    A cohort is the m clients with the largest :math:`\log p_k + G_k`, with independent standard
    Gumbel :math:`G_k`: in this order they have exactly the distribution of m successive draws, each
    in proportion to p among the remaining clients. A client with p = 0 is drawn only if no other
    remains. With ``exact`` a client joins with the probability

    .. math:: \pi_k = \min(1, c\, p_k), \qquad \sum_k \pi_k = m

    which :class:`fedjax_sim.weighting.unbiased` needs; successive draws have no such formula. The
    clients must report ``importance`` (:func:`fedjax_sim.local.with_importance`). The state is p,
    ``f32[N]``.

    Args:
        score: ``(variables, client) -> f32[]``, q of a client at a model, at least 0
            (:func:`fedjax_sim.reports.squared_gradient`).
        gamma: γ, the weight of a client's newest score in its running mean.
        initial: p at the start: "gradient" is each client's score at :math:`w_1`, which costs a
            pass over all samples, and a model to every client; "ones" draws uniformly until scores
            are known.
        active: see :func:`uniform`.
        exact: draws with stated probabilities (systematic sampling).

    Source: Xue et al. 2021 <https://arxiv.org/abs/2108.07433>, Algorithm 2 of either version; Xue
    et al. 2021 <https://github.com/yxsub/RADFed>, the authors' code, for the first pass; Kool et
    al. 2019 <https://arxiv.org/abs/1903.06059>, appendix A, for the draws.
    """

    score: Callable[[Variables, ClientView], Array]
    gamma: Share = 0.9
    _: dataclasses.KW_ONLY
    initial: InitialScores = "gradient"
    active: Count | None = None
    exact: bool = False

    reads = ("importance",)

    @property
    def setup_traffic(self) -> SetupTrafficOf | None:
        def gradients(variables: Variables, data: ClientData) -> SetupTraffic:
            return SetupTraffic(4 * data.clients, data.clients * tree.num_bytes(variables))

        return gradients if self.initial == "gradient" else None

    def init(self, variables: Variables, data: ClientData, execution: PerClient) -> Array:
        if self.initial == "ones":
            return jnp.ones(data.clients, jnp.float32)
        scores: Array = execution.per_client(self.score, variables, data)
        return scores

    def draw(
        self, key: Array, p: Array, data: ClientData, clients: Array, free: Array, visits: Array
    ) -> tuple[Array, Array]:
        count = self._count(len(visits))
        if self.exact:
            queue = systematic(key, self._chances(p, count), count)
        else:
            # log 0 would rank the clients without a score by their number.
            ticket = jnp.log(jnp.maximum(p, np.finfo(p.dtype).tiny))
            ticket += jax.random.gumbel(key, p.shape, jnp.float32)
            queue = jax.lax.top_k(ticket, count)[1].astype(jnp.int32)
        if self.active is None:
            return queue, p
        return _assign(jax.random.fold_in(key, 1), queue, len(p), visits, self.active), p

    @property
    def expected_visits(self) -> Callable[[PyTree, ClientData, int], Array] | None:
        if not self.exact:
            return None

        def chances(p: Array, data: ClientData, slots: int) -> Array:
            return self._chances(p, self._count(slots))

        return chances

    def _count(self, slots: int) -> int:
        """Returns the size of the cohort."""
        return slots if self.active is None else min(self.active, slots)

    def _chances(self, p: Array, count: int) -> Array:
        """Returns π; clients with p = 0 share the slots that the others leave."""
        return inclusion(jnp.maximum(p, np.finfo(p.dtype).tiny), count)

    def update(self, p: Array, client: Array, info: LocalInfo) -> Array:
        new = (1 - self.gamma) * p[client] + self.gamma * info.extra["importance"]
        return p.at[client].set(new, mode="drop")  # client N has no row


def _assign(key: Array, queue: Array, idle: int, visits: Array, active: int) -> Array:
    """Assigns the clients of the queue to the least visited slots; the others have ``idle``, N."""
    slots = len(visits)
    if active > slots:
        raise ValueError(f"active must be at most the {slots} slots, got {active}")
    first = jnp.lexsort((jax.random.uniform(key, (slots,), jnp.float32), visits))[:active]
    return jnp.full(slots, idle, jnp.int32).at[first].set(queue)
