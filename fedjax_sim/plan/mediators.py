"""Mediators: groups of clients with balanced labels, each visited by one model in sequence."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    PyTree,
    Selection,
    SetupTraffic,
    Variables,
    for_classes,
    part,
)
from fedjax_sim.engine.clients import label_counts
from fedjax_sim.engine.draws import permutation
from fedjax_sim.engine.matching import slots_of


@part
@for_classes
def mediators(slots: int, clients_each: int, classes: int) -> Selection:
    r"""Every slot is a mediator: its model visits the mediator's clients one after another.

    When the models leave the server, a uniform cohort is drawn, :math:`\gamma` clients for each
    slot. The mediators are filled one by one, each time with the client that brings the mediator's
    labels nearest to uniform,

    .. math:: \arg\min_k D_{KL}\bigl(P_{\text{mediator} \cup k} \,\Vert\, U\bigr),

    the first if several are equal. All slots must leave the server together, and no two may share a
    group of the schedule: clients of one group may be dealt to any of its slots. Every client
    reports its number of samples of each class once, before the first round, in 32 bits each.

    Args:
        slots: S, the mediators.
        clients_each: γ; after that many visits a mediator's model begins again with its first.
        classes: M, the number of classes.

    Returns:
        A selection.

    Raises:
        ValueError: if clients_each is not positive; by ``compose``, if the schedule has other
            slots; when it starts, if there are too few clients.

    Source: Duan et al. 2019 <https://arxiv.org/abs/1907.01132>, the mediators' rescheduling.
    """
    if clients_each < 1:
        raise ValueError(f"clients_each must be at least 1, got {clients_each}")
    size = slots * clients_each

    def init(variables: PyTree, data: ClientData, execution: PyTree) -> PyTree:
        del variables, execution
        if data.clients < size:
            raise ValueError(
                f"clients_per_round must be at most the {data.clients} clients, got {size}"
            )
        return label_counts(data, classes), jnp.zeros((slots, clients_each), jnp.int32)

    def draw(
        key: Array, state: PyTree, data: ClientData, clients: Array, free: Array, visits: Array
    ) -> tuple[Array, PyTree]:
        del data, clients, free
        counts, groups = state

        def regrouped() -> Array:
            cohort = jnp.sort(permutation(key, len(counts))[:size])
            return balanced_groups(counts, cohort, clients_each)

        groups = jax.lax.cond(jnp.all(visits == 0), regrouped, lambda: groups)
        return groups[jnp.arange(slots, dtype=jnp.int32), visits % clients_each], (counts, groups)

    def setup_traffic(variables: Variables, data: ClientData) -> SetupTraffic:
        del variables
        return SetupTraffic(4 * classes * data.clients, 0)

    return Selection(
        init=init,
        draw=draw,
        sticky=False,
        setup_traffic=setup_traffic,
        needs=(slots_of(slots),),
    )


def balanced_groups(counts: Array, cohort: Array, clients_each: int) -> Array:
    """The cohort dealt greedily to mediators, see :func:`mediators`.

    Args:
        counts: ``int32[N, M]``, the samples of each class at each client.
        cohort: ``int32[S * γ]``, different clients.
        clients_each: γ.

    Returns:
        ``int32[S, γ]``, each mediator's clients in the order in which they were chosen.

    >>> counts = jnp.array([[4, 0], [3, 1], [0, 4], [1, 3]])
    >>> balanced_groups(counts, jnp.arange(4, dtype=jnp.int32), 2).tolist()
    [[1, 3], [0, 2]]
    """
    labels = counts[cohort].astype(jnp.float32)
    empty = jnp.zeros(labels.shape[1], jnp.float32)

    def pick(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        free, mix, chosen = carry
        mix = jnp.where(i % clients_each == 0, empty, mix)
        union = mix[None] + labels
        share = union / jnp.sum(union, axis=1, keepdims=True)
        # KL from uniform is log M minus the entropy.
        distance = jnp.sum(jax.scipy.special.xlogy(share, share), axis=1)
        best = jnp.argmin(jnp.where(free, distance, jnp.inf))
        return free.at[best].set(False), union[best], chosen.at[i].set(cohort[best])

    start = (jnp.ones(len(cohort), bool), empty, jnp.zeros_like(cohort))
    chosen = jax.lax.fori_loop(0, len(cohort), pick, start)[2]
    return chosen.reshape(-1, clients_each)
