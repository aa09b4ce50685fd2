"""Selections by the clock: clients that are awake, and clients that meet a deadline."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    Count,
    Need,
    Outlook,
    PerClient,
    PyTree,
    Selection,
    Variables,
)
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
    """Draws clients uniformly without replacement among those that are awake.

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
    r"""FedCS: as many of some random clients as will meet the deadline of the clock.

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
        ValueError: if candidates is below 1; in the first round, if there are more slots.

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
