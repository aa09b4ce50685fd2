"""Power of choice: of some candidates, those that have the most to learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_sim.base import (
    Array,
    ClientData,
    ClientView,
    LocalInfo,
    Poll,
    PyTree,
    Selection,
    Variables,
    part,
)
from fedjax_sim.engine.draws import by_size


class Asked(NamedTuple):
    """What the candidates have said.

    Attributes:
        client: ``int32[d]``; N for who has not answered.
        score: ``f32[d]``.
    """

    client: Array
    score: Array


@part
def power_of_choice(
    candidates: int, score: Callable[[Variables, ClientView], Array] | None = None
) -> Selection:
    r"""Of d clients drawn in proportion to :math:`n_k`, those with the largest losses.

    .. math:: A \sim n_k / n, \; |A| = d, \qquad U = \text{the } m \text{ of } A
              \text{ with the largest } F_k(w)

    With a ``score`` the candidates are sent the server model and answer its loss on their own
    samples, 4 bytes each; those that train are not sent it again. Without one the losses are those
    that clients reported at their last visits, which costs no more than the reports; who has none
    comes first.

    Args:
        candidates: d, at least as many as are chosen; all clients if there are fewer. With as many
          as are chosen, clients are drawn in proportion to their samples.
        score: ``(variables, client) -> f32[]`` (:func:`fedjax_sim.reports.mean_loss`); None: the
          losses that are known.

    Returns:
        A selection for models that do not outlive a round.

    Raises:
        ValueError: if candidates is below 1; in the first round, if there are more slots.

    Source: Cho et al. 2022 <https://arxiv.org/abs/2010.01243>, section 4: π_pow-d, and π_rpow-d
    by what is known.
    """
    if candidates < 1:
        raise ValueError(f"candidates must be at least 1, got {candidates}")

    def whom(key: Array, state: PyTree, data: ClientData) -> Array:
        return by_size(key, min(candidates, data.clients), _starts(data))

    def chosen(client: Array, loss: Array, none: int, slots: int) -> Array:
        if slots > candidates:
            raise ValueError(f"candidates must be at least the {slots} slots, got {candidates}")
        first = jax.lax.top_k(jnp.where(client < none, loss, -jnp.inf), slots)[1]
        return client[first]

    if score is None:

        def by_known(
            key: Array, losses: Array, data: ClientData, clients: Array, free: Array, visits: Array
        ) -> tuple[Array, Array]:
            client = whom(key, (), data)
            known = losses.at[client].get(mode="fill", fill_value=-jnp.inf)
            return chosen(client, known, data.clients, len(free)), losses

        def update(losses: Array, client: Array, info: LocalInfo) -> Array:
            return losses.at[client].set(info.loss, mode="drop")

        return Selection(
            init=lambda variables, data, execution: jnp.full(data.clients, jnp.inf, jnp.float32),
            draw=by_known,
            sticky=False,
            update=update,
            reads=("loss",),
        )

    def init(variables: Variables, data: ClientData, execution: object) -> Asked:
        size = min(candidates, data.clients)
        return Asked(jnp.full(size, data.clients, jnp.int32), jnp.zeros(size, jnp.float32))

    def draw(
        key: Array, state: Asked, data: ClientData, clients: Array, free: Array, visits: Array
    ) -> tuple[Array, Asked]:
        return chosen(state.client, state.score, data.clients, len(free)), state

    def tell(state: Asked, client: Array, answers: Array) -> Asked:
        return Asked(client, answers)

    return Selection(init=init, draw=draw, sticky=False, poll=Poll(whom, tell, score))


def _starts(data: ClientData) -> Array:
    """``int32[N + 1]``, of each client in a list of all samples that count."""
    if data.budget is None:
        return data.start
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(data.budget, dtype=jnp.int32)])
