"""Selections by the clock: clients that are awake, and those that meet a deadline."""

from __future__ import annotations

import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    Need,
    Outlook,
    Poll,
    PyTree,
    Selection,
    Variables,
    part,
)
from fedjax_sim.engine.draws import distinct
from fedjax_sim.engine.needs import CLOCK, NO_FLIGHT

_SLEEPERS = Need(
    "clock",
    "clients that sleep at times",
    lambda parts: parts.clock is not None and parts.clock.available is not None,
    "selection=uniform(), or clock=simulated(..., available=bernoulli(p))",
)
_DEADLINE = Need(
    "clock",
    "rounds that end by a deadline",
    lambda parts: parts.clock is not None and parts.clock.deadline is not None,
    "clock=simulated(..., deadline=...), or --clock and --deadline",
)


@part
def awake() -> Selection:
    """Uniform draws without replacement among the clients that are awake, so that no slot idles.

    The server looks before it asks: a client that sleeps is not drawn. Slots are idle if fewer
    are awake.

    Returns:
        A selection without state, for a clock on which clients sleep.

    Source: Bonawitz et al. 2019 <https://arxiv.org/abs/1902.01046>, section 2.2, where devices
    check in and the server chooses among those.
    """

    def timed(
        key: Array,
        state: PyTree,
        data: ClientData,
        clients: Array,
        free: Array,
        visits: Array,
        outlook: Outlook,
    ) -> tuple[Array, PyTree]:
        return distinct(key, len(free), data.clients, allowed=outlook.awake), state

    return Selection(
        init=lambda variables, data, execution: (),
        draw=uniformly,
        sticky=False,
        timed=timed,
        needs=(_SLEEPERS,),
    )


@part
def within_deadline(candidates: int) -> Selection:
    r"""Of some random clients, as many as the clock says will meet its deadline.

    .. math:: \max_{U \subseteq A} |U| \quad \text{so that} \quad
              \max_{k \in U} \Bigl(\frac{\text{down}}{d_k} + T_k c_k + \frac{\text{up}}{u_k}
              \Bigr) \le \text{deadline}

    It is solved greedily, the fastest first; on a shared uplink each upload takes as long as there
    are clients in U. The candidates that are awake tell the seconds of a step and the rates of
    their link, 4 bytes each. Slots of those left out are idle. The authors' clients upload one
    after another, here they do as the clock says.

    Args:
        candidates: the size of A, which is drawn uniformly; at least the slots, all clients if
            there are fewer.

    Returns:
        A selection for a clock with a deadline, and models that do not outlive a round; its state
        is A.

    Raises:
        ValueError: if candidates is below 1; in the first round, if there are more slots.

    Source: Nishio, Yonetani 2019 <https://arxiv.org/abs/1804.08333>, section IV.
    """
    if candidates < 1:
        raise ValueError(f"candidates must be at least 1, got {candidates}")

    def init(variables: Variables, data: ClientData, execution: object) -> Array:
        return jnp.full(min(candidates, data.clients), data.clients, jnp.int32)

    def whom(key: Array, state: Array, data: ClientData) -> Array:
        return distinct(key, len(state), data.clients)

    def timed(
        key: Array,
        asked: Array,
        data: ClientData,
        clients: Array,
        free: Array,
        visits: Array,
        outlook: Outlook,
    ) -> tuple[Array, Array]:
        slots = len(free)
        if slots > candidates:
            raise ValueError(f"candidates must be at least the {slots} slots, got {candidates}")
        there = asked < data.clients
        alone = jnp.where(there, outlook.seconds(asked, 1), jnp.inf)
        queue = asked[jnp.argsort(alone)][:slots]
        place = jnp.arange(1, slots + 1, dtype=jnp.int32)
        # One more makes all uploads of a shared link longer: those that fit are a beginning.
        fits = (outlook.seconds(queue, place) <= outlook.deadline) & (queue < data.clients)
        return jnp.where(fits, queue, data.clients), asked

    return Selection(
        init=init,
        draw=uniformly,
        sticky=False,
        timed=timed,
        poll=Poll(whom, lambda state, client, answers: client, numbers=3),
        needs=(_DEADLINE, NO_FLIGHT),
    )


def uniformly(
    key: Array, state: PyTree, data: ClientData, clients: Array, free: Array, visits: Array
) -> tuple[Array, PyTree]:
    """The draw without a clock, by which nobody is asleep or slow."""
    return distinct(key, len(free), data.clients), state


NEEDS_SECONDS = (CLOCK, NO_FLIGHT)
"""Of selections that look at seconds, and whose models come back in the round."""
