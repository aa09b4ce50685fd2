"""Mediators: groups of clients with balanced labels, each visited by one model in sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    Count,
    Need,
    PerClient,
    Selection,
    SetupTraffic,
    Variables,
    for_classes,
)
from fedjax_sim.engine.clients import label_counts
from fedjax_sim.engine.draws import permutation
from fedjax_sim.engine.matching import slots_of


@for_classes
class mediators(Selection):
    r"""Astraea: each slot is a mediator whose model visits its clients one after another.

    When the models leave the server, a uniform cohort is drawn, :math:`\gamma` clients for each
    slot. The mediators are filled one by one, each time with the client that brings the mediator's
    labels closest to uniform,

    .. math:: \arg\min_k D_{KL}\bigl(P_{\text{mediator} \cup k} \,\Vert\, U\bigr),

    the first one in case of ties. All slots must leave the server together, each in its own group
    of the flight, because clients of a group may be assigned to any of its slots. Every client
    reports its number of samples of each class once, before the first round, in 32 bits each.

    Args:
        slots: S, the number of mediators.
        clients_each: γ; after that many visits a model returns to its mediator's first client.
        classes: M, the number of classes.

    Raises:
        ValueError: if clients_each is not positive; by ``compose``, if the composition has another
            number of slots; when the state is initialised, if there are too few clients.

    Source: Duan et al. 2019 <https://arxiv.org/abs/1907.01132>, the mediators' rescheduling.
    """

    slots: int
    clients_each: Count
    classes: int

    @property
    def needs(self) -> tuple[Need, ...]:
        return (slots_of(self.slots),)

    def setup_traffic(self, variables: Variables, data: ClientData) -> SetupTraffic:
        return SetupTraffic(4 * self.classes * data.clients, 0)

    def init(
        self, variables: Variables, data: ClientData, execution: PerClient
    ) -> tuple[Array, Array]:
        if data.clients < (size := self.slots * self.clients_each):
            raise ValueError(
                f"clients_per_round must be at most the {data.clients} clients, got {size}"
            )
        groups = jnp.zeros((self.slots, self.clients_each), jnp.int32)
        return label_counts(data, self.classes), groups

    def draw(
        self, key: Array, state: tuple[Array, Array], data: ClientData, clients: Array,
        free: Array, visits: Array
    ) -> tuple[Array, tuple[Array, Array]]:  # fmt: skip
        counts, groups = state

        def regrouped() -> Array:
            size = self.slots * self.clients_each
            cohort = jnp.sort(permutation(key, len(counts))[:size])
            return balanced_groups(counts, cohort, self.clients_each)

        groups = jax.lax.cond(jnp.all(visits == 0), regrouped, lambda: groups)
        slot = jnp.arange(self.slots, dtype=jnp.int32)
        return groups[slot, visits % self.clients_each], (counts, groups)


def balanced_groups(counts: Array, cohort: Array, clients_each: int) -> Array:
    """Assigns the cohort greedily to mediators, given all clients' counts of classes.

    >>> counts = jnp.array([[4, 0], [3, 1], [0, 4], [1, 3]])
    >>> balanced_groups(counts, jnp.arange(4, dtype=jnp.int32), 2).tolist()
    [[1, 3], [0, 2]]
    >>> some_hidden = jnp.array([[0, 0], [4, 0], [0, 4], [0, 0]])
    >>> balanced_groups(some_hidden, jnp.arange(4, dtype=jnp.int32), 2).tolist()
    [[1, 2], [0, 3]]
    """
    labels = counts[cohort].astype(jnp.float32)
    empty = jnp.zeros(labels.shape[1], jnp.float32)

    def pick(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        free, mix, chosen = carry
        mix = jnp.where(i % clients_each == 0, empty, mix)
        union = mix[None] + labels
        total = jnp.sum(union, axis=1)
        share = union / jnp.maximum(total, 1)[:, None]
        # KL from uniform is log M minus the entropy. A client without labels is the last to begin.
        distance = jnp.sum(jax.scipy.special.xlogy(share, share), axis=1)
        distance = jnp.where(total > 0, distance, 1)
        best = jnp.argmin(jnp.where(free, distance, jnp.inf))
        return free.at[best].set(False), union[best], chosen.at[i].set(cohort[best])

    start = (jnp.ones(len(cohort), bool), empty, jnp.zeros_like(cohort))
    chosen = jax.lax.fori_loop(0, len(cohort), pick, start)[2]
    return chosen.reshape(-1, clients_each)
