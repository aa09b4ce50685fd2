"""Poisson cohorts, and cohorts in a random order."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from fedjax_sim.base import Array, ClientData, Positive, PyTree, Selection, Variables

OVERFLOW = 1e-6
"""The largest probability that a round's Poisson cohort exceeds its slots."""


class poisson(Selection):
    """Poisson sampling: each client joins each round independently with probability q = m/N.

    Clients beyond the number of slots are dropped at random; see ``slots_for``. No model may
    outlive a round.

    Args:
        clients_per_round: m, the expected size of the cohort.

    Raises:
        ValueError: if there are fewer than m clients, or m is not positive.

    Source: McMahan et al. 2018 <https://arxiv.org/abs/1710.06963>, Algorithm 1.
    """

    clients_per_round: Positive

    may_idle = True
    participation = "poisson"

    @property
    def active(self) -> float:
        return self.clients_per_round

    def init(self, variables: Variables, data: ClientData, execution: object) -> PyTree:
        if self.clients_per_round > data.clients:
            raise ValueError(
                f"clients_per_round must be at most the {data.clients} clients, got "
                f"{self.clients_per_round}"
            )
        return ()

    def expected_visits(self, state: PyTree, data: ClientData, slots: int) -> Array:
        return jnp.full(data.clients, self.clients_per_round / data.clients, jnp.float32)

    def draw(
        self, key: Array, state: PyTree, data: ClientData, clients: Array, free: Array,
        visits: Array
    ) -> tuple[Array, PyTree]:  # fmt: skip
        slots = len(free)
        # Whole random words: a float32 in [0, 1) has 23 bits, too coarse for a small q.
        coin = jax.random.bits(key, (data.clients,), jnp.uint32)
        heads = max(1, round(self.clients_per_round / data.clients * 2**32)) - 1
        first = jax.lax.top_k(~coin, min(slots, data.clients))[1].astype(jnp.int32)
        joined = jnp.where(coin[first] <= jnp.uint32(heads), first, data.clients)
        return jnp.pad(joined, (0, slots - len(first)), constant_values=data.clients), state


class shuffled(Selection):
    """Epochs of ⌊N/m⌋ rounds, each with the clients in a new random order, without repetition.

    The N mod m clients at the end of an order do not train in the epoch; ``epoch_rounds`` is the
    length of an epoch. No model may outlive a round. The state is the order and the round in its
    epoch.

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

    participation = "epochs"

    def init(
        self, variables: Variables, data: ClientData, execution: object
    ) -> tuple[Array, Array]:
        return jnp.arange(data.clients, dtype=jnp.int32), jnp.int32(0)

    def draw(
        self, key: Array, state: tuple[Array, Array], data: ClientData, clients: Array,
        free: Array, visits: Array
    ) -> tuple[Array, tuple[Array, Array]]:  # fmt: skip
        (order, t), slots = state, _checked_slots(free, data)
        order = jnp.where(t == 0, jax.random.permutation(key, order), order)
        drawn = jax.lax.dynamic_slice(order, (t * slots,), (slots,))
        return drawn, (order, (t + 1) % epoch_rounds(data.clients, slots))


class cyclic(Selection):
    """The clients in a random order that is drawn once and repeated.

    A client waits ⌊N/m⌋ or ⌈N/m⌉ rounds between visits; no client is left out. No model may outlive
    a round. The state is the order and the position in it, -1 before the first round.

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

    participation = "cyclic"

    def init(
        self, variables: Variables, data: ClientData, execution: object
    ) -> tuple[Array, Array]:
        return jnp.arange(data.clients, dtype=jnp.int32), jnp.int32(-1)

    def draw(
        self, key: Array, state: tuple[Array, Array], data: ClientData, clients: Array,
        free: Array, visits: Array
    ) -> tuple[Array, tuple[Array, Array]]:  # fmt: skip
        (order, first), slots = state, _checked_slots(free, data)
        order = jnp.where(first < 0, jax.random.permutation(key, order), order)
        first = jnp.maximum(first, 0)
        drawn = order[(first + jnp.arange(slots, dtype=jnp.int32)) % data.clients]
        return drawn, (order, (first + slots) % data.clients)


def _checked_slots(free: Array, data: ClientData) -> int:
    """Returns the number of slots, if it is at most the number of clients."""
    if len(free) > data.clients:
        raise ValueError(f"slots must be at most the {data.clients} clients, got {len(free)}")
    return len(free)


def epoch_rounds(clients: int, clients_per_round: float) -> int:
    """Returns the number of rounds in which :func:`shuffled` and :func:`cyclic` repeat no client.

    >>> epoch_rounds(40, 6)
    6
    """
    return int(clients // clients_per_round)


def slots_for(clients_per_round: float) -> int:
    """Returns the slots that a Poisson cohort of mean m exceeds once in a million rounds.

    Source: Anderson, Samuels 1967 <anderson1967some>, for the Poisson bound on a binomial tail.

    >>> slots_for(100)
    151
    """
    from scipy import stats  # here, because the import takes half a second

    # Above its mean + 1, a binomial's tail is below the tail of the Poisson of the same mean.
    return int(stats.poisson.isf(OVERFLOW, clients_per_round))
