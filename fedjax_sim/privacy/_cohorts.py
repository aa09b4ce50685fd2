"""Cohorts that join by coins, or in turn."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, ClientData, PyTree, Selection, Variables, part

OVERFLOW = 1e-6
"""The probability that a round's Poisson cohort is larger than its slots is at most this."""


@part
def poisson(clients_per_round: float) -> Selection:
    """Every client joins each round by its own coin, with probability q = m/N.

    Clients beyond the number of slots are dropped at random; see :func:`slots_for`.

    Args:
        clients_per_round: m, the expected cohort.

    Returns:
        A selection without state, for models that do not outlive a round.

    Raises:
        ValueError: if there are fewer than m clients, or m is not positive.

    Source: McMahan et al. 2018 <https://arxiv.org/abs/1710.06963>, Algorithm 1.
    """
    if not clients_per_round > 0:
        raise ValueError(f"clients_per_round must be positive, got {clients_per_round}")

    def init(variables: Variables, data: ClientData, execution: object) -> PyTree:
        del variables, execution
        if clients_per_round > data.clients:
            raise ValueError(
                f"clients_per_round must be at most the {data.clients} clients, got "
                f"{clients_per_round}"
            )
        return ()

    def draw(
        key: Array, state: PyTree, data: ClientData, clients: Array, free: Array, visits: Array
    ) -> tuple[Array, PyTree]:
        del clients, visits
        slots = len(free)
        # Whole random words: a float32 in [0, 1) has 23 bits, coarse for a small q.
        coin = jax.random.bits(key, (data.clients,), jnp.uint32)
        heads = max(1, round(clients_per_round / data.clients * 2**32)) - 1
        first = jax.lax.top_k(~coin, min(slots, data.clients))[1].astype(jnp.int32)
        joined = jnp.where(coin[first] <= jnp.uint32(heads), first, data.clients)
        return jnp.pad(joined, (0, slots - len(first)), constant_values=data.clients), state

    return Selection(
        init=init,
        draw=draw,
        sticky=False,
        may_idle=True,
        active=clients_per_round,
        participation="poisson",
    )


@part
def shuffled() -> Selection:
    """Epochs of ⌊N/m⌋ rounds: in each the clients come in a new random order, none of them twice.

    The N mod m clients at an order's end sit the epoch out. :func:`epoch_rounds` is an epoch's
    length.

    Returns:
        A selection, for models that do not outlive a round; its state is the order and the round in
        its epoch.

    Raises:
        ValueError: in the first round, if there are more slots than clients.

    Source: Kairouz et al. 2021 <https://arxiv.org/abs/2103.00039>, section 2: a pass over the data
    in which each user takes part once.

    >>> data = ClientData(None, None, None, jnp.arange(8), 1)  # 7 clients
    >>> part, none = shuffled(), jnp.zeros(3, jnp.int32)
    >>> state, seen = part.init(None, data, None), []
    >>> for t in range(2):
    ...     drawn, state = part.draw(jax.random.key(t), state, data, none, none == 0, none)
    ...     seen += drawn.tolist()
    >>> len({*seen})
    6
    """

    def init(variables: Variables, data: ClientData, execution: object) -> tuple[Array, Array]:
        del variables, execution
        return jnp.arange(data.clients, dtype=jnp.int32), jnp.int32(0)

    def draw(
        key: Array,
        state: tuple[Array, Array],
        data: ClientData,
        clients: Array,
        free: Array,
        visits: Array,
    ) -> tuple[Array, tuple[Array, Array]]:
        del clients, visits
        order, t = state
        slots = len(free)
        if slots > data.clients:
            raise ValueError(f"slots must be at most the {data.clients} clients, got {slots}")
        order = jnp.where(t == 0, jax.random.permutation(key, order), order)
        drawn = jax.lax.dynamic_slice(order, (t * slots,), (slots,))
        return drawn, (order, (t + 1) % epoch_rounds(data.clients, slots))

    return Selection(init=init, draw=draw, sticky=False, participation="epochs")


@part
def cyclic() -> Selection:
    """The clients in a random order that is drawn once: all in turn, and from the first again.

    A client waits ⌊N/m⌋ or ⌈N/m⌉ rounds from visit to visit; nobody sits out.

    Returns:
        A selection, for models that do not outlive a round; its state is the order and how many of
        it have come, -1 before the first round.

    Raises:
        ValueError: in the first round, if there are more slots than clients.

    Source: Choquette-Choo et al. 2023 <https://arxiv.org/abs/2306.08153>, its
    b-min-separation.

    >>> data = ClientData(None, None, None, jnp.arange(6), 1)  # 5 clients
    >>> part, none = cyclic(), jnp.zeros(2, jnp.int32)
    >>> state, seen = part.init(None, data, None), []
    >>> for t in range(5):
    ...     drawn, state = part.draw(jax.random.key(t), state, data, none, none == 0, none)
    ...     seen += drawn.tolist()
    >>> sorted(seen[:5]), seen[5:] == seen[:5]
    ([0, 1, 2, 3, 4], True)
    """

    def init(variables: Variables, data: ClientData, execution: object) -> tuple[Array, Array]:
        del variables, execution
        return jnp.arange(data.clients, dtype=jnp.int32), jnp.int32(-1)

    def draw(
        key: Array,
        state: tuple[Array, Array],
        data: ClientData,
        clients: Array,
        free: Array,
        visits: Array,
    ) -> tuple[Array, tuple[Array, Array]]:
        del clients, visits
        order, first = state
        slots = len(free)
        if slots > data.clients:
            raise ValueError(f"slots must be at most the {data.clients} clients, got {slots}")
        order = jnp.where(first < 0, jax.random.permutation(key, order), order)
        first = jnp.maximum(first, 0)
        drawn = order[(first + jnp.arange(slots, dtype=jnp.int32)) % data.clients]
        return drawn, (order, (first + slots) % data.clients)

    return Selection(init=init, draw=draw, sticky=False, participation="cyclic")


def epoch_rounds(clients: int, clients_per_round: float) -> int:
    """The rounds in which clients of :func:`shuffled` or :func:`cyclic` do not come twice.

    >>> epoch_rounds(40, 6)
    6
    """
    return int(clients // clients_per_round)


def slots_for(clients_per_round: float) -> int:
    """Slots that a Poisson cohort of m clients on average exceeds once in a million rounds.

    The tail is Poisson's, which bounds that of any number of clients.

    Source: Anderson, Samuels 1967 <anderson1967some>, for the bound.

    >>> slots_for(100)
    151
    """
    from scipy import stats  # here, because the import takes half a second

    # Above its mean + 1 a binomial's tail is below that of the Poisson of the same mean.
    return int(stats.poisson.isf(OVERFLOW, clients_per_round))
